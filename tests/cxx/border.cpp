/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A C++ program that links a shared transfer engine, run with the library preloaded: what
 * Mooncake's own C++ users are. Two roles in two processes, told apart by the first argument: store
 * NAME BYTES   allocates, registers, prints the segment's address, then answers "sum OFFSET BYTES"
 * and "fill" lines engine NAME BASE SCENARIO   runs one scenario against the store and prints "ok"
 * or what was wrong
 */
#include "engine.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>
#include <unistd.h>

using namespace mooncake;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("line %d: %s\n", __LINE__, #condition);                                         \
            fflush(stdout);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static void *allocate(size_t bytes) {
#if ELEMENT_BYTES == 48
    return allocate_buffer_allocator_memory(bytes, "tcp", 16 << 20);
#elif ELEMENT_BYTES == 56
    return allocate_buffer_allocator_memory(bytes, "tcp", 16 << 20, false);
#else
    return allocate_buffer_allocator_memory(bytes, "tcp", 16 << 20, nullptr);
#endif
}

/* Is this address memory of a file, as an overlay is? */
static bool file_mapped(uintptr_t at) {
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != nullptr);
    char line[512];
    bool found = false;
    while (!found && fgets(line, sizeof(line), maps)) {
        unsigned long low = 0, high = 0;
        found = sscanf(line, "%lx-%lx", &low, &high) == 2 && at >= low && at < high &&
                strstr(line, "memfd:");
    }
    fclose(maps);
    return found;
}

static int store(const char *name, size_t bytes) {
    setenv("FAKE_ENGINE_NAME", name, 1);
    auto engine = std::make_unique<TransferEngine>(false);
    CHECK(engine->init("P2PHANDSHAKE", "ignored", "", 0) == 0);
    auto *memory = static_cast<unsigned char *>(allocate(bytes));
    if (!memory) {
        puts("no memory");
        return 3;
    }
    CHECK(engine->registerLocalMemory(memory, bytes, "cpu:0", true, true) == 0);
#if !DESTRUCTOR_INLINED
    /* An engine that is moved keeps its memory. */
    auto moved = std::make_unique<TransferEngine>(std::move(*engine));
    engine = std::move(moved);
    CHECK(file_mapped(reinterpret_cast<uintptr_t>(memory)));
#endif
    printf("%p\n", static_cast<void *>(memory));
    fflush(stdout);

    std::string line;
    while (std::getline(std::cin, line)) {
        size_t offset = 0, count = 0;
        if (sscanf(line.c_str(), "sum %zu %zu", &offset, &count) == 2) {
            uint64_t sum = 0;
            for (size_t i = 0; i < count; i++)
                sum = sum * 31 + memory[offset + i];
            printf("%llu\n", static_cast<unsigned long long>(sum));
        } else if (line == "unregister") {
            CHECK(engine->unregisterLocalMemory(memory, true) == 0);
            puts("done");
        }
        fflush(stdout);
    }
    CHECK(engine->unregisterLocalMemory(memory, true) == 0);
    CHECK(file_mapped(reinterpret_cast<uintptr_t>(memory)));
    engine.reset();
    CHECK(file_mapped(reinterpret_cast<uintptr_t>(memory))); /* at addresses of its own, it is the caller's until it is freed */
    const auto address = reinterpret_cast<uintptr_t>(memory);
    free(memory); /* plain, as RealClient::tearDownAll_internal does */
    CHECK(!file_mapped(address));
    return 0;
}

struct Run {
    TransferEngine engine{false};
    uint64_t handle = 0, base = 0;
    std::vector<unsigned char> buffer = std::vector<unsigned char>(8 << 20);

    void attach(const char *name) {
        CHECK(engine.init("P2PHANDSHAKE", "engine", "", 0) == 0);
        handle = engine.openSegment(name);
        for (size_t i = 0; i < buffer.size(); i++)
            buffer[i] = static_cast<unsigned char>(i * 7 + i / 251);
        for (int i = 0; i < 200; i++) { /* until a request goes the short way */
            record().offsets.clear();
            CHECK(transfer({request(1, 0, 0, 64)}) == 4);
            if (record().offsets.empty())
                return;
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        CHECK(!"never attached");
    }
    Transport::TransferRequest request(int opcode, size_t at, size_t offset, size_t length) {
        Transport::TransferRequest r{};
        memset(&r, 0xa5, sizeof(r)); /* garbage wherever a real caller may leave some */
        r.opcode = opcode;
        r.source = buffer.data() + at;
        r.target_id = handle;
        r.target_offset = base + offset;
        r.length = length;
        return r;
    }
    int wait(uint64_t batch_id, size_t count) {
        for (size_t i = 0; i < count; i++) {
            Transport::TransferStatus status{};
            do {
                Status s = engine.getTransferStatus(batch_id, i, status);
                if (!s.ok())
                    return -static_cast<int>(s.code());
            } while (status.s == 0);
            if (status.s != 4)
                return status.s;
        }
        return 4;
    }
    int transfer(const Requests &entries) {
        uint64_t batch_id = engine.allocateBatchID(entries.size());
        CHECK(engine.submitTransfer(batch_id, entries).ok());
        int state = wait(batch_id, entries.size());
        CHECK(engine.freeBatchID(batch_id).ok());
        return state;
    }
};

/* Writes, then reads back elsewhere: bytes must come home. */
static void scenario_roundtrip(Run &run) {
    Requests out, in;
    for (size_t i = 0; i < 61; i++)
        out.push_back(run.request(1, i * 16384, i * 16384, 16384));
    CHECK(run.transfer(out) == 4);
    std::vector<unsigned char> sent(run.buffer.begin(), run.buffer.begin() + 61 * 16384);
    std::fill(run.buffer.begin(), run.buffer.end(), 0xee);
    for (size_t i = 0; i < 61; i++)
        in.push_back(run.request(0, i * 16384, i * 16384, 16384));
    CHECK(run.transfer(in) == 4);
    CHECK(memcmp(sent.data(), run.buffer.data(), sent.size()) == 0);
    CHECK(run.buffer[61 * 16384] == 0xee);
    CHECK(record().offsets.empty());
}

/* Requests to another segment go to Mooncake, in order, and keep their place in the caller's
 * numbering. */
static void scenario_mixed(Run &run) {
    uint64_t other = run.engine.openSegment("elsewhere:1");
    Requests entries;
    for (size_t i = 0; i < 10; i++) {
        entries.push_back(run.request(1, i * 4096, i * 4096, 4096 + i));
        if (i % 3 == 0)
            entries.back().target_id = other;
    }
    uint64_t batch_id = run.engine.allocateBatchID(entries.size());
    CHECK(run.engine.submitTransfer(batch_id, entries).ok());
    CHECK(record().offsets.size() == 4);
    for (size_t i = 0; i < 4; i++)
        CHECK(record().offsets[i] == run.base + i * 3 * 4096);
    size_t sum = 0;
    for (size_t i = 0; i < entries.size(); i++) {
        Transport::TransferStatus status{};
        do
            CHECK(run.engine.getTransferStatus(batch_id, i, status).ok());
        while (status.s == 0);
        CHECK(status.s == 4 && status.transferred_bytes == 4096 + i);
        sum += status.transferred_bytes;
    }
    Transport::TransferStatus all{};
    CHECK(run.engine.getBatchTransferStatus(batch_id, all).ok());
    CHECK(all.s == 4 && all.transferred_bytes == sum);
    Transport::TransferStatus beyond{};
    CHECK(!run.engine.getTransferStatus(batch_id, entries.size(), beyond).ok());
    CHECK(run.engine.freeBatchID(batch_id).ok());
}

/* While Mooncake's part is unfinished the batch is, and it cannot be freed; it works again after.
 */
static void scenario_busy(Run &run) {
    uint64_t other = run.engine.openSegment("elsewhere:1");
    Requests entries = {run.request(1, 0, 0, 4096), run.request(1, 4096, 4096, 4096)};
    entries[1].target_id = other;
    record().busy = true;
    uint64_t batch_id = run.engine.allocateBatchID(2);
    CHECK(run.engine.submitTransfer(batch_id, entries).ok());
    CHECK(run.wait(batch_id, 1) == 4);
    Transport::TransferStatus status{};
    CHECK(run.engine.getTransferStatus(batch_id, 1, status).ok() && status.s == 0);
    CHECK(run.engine.getBatchTransferStatus(batch_id, status).ok() && status.s == 0);
    CHECK(run.engine.freeBatchID(batch_id).code() == 4);
    record().busy = false;
    CHECK(run.wait(batch_id, 2) == 4);
    CHECK(run.engine.freeBatchID(batch_id).ok());
}

/* What Mooncake refuses fails as a whole: nothing is copied, the next submit starts afresh. */
static void scenario_refused(Run &run) {
    uint64_t other = run.engine.openSegment("elsewhere:1");
    Requests entries = {run.request(1, 0, 65536, 4096), run.request(1, 4096, 0, 4096)};
    entries[1].target_id = other;
    record().refuse = true;
    uint64_t batch_id = run.engine.allocateBatchID(2);
    CHECK(!run.engine.submitTransfer(batch_id, entries).ok());
    record().refuse = false;
    CHECK(run.engine.submitTransfer(batch_id, entries).ok());
    CHECK(run.wait(batch_id, 2) == 4);
    CHECK(run.engine.freeBatchID(batch_id).ok());
}

/* Outside the published range, at its last byte, across its end, and with sums that overflow. */
static void scenario_range(Run &run) {
    size_t end = strtoull(getenv("SEGMENT_BYTES"), nullptr, 0);
    CHECK(run.transfer({run.request(1, 0, end - 1, 1)}) == 4);
    CHECK(record().offsets.empty());
    CHECK(run.transfer({run.request(1, 0, end - 1, 2)}) == 4);
    CHECK(run.transfer({run.request(1, 0, end, 1)}) == 4);
    CHECK(run.transfer({run.request(1, 0, static_cast<size_t>(-1) - run.base, 64)}) == 4);
    CHECK(run.transfer({run.request(1, 0, static_cast<size_t>(-64), 1)}) == 4);
    CHECK(record().offsets.size() == 4);
    auto odd = run.request(7, 0, 0, 64);
    CHECK(run.transfer({odd}) == 4);
    CHECK(record().offsets.size() == 5);
}

static void scenario_scatter(Run &run) {
    (void)run;
#if SINCE13
    Requests entries;
    for (size_t i = 0; i < 100; i++)
        entries.push_back(run.request(1, i * 512, i * 512, 512));
    std::vector<size_t> sizes;
    uint64_t batch_id = run.engine.scatter(entries, sizes);
    CHECK(batch_id && sizes.size() == 100);
    for (size_t size : sizes)
        CHECK(size == 1);
    sizes.push_back(7); /* its storage is the module's: it can grow and be freed */
    CHECK(run.wait(batch_id, 100) == 4);
    CHECK(run.engine.freeBatchID(batch_id).ok());
    if (WITH_TENT) { /* there TransferEngine is the border, and this stand-in's scatter does not
                        pass it */
        CHECK(record().offsets.size() == 100);
        return;
    }
    CHECK(record().offsets.empty());

    entries[50].target_id =
        run.engine.openSegment("elsewhere:1"); /* mixed scatter: whole to Mooncake */
    sizes.clear();
    batch_id = run.engine.scatter(entries, sizes);
    CHECK(batch_id && sizes.size() == 100 && record().offsets.size() == 100);
    CHECK(run.wait(batch_id, 100) == 4);
    CHECK(run.engine.freeBatchID(batch_id).ok());
#endif
}

/* A moved engine keeps its handles; a second engine has its own. */
static void scenario_engines(Run &run) {
    TransferEngine moved(std::move(run.engine));
    uint64_t batch_id = moved.allocateBatchID(1);
    CHECK(moved.submitTransfer(batch_id, {run.request(1, 0, 0, 4096)}).ok());
    Transport::TransferStatus status{};
    do
        CHECK(moved.getTransferStatus(batch_id, 0, status).ok());
    while (status.s == 0);
    CHECK(status.s == 4 && record().offsets.empty());
    CHECK(moved.freeBatchID(batch_id).ok());

    TransferEngine second(false);
    CHECK(second.init("P2PHANDSHAKE", "second", "", 0) == 0);
    CHECK(second.openSegment("elsewhere:2") ==
          run.handle); /* the same number means another segment there */
    batch_id = second.allocateBatchID(1);
    CHECK(second.submitTransfer(batch_id, {run.request(1, 0, 0, 4096)}).ok());
    CHECK(record().offsets.size() == 1);
    CHECK(second.freeBatchID(batch_id).ok());
}

/* A handle that we have never seen, a batch that is freed and its id used again, and a batch of
 * nothing. */
static void scenario_strange(Run &run) {
    auto unknown = run.request(1, 0, 0, 64);
    unknown.target_id = 999;
    CHECK(run.transfer({unknown}) == 4);
    CHECK(record().offsets.size() == 1);
    for (int i = 0; i < 1000; i++)
        CHECK(run.transfer({run.request(i & 1, 0, 0, 64)}) == 4);
    CHECK(record().offsets.size() == 1);
    uint64_t batch_id = run.engine.allocateBatchID(0);
    CHECK(run.engine.submitTransfer(batch_id, {}).ok());
    CHECK(run.engine.freeBatchID(batch_id).ok());
    auto notify = TransferMetadata::NotifyDesc{"a name longer than sixteen characters", "text"};
    batch_id = run.engine.allocateBatchID(1);
    CHECK(run.engine.submitTransferWithNotify(batch_id, {run.request(1, 0, 0, 64)}, notify).ok());
    CHECK(run.wait(batch_id, 1) == 4);
    CHECK(run.engine.freeBatchID(batch_id).ok());
}

/* The library must leave everything to Mooncake: an unknown element size, or it is not configured.
 */
static void scenario_forwarded(Run &run, const char *name) {
    CHECK(run.engine.init("P2PHANDSHAKE", "engine", "", 0) == 0);
    run.handle = run.engine.openSegment(name);
    for (int i = 0; i < 20; i++) {
        CHECK(run.transfer({run.request(1, 0, 0, 64)}) == 4);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    CHECK(record().offsets.size() == 20);
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "store"))
        return store(argv[2], strtoull(argv[3], nullptr, 0));
    CHECK(argc == 5 && !strcmp(argv[1], "engine"));
    static const struct {
        const char *name;
        void (*run)(Run &);
    } scenarios[] = {{"roundtrip", scenario_roundtrip}, {"mixed", scenario_mixed},
                     {"busy", scenario_busy},           {"refused", scenario_refused},
                     {"range", scenario_range},         {"scatter", scenario_scatter},
                     {"engines", scenario_engines},     {"strange", scenario_strange}};
    auto run = std::make_unique<Run>();
    run->base = strtoull(argv[3], nullptr, 16);
    if (!strcmp(argv[4], "forwarded")) {
        scenario_forwarded(*run, argv[2]);
        puts("ok");
        return 0;
    }
    for (const auto &scenario : scenarios) {
        if (strcmp(argv[4], scenario.name) == 0) {
            run->attach(argv[2]);
            record().offsets.clear();
            scenario.run(*run);
            puts("ok");
            return 0;
        }
    }
    CHECK(!"a known scenario");
}
