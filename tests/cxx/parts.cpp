/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: a large batched call runs in parts that hold every key once, with its own buffers and
 * sizes, and its results come back in the order of the keys; a call that would not mean the same in
 * parts is the original, once, whole, with the caller's own arguments.
 */
#include "parts_client.h"

#include <mutex>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

static std::mutex lock;
static std::vector<Run> runs;

static void note(const Run &run) {
    std::lock_guard<std::mutex> held(lock);
    runs.push_back(run);
}

/* How many runs a call was; its results are checked. */
static size_t run_and_check(const Call &call, int kind, bool flag = false) {
    unsigned long before = double_divided();
    runs.clear();
    call.check(call.run(kind, flag));
    std::vector<int> seen(call.keys.size());
    for (const Run &run : runs) {
        REQUIRE(run.flag == (flag && (kind & 1)));
        REQUIRE(run.config == (kind < 2 ? nullptr : &call.config));
        REQUIRE(run.count > 0 || call.keys.empty());
        for (size_t i = 0; i < run.count; i++)
            seen[run.first + i]++;
    }
    for (int times : seen)
        REQUIRE(times == 1);
    REQUIRE(double_divided() == before + (runs.size() > 1));
    return runs.size();
}

static void require_whole(const Call &call, int kind, bool flag = false) {
    REQUIRE(run_and_check(call, kind, flag) == 1);
}
static void require_parts(const Call &call, int kind, bool flag = false) {
    REQUIRE(run_and_check(call, kind, flag) > 1);
}

static void sizes_and_threads() {
    for (unsigned threads : {0u, 2u, 3u, 16u}) {
        set_calls(true, true, threads);
        for (size_t keys : {16, 17, 63, 64, 100, 512, 513, 4097}) {
            for (size_t bytes : {MIB, 16 * MIB + 5})
                require_parts(Call(keys, bytes), 0);
            Call small(keys, 16 * MIB / keys - 1);
            require_whole(small, 0);
            require_whole(small, 2);
        }
        for (int kind : {0, 1, 2, 3}) {
            require_parts(Call(200, MIB), kind);
            for (size_t keys : {0, 1, 15})
                require_whole(Call(keys, 64 * MIB), kind);
        }
        require_parts(Call(200, MIB), 3, true);
    }
}

/* One setting each, and one thread: nothing is divided. */
static void settings() {
    Call call(200, MIB);
    set_calls(false, true, 4);
    require_whole(call, 0);
    require_whole(call, 1);
    require_parts(call, 2);
    set_calls(true, false, 4);
    require_parts(call, 1);
    require_whole(call, 2);
    require_whole(call, 3);
    set_calls(true, true, 1);
    for (int kind : {0, 1, 2, 3})
        require_whole(call, kind);
    set_calls(true, true, 4);
}

static void unequal_vectors() {
    for (int kind : {0, 2}) {
        Call call(200, MIB);
        call.buffers.pop_back();
        require_whole(call, kind);
        call = Call(200, MIB);
        call.sizes.push_back(1);
        require_whole(call, kind);
        call.sizes.clear();
        require_whole(call, kind);
    }
    require_whole(Call(0, 0), 2);
    /* Mooncake stores nothing when one key has another number of sizes than buffers. */
    sizes_even = false;
    for (size_t key : {0, 1, 100, 199}) {
        Call call(200, MIB);
        call.all_sizes[key].push_back(1);
        require_whole(call, 1);
        require_whole(call, 3);
        call.all_sizes[key].resize(1);
        require_whole(call, 3);
    }
    sizes_even = true;
}

/* A module whose layouts are not known runs as stock, gets too. */
static void refused_module() {
    double_layout_refused = true;
    double_element_bytes = 0;
    for (int kind : {0, 1, 2, 3})
        require_whole(Call(200, MIB), kind);
    double_layout_refused = false;
    double_element_bytes = 72;
}

/* Every field that concerns several keys, and each layout that is not known. */
static void configurations() {
    const std::vector<std::string> of_keys(200, "x");
    auto whole = [](auto change) {
        Call call(200, MIB);
        change(call.config);
        require_whole(call, 2);
        require_whole(call, 3);
    };
    whole([&](auto &c) { c.group_ids = of_keys; });
    whole([&](auto &c) { c.group_ids.emplace(); });
    whole([&](auto &c) { c.session_ids = of_keys; });
    whole([&](auto &c) { c.preferred_hca_names = of_keys; });
    whole([&](auto &c) { c.per_key_preferred_hca_names.emplace(200); });
    whole([&](auto &c) { c.residency_affinity_ids = of_keys; });
    whole([&](auto &c) { c.prefer_alloc_in_same_node = true; });
    Call call(200, MIB);
    call.config.preferred_segment = "10.0.0.1:12345";
    call.config.host_id = "host";
    call.config.replica_num = 2;
    call.config.soft_pin_ttl_ms = UINT64_MAX;
    call.config.with_hard_pin = true;
    call.config.data_type = 3;
    call.config.preferred_segments = call.config.preferred_nof_segments = of_keys;
    require_parts(call, 2);
    require_parts(call, 3);
    call.config.preferred_segment = "node-17.example:12345 or so";
    call.config.host_id = std::string(300, 'h');
    require_parts(call, 2);
    call.config.host_id = std::string(5000, 'h'); /* not plausible */
    require_whole(call, 2);
    call.config.host_id = "host";
    for (size_t unknown : {0, 48, 64}) {
        double_element_bytes = unknown;
        require_whole(call, 2);
        require_whole(call, 3);
        require_parts(call, 0);
    }
    double_element_bytes = 72;
}

/* Where 0.3.13's object ends, nothing more is read. */
static void short_configuration() {
    long page = sysconf(_SC_PAGESIZE);
    char *two = static_cast<char *>(
        mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(two != MAP_FAILED && mprotect(two + page, page, PROT_NONE) == 0);
    void *place = two + page - sizeof(ReplicateConfig13);
    auto *config = new (place) ReplicateConfig13;
    Call call(200, MIB);
    double_element_bytes = 56;
    for (bool grouped : {false, true}) {
        if (grouped)
            config->group_ids = call.keys;
        runs.clear();
        client.batch_put_from(call.keys, call.buffers, call.sizes,
                              *static_cast<ReplicateConfig *>(place));
        REQUIRE((runs.size() > 1) == !grouped);
    }
    double_element_bytes = 72;
    config->~ReplicateConfig13();
    munmap(two, 2 * page);
}

/* A put stores the second of two equal keys; gets may have as many as they like. */
static void equal_keys() {
    keys_in_order = false;
    for (size_t second : {1, 100, 199}) {
        Call call(200, MIB);
        call.keys[second] = call.keys[0];
        require_whole(call, 2);
        require_whole(call, 3);
        require_parts(call, 0);
        call.keys[second] = std::string(call.keys[0].size(), '\0'); /* of one length, not equal */
        require_parts(call, 2);
    }
    keys_in_order = true;
}

static void from_within_a_part() {
    Call inner(200, MIB);
    std::atomic<size_t> inner_runs{0}, outer_runs{0};
    thread_local bool within;
    original = [&](const Run &run) {
        if (within) {
            REQUIRE(run.count == 200);
            inner_runs++;
            return;
        }
        outer_runs++;
        within = true;
        inner.check(inner.run(0));
        within = false;
    };
    Call outer(300, MIB);
    outer.check(outer.run(2));
    REQUIRE(outer_runs > 1 && inner_runs == outer_runs);
    original = note;
}

/* A part that is slow (a store that is gone) is followed by one with all keys that are left. */
static void slow_parts() {
    Call call(4096, MIB);
    set_calls(true, true, 2);
    original = [](const Run &run) {
        note(run);
        usleep(300000);
    };
    size_t count = run_and_check(call, 0);
    REQUIRE(count >= 2 && count <= 3);
    original = note;
    set_calls(true, true, 4);
}

/* A result too few, and those of later keys would be read as those of others: the answer ends. */
static void short_results() {
    short_key = 100;
    for (int kind : {0, 2}) {
        Call call(200, MIB);
        runs.clear();
        std::vector<int64_t> results = call.run(kind);
        for (const Run &run : runs)
            if (run.first <= short_key && short_key < run.first + run.count)
                REQUIRE(results.size() == run.first + run.count - 1);
        REQUIRE(results.size() < 200 && runs.size() > 1);
        call.keys.resize(results.size());
        call.check(results);
    }
    short_key = SIZE_MAX;
}

/* While another thread of the parent is in a call. Its parts stand still: the address sanitizer's
 * allocator does not outlive a fork during an allocation. */
static void forked_child() {
    Call call(200, MIB);
    std::atomic<bool> stop{false};
    std::atomic<int> inside{0};
    set_calls(true, true, 2);
    original = [&](const Run &) {
        inside++;
        while (!stop)
            usleep(1000);
    };
    std::thread busy([&] { call.check(call.run(0)); });
    while (inside < 2)
        usleep(1000);
    set_calls(true, true, 4);
    pid_t child = fork();
    if (child == 0) {
        tp_fork_guard();
        static int count;
        original = [](const Run &) { count++; };
        call.check(call.run(0));
        call.check(call.run(3));
        std::_Exit(count == 2 ? 0 : 1);
    }
    int status = -1;
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    stop = true;
    busy.join();
    original = note;
}

/* Threads stay, so in processes of their own. */
static void refused_threads() {
    for (unsigned left : {0, 1}) {
        pid_t child = fork();
        if (child == 0) {
            double_threads_left = left;
            set_calls(true, true, 4);
            for (int i = 0; i < 20; i++)
                REQUIRE((run_and_check(Call(200, MIB), 0) > 1) == (left > 0));
            REQUIRE(double_threads_started == left);
            REQUIRE(double_lines == 1);
            /* What was short for a while is tried again. */
            double_threads_left = 15;
            for (int i = 0; i < 300 && double_threads_started < 3; i++) {
                usleep(100000);
                run_and_check(Call(200, MIB), 0);
            }
            REQUIRE(double_threads_started == 3 && double_lines == 1);
            std::_Exit(0);
        }
        int status = -1;
        REQUIRE(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
}

int main() {
    original = note;
    double_element_bytes = 72;
    refused_threads();
    double_threads_left = 15;
    sizes_and_threads();
    REQUIRE(double_threads_started == 15);
    settings();
    unequal_vectors();
    refused_module();
    configurations();
    short_configuration();
    equal_keys();
    require_whole(Call(200, MIB), 1, true); /* a get's flag: replicas on one node */
    from_within_a_part();
    slow_parts();
    short_results();
    forked_child();
    return 0;
}
