/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: the brackets around BatchGet and BatchPut are called by C++ under Mooncake's own
 * declarations, hand every argument and the result through, and let exceptions pass. The
 * declarations have the names that the mangled ones are made of, so the compiler itself checks the
 * table; what lies behind the types does not matter.
 */
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace tl {
template <class T, class E> struct expected { long value = 0, error = 0; };
} // namespace tl

namespace mooncake {
enum class ErrorCode : int { OK };
struct QueryResult {};
struct Slice {
    void *address = nullptr;
    size_t bytes = 0;
};
struct ReplicateConfig {
    int replicas = 1;
};
struct Replica {
    struct Descriptor {};
};
using Results = std::vector<tl::expected<void, ErrorCode>>;
using Keys = std::vector<std::string>;
using Slices = std::vector<Slice>;
using Map = std::unordered_map<std::string, Slices>;
using Stager = std::function<tl::expected<Slices, ErrorCode>(const Slices &)>;

class Client {
  public:
    Results BatchGet(const Keys &keys, Map &slices);
    Results BatchGet(const Keys &keys,
                     const std::vector<std::vector<Replica::Descriptor>> &replicas, Map &slices);
    Results BatchGet(const Keys &keys, const std::vector<QueryResult> &queried, Map &slices,
                     bool same_node = false);
    Results BatchPut(const Keys &keys, std::vector<Slices> &slices, const ReplicateConfig &config);
    Results BatchPut(const Keys &keys, std::vector<Slices> &slices, const ReplicateConfig &config,
                     const Stager &stager);
    Results BatchPut(const Keys &keys, std::vector<Slices> &slices, const ReplicateConfig &config,
                     const Stager &stager, bool flag);
    Results BatchUpsert(const Keys &keys, std::vector<Slices> &slices,
                        const ReplicateConfig &config);
    Results BatchUpsert(const Keys &keys, std::vector<Slices> &slices,
                        const ReplicateConfig &config, const Stager &stager);
    Results BatchUpsert(const Keys &keys, std::vector<Slices> &slices,
                        const ReplicateConfig &config, const Stager &stager, bool flag);
};
} // namespace mooncake

using namespace mooncake;
extern "C" {
extern int gathering, gathered;
void set_batched(bool get, bool put);
}

static bool throwing;
static int expected_gathering;
static const void *seen[8];
static bool seen_flag;

static void require(bool right, const char *what, int line) {
    if (!right) {
        std::fprintf(stderr, "bracket.cpp:%d: %s\n", line, what);
        std::exit(1);
    }
}
#define REQUIRE(what) require((what), #what, __LINE__)

template <class... A> static Results original(A... arguments) {
    int at = 0;
    ((seen[at++] = arguments), ...);
    REQUIRE(gathering == expected_gathering);
    if (throwing) {
        throw std::runtime_error("as Mooncake might");
    }
    Results results(3);
    results[2].value = 77;
    return results;
}

static Results get(Client *self, const Keys *keys, Map *slices) {
    return original((const void *)self, (const void *)keys, (const void *)slices);
}
static Results get_more(Client *self, const Keys *keys, const void *more, Map *slices) {
    return original((const void *)self, (const void *)keys, more, (const void *)slices);
}
static Results get_flag(Client *self, const Keys *keys, const void *more, Map *slices, bool flag) {
    seen_flag = flag;
    return get_more(self, keys, more, slices);
}
static Results put(Client *self, const Keys *keys, std::vector<Slices> *slices,
                   const ReplicateConfig *config) {
    return original((const void *)self, (const void *)keys, (const void *)slices,
                    (const void *)config);
}
static Results put_staged(Client *self, const Keys *keys, std::vector<Slices> *slices,
                          const ReplicateConfig *config, const Stager *stager) {
    return original((const void *)self, (const void *)keys, (const void *)slices,
                    (const void *)config, (const void *)stager);
}
static Results put_flag(Client *self, const Keys *keys, std::vector<Slices> *slices,
                        const ReplicateConfig *config, const Stager *stager, bool flag) {
    seen_flag = flag;
    return put_staged(self, keys, slices, config, stager);
}

/* In the order of hooks.def. */
extern "C" {
extern void *originals[9];
void *originals[9] = {(void *)get, (void *)get_more,   (void *)get_flag,
                      (void *)put, (void *)put_staged, (void *)put_flag,
                      (void *)put, (void *)put_staged, (void *)put_flag};
}

struct Call {
    const char *name;
    bool is_get;
    std::function<Results(bool flag)> run;
    std::vector<const void *> arguments;
    bool has_flag;
};

static void check(const Call &call, bool on) {
    std::fprintf(stderr, "%s, %s\n", call.name, on ? "on" : "off");
    set_batched(on && call.is_get, on && !call.is_get);
    expected_gathering = on;
    for (bool flag : {true, false}) {
        int before = gathered;
        throwing = false;
        seen_flag = !flag;
        Results results = call.run(flag);
        REQUIRE(results.size() == 3 && results[2].value == 77);
        REQUIRE(gathering == 0 && gathered == before + on);
        REQUIRE(!call.has_flag || seen_flag == flag);
        for (size_t i = 0; i < call.arguments.size(); i++) {
            REQUIRE(seen[i] == call.arguments[i]);
        }
        throwing = true;
        bool caught = false;
        try {
            call.run(flag);
        } catch (const std::runtime_error &) {
            caught = true;
        }
        REQUIRE(caught); /* it passes through; the bracket stays open until the next one ends */
        REQUIRE(gathering == on && gathered == before + 2 * on);
        throwing = false;
        call.run(flag);
        REQUIRE(gathering == 0 && gathered == before + 3 * on);
    }
}

int main() {
    Client client;
    Keys keys{"a", "b", "c"};
    Map map;
    std::vector<std::vector<Replica::Descriptor>> replicas;
    std::vector<QueryResult> queried;
    std::vector<Slices> slices;
    ReplicateConfig config;
    Stager stager;
    /* batch_put_from_multi_buffers calls through a pointer to member. */
    Results (Client::*member)(const Keys &, std::vector<Slices> &, const ReplicateConfig &,
                              const Stager &, bool) = &Client::BatchPut;
    const Call calls[] = {
        {"get",
         true,
         [&](bool) { return client.BatchGet(keys, map); },
         {&client, &keys, &map},
         false},
        {"get, replicas",
         true,
         [&](bool) { return client.BatchGet(keys, replicas, map); },
         {&client, &keys, &replicas, &map},
         false},
        {"get, queried",
         true,
         [&](bool flag) { return client.BatchGet(keys, queried, map, flag); },
         {&client, &keys, &queried, &map},
         true},
        {"put",
         false,
         [&](bool) { return client.BatchPut(keys, slices, config); },
         {&client, &keys, &slices, &config},
         false},
        {"put, staged",
         false,
         [&](bool) { return client.BatchPut(keys, slices, config, stager); },
         {&client, &keys, &slices, &config, &stager},
         false},
        {"put, flag",
         false,
         [&](bool flag) { return client.BatchPut(keys, slices, config, stager, flag); },
         {&client, &keys, &slices, &config, &stager},
         true},
        {"upsert",
         false,
         [&](bool) { return client.BatchUpsert(keys, slices, config); },
         {&client, &keys, &slices, &config},
         false},
        {"upsert, staged",
         false,
         [&](bool) { return client.BatchUpsert(keys, slices, config, stager); },
         {&client, &keys, &slices, &config, &stager},
         false},
        {"upsert, flag",
         false,
         [&](bool flag) { return client.BatchUpsert(keys, slices, config, stager, flag); },
         {&client, &keys, &slices, &config, &stager},
         true},
        {"put, flag, member",
         false,
         [&](bool flag) { return (client.*member)(keys, slices, config, stager, flag); },
         {&client, &keys, &slices, &config, &stager},
         true},
    };
    for (const Call &call : calls) {
        check(call, false);
        check(call, true);
    }
    return 0;
}
