/* SPDX-License-Identifier: Apache-2.0 */
/* See parts_client.h. */
#include "parts_client.h"

std::function<void(const Run &)> original = [](const Run &) {};
RealClient client;
bool keys_in_order = true, sizes_even = true;
size_t short_key = SIZE_MAX;

/* Keys are their positions, of one width; some too long for a short string. */
static std::string name_of(size_t i) {
    char text[64];
    std::snprintf(text, sizeof(text),
                  i % 3 == 0 ? "%08zu-a key that is too long for a short string" : "%08zu", i);
    return text;
}
static void *address_of(size_t i) {
    return reinterpret_cast<void *>(0x1000 + i);
}

Call::Call(size_t count, size_t bytes) {
    for (size_t i = 0; i < count; i++) {
        keys.push_back(name_of(i));
        buffers.push_back(address_of(i));
        sizes.push_back(bytes);
        all_buffers.push_back({address_of(i), address_of(i + 1)});
        all_sizes.push_back({bytes / 2, bytes - bytes / 2});
    }
}

/* What the original sees: its keys follow each other, and the buffers are theirs. */
static Run run_of(const Keys *keys, const void *first_buffer, bool flag,
                  const ReplicateConfig *config) {
    size_t first = keys->empty() ? 0 : reinterpret_cast<size_t>(first_buffer) - 0x1000;
    for (size_t i = 0; i < keys->size() && keys_in_order; i++)
        REQUIRE((*keys)[i] == name_of(first + i));
    return {first, keys->size(), flag, config};
}
template <class Result> static std::vector<Result> answer(const Run &run) {
    original(run);
    std::vector<Result> results;
    bool cut = short_key >= run.first && short_key - run.first < run.count;
    for (size_t i = cut; i < run.count; i++)
        results.push_back(static_cast<Result>(run.first + results.size()));
    return results;
}
template <class Result>
static std::vector<Result> single(const Keys *keys, const Buffers *buffers, const Sizes *sizes,
                                  const ReplicateConfig *config) {
    Run run = run_of(keys, keys->empty() ? nullptr : buffers->front(), false, config);
    for (size_t i = 0; i < run.count && i < buffers->size(); i++)
        REQUIRE((*buffers)[i] == address_of(run.first + i));
    if (run.first > 0)
        REQUIRE(buffers->size() == run.count && sizes->size() == run.count);
    return answer<Result>(run);
}
static std::vector<int> multi(const Keys *keys, const std::vector<Buffers> *buffers,
                              const std::vector<Sizes> *sizes, const ReplicateConfig *config,
                              bool flag) {
    Run run = run_of(keys, keys->empty() ? nullptr : buffers->front().front(), flag, config);
    REQUIRE(buffers->size() == run.count && sizes->size() == run.count);
    for (size_t i = 0; i < run.count; i++) {
        REQUIRE((*buffers)[i].size() == 2 && ((*sizes)[i].size() == 2 || !sizes_even));
        REQUIRE((*buffers)[i][1] == address_of(run.first + i + 1));
    }
    return answer<int>(run);
}

static std::vector<int64_t> get_into(RealClient *self, const Keys *keys, const Buffers *buffers,
                                     const Sizes *sizes) {
    REQUIRE(self == &client);
    return single<int64_t>(keys, buffers, sizes, nullptr);
}
static std::vector<int> get_multi(RealClient *self, const Keys *keys,
                                  const std::vector<Buffers> *buffers,
                                  const std::vector<Sizes> *sizes, bool same_node) {
    REQUIRE(self == &client);
    return multi(keys, buffers, sizes, nullptr, same_node);
}
static std::vector<int> put_from(RealClient *self, const Keys *keys, const Buffers *buffers,
                                 const Sizes *sizes, const ReplicateConfig *config) {
    REQUIRE(self == &client);
    return single<int>(keys, buffers, sizes, config);
}
static std::vector<int> put_multi(RealClient *self, const Keys *keys,
                                  const std::vector<Buffers> *buffers,
                                  const std::vector<Sizes> *sizes, const ReplicateConfig *config,
                                  bool stage) {
    REQUIRE(self == &client);
    return multi(keys, buffers, sizes, config, stage);
}

/* In the order of hooks.def. */
extern "C" {
extern void *originals[4];
void *originals[4] = {(void *)get_into, (void *)get_multi, (void *)put_from, (void *)put_multi};
}

std::vector<int64_t> Call::run(int kind, bool flag) const {
    if (kind == 0)
        return client.batch_get_into(keys, buffers, sizes);
    std::vector<int> results =
        kind == 1 ? client.batch_get_into_multi_buffers(keys, all_buffers, all_sizes, flag)
        : kind == 2
            ? client.batch_put_from(keys, buffers, sizes, config)
            : client.batch_put_from_multi_buffers(keys, all_buffers, all_sizes, config, flag);
    return {results.begin(), results.end()};
}

void Call::check(const std::vector<int64_t> &results) const {
    REQUIRE(results.size() == keys.size());
    for (size_t i = 0; i < results.size(); i++)
        REQUIRE(results[i] == static_cast<int64_t>(i));
}
