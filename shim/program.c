/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What can be known of a main program that has Mooncake linked into it: see program.h.
 *
 * Its flags are asked from gflags where that is a library (in all wheels), which knows defaults,
 * flag files and the environment; else read from the command line.
 */
#include "shim/program.h"

#include "shim/abi.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/socket.h>
#include <unistd.h>

/* typeinfo name of mooncake::RealClient: mooncake_client has it, mooncake_master has not */
#define STORE_MARK "N8mooncake10RealClientE"
/* bool google::GetCommandLineOption(const char *, std::string *), and under its newer namespace */
#define FLAG_GOOGLE                                                                                \
    "_ZN6google20GetCommandLineOptionEPKcPNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define FLAG_GFLAGS                                                                                \
    "_ZN6gflags20GetCommandLineOptionEPKcPNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

#define FLAG_BYTES 256

/* ---- its memory
 * ------------------------------------------------------------------------------------ */

struct headers {
    const ElfW(Phdr) * first;
    size_t count;
    uintptr_t base;
};

/* The kernel's word on where the program's headers are: no lock of the dynamic linker. */
static struct headers program_headers(void) {
    struct headers headers = {(const ElfW(Phdr) *)getauxval(AT_PHDR), getauxval(AT_PHNUM), 0};

    for (size_t i = 0; headers.first && i < headers.count; i++) {
        if (headers.first[i].p_type == PT_PHDR) {
            headers.base = (uintptr_t)headers.first - headers.first[i].p_vaddr;
            return headers;
        }
    }
    /* None: static programs, into which nothing is preloaded anyway. */
    return (struct headers){0};
}

bool tp_program_holds(const void *address) {
    struct headers headers = program_headers();
    uintptr_t wanted = (uintptr_t)address;

    for (size_t i = 0; i < headers.count; i++) {
        const ElfW(Phdr) *header = &headers.first[i];
        if (header->p_type == PT_LOAD &&
            wanted - (headers.base + header->p_vaddr) < header->p_memsz) {
            return true;
        }
    }
    return false;
}

static bool is_store;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

static void look(void) {
    struct headers headers = program_headers();

    for (size_t i = 0; i < headers.count && !is_store; i++) {
        const ElfW(Phdr) *header = &headers.first[i];
        if (header->p_type == PT_LOAD && (header->p_flags & PF_R) && !(header->p_flags & PF_W)) {
            is_store = memmem((const void *)(headers.base + header->p_vaddr), header->p_filesz,
                              STORE_MARK, sizeof(STORE_MARK)) != NULL;
        }
    }
}

bool tp_program_is_store(void) {
    pthread_once(&looked, look);
    return is_store;
}

/* ---- its flags
 * -------------------------------------------------------------------------------------- */

/* 0, or -ENOENT when gflags is no library here or has no such flag. */
static int flag_of_gflags(const char *name, char ret_value[static FLAG_BYTES]) {
    bool (*get)(const char *, struct cxx_string *) = NULL;
    void (*operator_delete)(void *) = NULL;
    struct cxx_string text = {.data = text.u.local};
    void *symbol = dlsym(RTLD_DEFAULT, FLAG_GFLAGS);
    void *release = dlsym(RTLD_DEFAULT, "_ZdlPv");
    int result = -ENOENT;

    if (!symbol) {
        symbol = dlsym(RTLD_DEFAULT, FLAG_GOOGLE);
    }
    if (!symbol || !release) {
        return -ENOENT;
    }
    memcpy(&get, &symbol, sizeof(get));
    memcpy(&operator_delete, &release, sizeof(operator_delete));
    if (get(name, &text) && text.bytes < FLAG_BYTES) {
        memcpy(ret_value, text.data, text.bytes);
        ret_value[text.bytes] = '\0';
        result = 0;
    }
    if (text.data != text.u.local) {
        operator_delete(text.data);
    }
    return result;
}

/* Is `word` the flag `name`, with one dash or two? *ret_value: what follows its "=", else NULL. */
static bool is_flag(const char *word, const char *name, const char **ret_value) {
    size_t length = strlen(name);

    if (*word != '-') {
        return false;
    }
    word += word[1] == '-' ? 2 : 1;
    if (strncmp(word, name, length) != 0 || (word[length] != '\0' && word[length] != '=')) {
        return false;
    }
    *ret_value = word[length] == '=' ? word + length + 1 : NULL;
    return true;
}

/* The last one counts, as gflags has it. 0, -ENOENT, or -errno: the flags cannot be read. */
static int flag_of_command_line(const char *name, char ret_value[static FLAG_BYTES]) {
    FILE *file = fopen("/proc/self/cmdline", "re");
    char *word = NULL;
    size_t room = 0;
    bool wanted = false; /* the word before was the flag itself */
    int result = file ? -ENOENT : -errno;

    while (file && getdelim(&word, &room, '\0', file) > 0 && word) {
        const char *value = wanted ? word : NULL;
        wanted = !value && is_flag(word, name, &value) && !value;
        if (value && strlen(value) < FLAG_BYTES) {
            memcpy(ret_value, value, strlen(value) + 1);
            result = 0;
        }
    }
    free(word);
    if (file) {
        (void)fclose(file);
    }
    return result;
}

static int flag(const char *name, char ret_value[static FLAG_BYTES]) {
    int result = flag_of_gflags(name, ret_value);
    return result == 0 ? 0 : flag_of_command_line(name, ret_value);
}

/* ---- its ports
 * -------------------------------------------------------------------------------------- */

/* The program's listening sockets in order, each (fd << 16 | port); 0: none yet. Setup tries twenty
 * times at most, with two sockets each. */
#define LISTENERS 64
static _Atomic uint64_t listeners[LISTENERS];
static _Atomic unsigned listener_count;

/* The port of an IPv4 or IPv6 socket; 0 for others. */
static unsigned port_of(int fd) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address = {0};
    socklen_t bytes = sizeof(address);

    if (getsockname(fd, &address.any, &bytes) != 0) {
        return 0;
    }
    if (address.any.sa_family == AF_INET) {
        return ntohs(address.v4.sin_port);
    }
    return address.any.sa_family == AF_INET6 ? ntohs(address.v6.sin6_port) : 0;
}

void tp_program_listens(int fd) {
    int error = errno;
    unsigned port = port_of(fd);

    if (port != 0 && atomic_load(&listener_count) < LISTENERS) {
        unsigned index = atomic_fetch_add(&listener_count, 1);
        if (index < LISTENERS) {
            atomic_store(&listeners[index], (uint64_t)(unsigned)fd << 16 | port);
        }
    }
    errno = error;
}

/*
 * The first that still listens: those of attempts that failed are closed, and the data port, which
 * versions with asio inside the program (up to 0.3.8) open from it too, comes after the
 * handshake's. 0: there is none.
 */
static unsigned handshake_port(void) {
    for (unsigned i = 0; i < LISTENERS; i++) {
        uint64_t listener = atomic_load(&listeners[i]);
        int fd = (int)(listener >> 16);
        int listens = 0;
        socklen_t size = sizeof(listens);
        if (listener != 0 && port_of(fd) == (listener & 0xffff) &&
            getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens) {
            return (unsigned)(listener & 0xffff);
        }
    }
    return 0;
}

static unsigned number_from(const char *variable, unsigned otherwise) {
    const char *text = getenv(variable);
    char *end = NULL;
    unsigned long value = text ? strtoul(text, &end, 10) : 0;

    return text && end != text && value > 0 && value < 65536 ? (unsigned)value : otherwise;
}

/* The port of a TCP socket that is bound and neither listens nor is connected; 0 for others. */
static unsigned reserved_port(int fd) {
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof(peer);
    int listens = 1;
    int type = 0;
    socklen_t size = sizeof(int);

    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM ||
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens ||
        getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0) {
        return 0;
    }
    return port_of(fd);
}

/*
 * Without a port in --host, Mooncake reserves one for its name: it binds a socket in this range and
 * keeps it as it is (AutoPortBinder; MC_STORE_CLIENT_MIN_PORT, MC_STORE_CLIENT_MAX_PORT). 0: there
 * is none, or more than one.
 */
static unsigned name_port(void) {
    unsigned low = number_from("MC_STORE_CLIENT_MIN_PORT", 12300);
    unsigned high = number_from("MC_STORE_CLIENT_MAX_PORT", 14300);
    DIR *folder = opendir("/proc/self/fd");
    unsigned found = 0;
    unsigned count = 0;
    struct dirent *entry;

    while (folder && (entry = readdir(folder))) {
        unsigned port = reserved_port((int)strtol(entry->d_name, NULL, 10));
        if (port >= low && port <= high) {
            found = port;
            count++;
        }
    }
    if (folder) {
        (void)closedir(folder);
    }
    return count == 1 ? found : 0;
}

/* ---- its name
 * --------------------------------------------------------------------------------------- */

/* Split "host", "host:port", "[v6]:port" or a bare IPv6 address. *ret_port: the text after the
 * colon, or NULL. Changes `text`. */
static const char *split_host(char *text, const char **ret_port) {
    struct in6_addr address;
    char *colon = strrchr(text, ':');

    *ret_port = NULL;
    if (*text == '[') {
        char *end = strchr(text, ']');
        if (end) {
            *ret_port = end[1] == ':' ? end + 2 : NULL;
            *end = '\0';
        }
        return text + 1;
    }
    if (colon && inet_pton(AF_INET6, text, &address) != 1) {
        *colon = '\0';
        *ret_port = colon + 1;
    }
    return text;
}

int tp_program_name(char *ret_name, size_t name_bytes, const char **ret_reason) {
    char metadata[FLAG_BYTES];
    char host[FLAG_BYTES];
    char given[FLAG_BYTES];
    const char *given_port;
    struct in6_addr address;

    int result = flag("host", given);
    if (result == 0) {
        result = flag("metadata_server", metadata);
    }
    if (result != 0) {
        *ret_reason = result == -EMFILE || result == -ENFILE
                          ? "too many open files to read its command line: raise ulimit -n"
                          : "it has no flags --host and --metadata_server";
        return -ENOENT;
    }
    memcpy(host, given, sizeof(host));
    const char *plain = split_host(host, &given_port);
    bool handshake = strcmp(metadata, "P2PHANDSHAKE") == 0;
    int length;
    if (!handshake && given_port) {
        length = snprintf(ret_name, name_bytes, "%s", given);
    } else {
        unsigned port = handshake ? handshake_port() : name_port();
        if (port == 0) {
            *ret_reason = handshake ? "it listens on no port yet"
                                    : "its port was not found: give it with --host=HOST:PORT";
            return -ENOENT;
        }
        /* With the handshake the name is getLocalIpAndPort's, which puts no brackets around IPv6.
         */
        bool v6 = !handshake && inet_pton(AF_INET6, plain, &address) == 1;
        length = snprintf(ret_name, name_bytes, v6 ? "[%s]:%u" : "%s:%u", plain, port);
    }
    if (length < 0 || (size_t)length >= name_bytes) {
        *ret_reason = "it is too long";
        return -ENOENT;
    }
    return 0;
}
