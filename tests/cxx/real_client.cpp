/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A C++ program that uses Mooncake's RealClient without python, as LMCache's multi-process server
 * does: it opens a wheel's store module under whatever name it is given, and calls the class
 * through its exported functions.
 *
 *   real_client MODULE MASTER SEGMENT_BYTES       then commands on standard input, an answer each:
 *   put KEY BYTES SEED | get KEY BYTES SEED | close
 */
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace mooncake {
class RealClient;
class TransferEngine;
} // namespace mooncake

using Client = mooncake::RealClient;
using Text = const std::string &;

#define STRING "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define CLASS "_ZN8mooncake10RealClient"

/* A method is an ordinary function whose first parameter is the object. */
template <class Function> static Function *find(void *module, const char *name) {
    void *symbol = dlsym(module, name);
    if (!symbol)
        std::cerr << "no " << name << "\n";
    return reinterpret_cast<Function *>(symbol);
}

struct Calls {
    std::shared_ptr<Client> (*create)();
    int (*setup)(Client *, Text, Text, size_t, size_t, Text, Text, Text,
                 const std::shared_ptr<mooncake::TransferEngine> &, Text, bool, Text, Text, bool,
                 int);
    int (*enroll)(Client *, void *, size_t);
    int (*put)(Client *, Text, void *, size_t, const void *config);
    int64_t (*get)(Client *, Text, void *, size_t);

    bool load(void *module) {
        create = find<std::shared_ptr<Client>()>(module, CLASS "6createEv");
        setup = find<std::remove_pointer_t<decltype(setup)>>(
            module, CLASS "10setup_realERK" STRING
                          "S8_mmS8_S8_S8_RKSt10shared_ptrINS_14TransferEngineEES8_bS8_S8_bi");
        enroll =
            find<std::remove_pointer_t<decltype(enroll)>>(module, CLASS "15register_bufferEPvm");
        put = find<std::remove_pointer_t<decltype(put)>>(
            module, CLASS "8put_fromERK" STRING "PvmRKNS_15ReplicateConfigE");
        get = find<std::remove_pointer_t<decltype(get)>>(module,
                                                         CLASS "8get_intoERK" STRING "Pvm");
        return create && setup && enroll && put && get;
    }
};

static void fill(std::vector<uint64_t> &words, size_t words_used, uint64_t seed) {
    for (size_t i = 0; i < words_used; i++)
        words[i] = (seed + i) * UINT64_C(0x9e3779b97f4a7c15);
}

/* Answers one command. */
static std::string answer(const Calls &calls, Client *client, std::vector<uint64_t> &buffer,
                          const std::string &line) {
    /* A ReplicateConfig of any version: replica_num, which comes first, and nothing else set. */
    static const size_t config[128] = {1};
    std::istringstream words(line);
    std::string what, key;
    size_t bytes = 0;
    uint64_t seed = 0;

    words >> what >> key >> bytes >> seed;
    if (bytes % sizeof(uint64_t) != 0 || bytes > buffer.size() * sizeof(uint64_t))
        return "refused";
    size_t used = bytes / sizeof(uint64_t);
    if (what == "put") {
        fill(buffer, used, seed);
        return std::to_string(calls.put(client, key, buffer.data(), bytes, config));
    }
    std::vector<uint64_t> expected(used);
    fill(expected, used, seed);
    std::memset(buffer.data(), 0x5a, bytes);
    int64_t got = calls.get(client, key, buffer.data(), bytes);
    bool equal = std::memcmp(buffer.data(), expected.data(), bytes) == 0;
    return std::to_string(got) + (equal ? " equal" : " other");
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    void *module = dlopen(argv[1], RTLD_LAZY | RTLD_LOCAL);
    Calls calls{};
    if (!module || !calls.load(module)) {
        std::cerr << (module ? "not a store module" : dlerror()) << "\n";
        return 3;
    }
    std::vector<uint64_t> buffer((32 << 20) / sizeof(uint64_t));
    auto client = calls.create();
    int rc = calls.setup(client.get(), "127.0.0.1", "P2PHANDSHAKE", std::stoull(argv[3]), 16 << 20,
                         "tcp", "", argv[2], nullptr, "", false, "", "default", false, 9300);
    if (rc == 0)
        rc =
            calls.enroll(client.get(), buffer.data(), buffer.size() * sizeof(uint64_t));
    std::cout << rc << std::endl;
    std::string line;
    while (rc == 0 && std::getline(std::cin, line) && line != "close")
        std::cout << answer(calls, client.get(), buffer, line) << std::endl;
    client.reset();
    std::cout << "closed" << std::endl;
    return rc == 0 ? 0 : 1;
}
