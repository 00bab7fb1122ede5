/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mooncake's RealClient as far as its batch calls go, for the tests of hooks_batch.c: declared
 * under Mooncake's own names, so that the compiler makes the mangled ones and so checks the table.
 * Behind them, the hooks call `original`, which tests replace.
 */
#ifndef PARTS_CLIENT_H
#define PARTS_CLIENT_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mooncake {
/* As 0.3.13 has it. */
struct ReplicateConfig13 {
    size_t replica_num = 1, nof_replica_num = 0, dfs_replica_num = 0;
    int soft_pin_action = 0;
    std::optional<uint64_t> soft_pin_ttl_ms;
    bool with_hard_pin = false;
    std::vector<std::string> preferred_segments;
    std::string preferred_segment;
    std::vector<std::string> preferred_nof_segments;
    bool prefer_alloc_in_same_node = false;
    uint8_t data_type = 0;
    std::string host_id;
    std::optional<std::vector<std::string>> group_ids;
};
/* What 0.3.14 has added. */
struct ReplicateConfig : ReplicateConfig13 {
    std::optional<std::vector<std::string>> session_ids;
    std::optional<std::vector<std::string>> preferred_hca_names;
    std::optional<std::vector<std::vector<std::string>>> per_key_preferred_hca_names;
    std::optional<std::vector<std::string>> residency_affinity_ids;
};
static_assert(sizeof(ReplicateConfig13) == 208 && sizeof(ReplicateConfig) == 336);

using Keys = std::vector<std::string>;
using Buffers = std::vector<void *>;
using Sizes = std::vector<size_t>;
class RealClient {
  public:
    std::vector<int64_t> batch_get_into(const Keys &keys, const Buffers &buffers,
                                        const Sizes &sizes);
    std::vector<int> batch_get_into_multi_buffers(const Keys &keys,
                                                  const std::vector<Buffers> &buffers,
                                                  const std::vector<Sizes> &sizes, bool same_node);
    std::vector<int> batch_put_from(const Keys &keys, const Buffers &buffers, const Sizes &sizes,
                                    const ReplicateConfig &config);
    std::vector<int> batch_put_from_multi_buffers(const Keys &keys,
                                                  const std::vector<Buffers> &buffers,
                                                  const std::vector<Sizes> &sizes,
                                                  const ReplicateConfig &config, bool stage);
};
} // namespace mooncake

using namespace mooncake;

extern "C" {
/* parts_doubles.c */
extern unsigned double_threads_left, double_threads_started, double_lines;
unsigned long double_divided(void);
extern size_t double_element_bytes;
extern bool double_layout_refused;
void set_calls(bool get, bool put, unsigned threads);
void tp_fork_guard(void); /* from here on, this process is a forked child */
}

inline void require(bool right, const char *what, const char *file, int line) {
    if (!right) {
        std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
        std::_Exit(1);
    }
}
#define REQUIRE(what) require((what), #what, __FILE__, __LINE__)

/* One run of the original: the position of its first key in the call, and the number of keys. */
struct Run {
    size_t first, count;
    bool flag;
    const ReplicateConfig *config;
};
/* What the original does; results are made for it afterwards. */
extern std::function<void(const Run &)> original;
extern RealClient client;
/* Tests that have two equal keys, or a key with another number of sizes than buffers, switch these
 * off. */
extern bool keys_in_order, sizes_even;
/* The run with this key gives one result too few. */
extern size_t short_key;

constexpr size_t MIB = 1 << 20;

/* A call whose every argument and result tells which key it belongs to. */
struct Call {
    Keys keys;
    Buffers buffers;
    Sizes sizes;
    std::vector<Buffers> all_buffers;
    std::vector<Sizes> all_sizes;
    ReplicateConfig config;

    Call(size_t count, size_t bytes);
    /* 0 to 3: get, multi get, put, multi put. The result of key i, from any of them, is i. */
    std::vector<int64_t> run(int kind, bool flag = false) const;
    void check(const std::vector<int64_t> &results) const;
};

#endif
