/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for programs that have Mooncake's store linked into them, such as mooncake_client:
 * what such a program asks of libc, in its order, and the class by whose name it is known (CLIENT
 * is RealClient; with another name it is some program that asks the same of libc).
 *
 *   program BYTES [flags]       prints the handshake's port and the segment's address, then obeys
 *   free | again | fork | small | listen        on standard input, an answer each
 */
#include <arpa/inet.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace mooncake {
class CLIENT {
  public:
    virtual ~CLIENT();
    virtual unsigned listens(int *fd);
    virtual void *segment(size_t bytes);
};

CLIENT::~CLIENT() {
}

/* A listening socket on a port of the kernel's choice. */
unsigned CLIENT::listens(int *ret_fd) {
    int fd = *ret_fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    socklen_t bytes = sizeof(address);
    address.sin_family = AF_INET;
    if (bind(fd, reinterpret_cast<sockaddr *>(&address), bytes) != 0 || listen(fd, 8) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&address), &bytes) != 0)
        return 0;
    return ntohs(address.sin_port);
}

void *CLIENT::segment(size_t bytes) {
    return aligned_alloc(16 << 20, bytes);
}
} // namespace mooncake

/* A child that ends what it has inherited, as destructors at its exit do. */
static int fork_and_free(void *segment) {
    pid_t child = fork();
    if (child == 0) {
        free(segment);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    size_t bytes = strtoull(argv[1], nullptr, 0);
    auto *client = new mooncake::CLIENT;
    int fd;
    client->listens(&fd); /* an attempt that fails, */
    close(fd);
    unsigned port = client->listens(&fd); /* the handshake, */
    client->listens(&fd);                 /* and the data port */
    void *segment = client->segment(bytes);
    int error = segment ? 0 : errno;
    std::cout << port << " " << segment << " " << error << std::endl;
    std::string line;
    while (std::getline(std::cin, line)) {
        if (line == "free") {
            free(segment);
            segment = nullptr;
        } else if (line == "again") {
            segment = client->segment(bytes);
        } else if (line == "fork") {
            error = fork_and_free(segment);
        } else if (line == "listen") {
            client->listens(&fd);
        } else if (line == "small") { /* what is no segment */
            void *block = aligned_alloc(64, 1 << 20);
            memset(block, 1, 1 << 20);
            free(block);
        }
        std::cout << port << " " << segment << " " << error << std::endl;
    }
    free(segment);
    delete client;
    return 0;
}
