/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: any number of threads may make batched calls at once. Each gets its own results; those
 * that find an idle thread run in parts, the others whole; and no two parts of one call are the
 * same.
 */
#include "parts_client.h"

#include <chrono>
#include <thread>

int main() {
    constexpr unsigned CALLERS = 6;
    std::atomic<unsigned long> divided{0}, whole{0}, overlapping{0}, within{0};
    double_element_bytes = 72;
    double_threads_left = 3;
    set_calls(true, true, 4);
    /* Several parts of the process at once is what this is for. */
    original = [&](const Run &run) {
        if (within++ > 0)
            overlapping++;
        (run.count == 256 ? whole : divided)++;
        std::this_thread::yield();
        within--;
    };
    /* A second, and longer on a machine that stands still or is busy, until all has been seen. */
    using Clock = std::chrono::steady_clock;
    auto start = Clock::now();
    auto goes_on = [&] {
        bool all = whole > 0 && divided > 0 && overlapping > 0;
        return Clock::now() < start + std::chrono::seconds(all ? 1 : 60);
    };
    std::vector<std::thread> callers;
    for (unsigned i = 0; i < CALLERS; i++) {
        callers.emplace_back([&, i] {
            Call call(256, MIB);
            for (int kind = i; goes_on(); kind++)
                call.check(call.run(kind % 4));
        });
    }
    for (std::thread &caller : callers)
        caller.join();
    std::fprintf(stderr, "%lu whole, %lu parts of %lu calls, %lu overlapping\n", whole.load(),
                 divided.load(), double_divided(), overlapping.load());
    REQUIRE(double_threads_started == 3);
    REQUIRE(whole > 0 && divided > 0 && overlapping > 0);
    /* All of them are idle again: a call of one thread gets all. */
    unsigned long before = double_divided();
    for (int i = 0; i < 100; i++)
        Call(256, MIB).run(0);
    REQUIRE(double_divided() == before + 100);
    return 0;
}
