/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The request splitter under arbitrary requests: whatever is asked for, every byte that is copied
 * lies inside the store's segment and the caller's buffer, and what cannot be is left to Mooncake.
 *
 * With clang, from the top of the tree:
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -I. tests/fuzz/fuzz_split.c
 * tests/unit/fake_store.c transport/[a-z]*.c segment/wire.c env/[a-z]*.c -mavx2 -mavx512f -ljansson
 * -lnuma -o fuzz && ./fuzz
 * Elsewhere -DREPLAY gives a program that replays the files of its arguments, or a fixed
 * pseudo-random series.
 *
 * Input: 1 byte of flags, then 21 bytes a request: opcode, handle, source offset (4), target offset
 * (8), length (7).
 */
#include <stdio.h>

#include "../unit/rig.h"
#include "transport/batch.h"

#define NAME "127.0.0.1:1"
#define REQUEST_BYTES 21
#define ROOM ((size_t)1 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tp_engine *engine;
static struct fake_store store;
static unsigned char *buffer;

static void start(void) {
    struct tp_config *config = fake_config();
    fake_start(&store, config,
               &(struct fake_options){.name = NAME, .bytes = ROOM, .piece_bytes = ROOM / 8});
    engine = tp_engine_find(&engine, true);
    buffer = calloc(1, ROOM);
    if (!buffer || !engine || tp_transport_start(config) != 0)
        abort();
    tp_engine_open(engine, 1, NAME, strlen(NAME));
    if (!rig_wait(engine, 1, FAKE_BASE, 5000) || !rig_wait(engine, 1, FAKE_BASE + ROOM - 1, 5000))
        abort();
}

static uint64_t number(const uint8_t *data, unsigned bytes) {
    uint64_t value = 0;
    memcpy(&value, data, bytes);
    return value;
}

static struct rig_request request_from(const uint8_t *data) {
    uint64_t length = number(data + 14, 7);
    uint64_t source = number(data + 2, 4) % ROOM;
    uint64_t target = FAKE_BASE + number(data + 6, 8);
    /* A caller's buffer is its own claim and cannot be checked here: keep to ours. The store's side
     * takes anything. */
    if (length > ROOM - source)
        length = data[1] & 1 ? length | UINT64_C(1) << 60 : length % (ROOM - source + 1);
    return rig_make((int)data[0] - 1, data[1] == 255 ? NULL : buffer + source, data[1] & 3, target,
                    length);
}

static void check_ops(const struct tp_submit *submit) {
    const struct tp_copy_job *job = &submit->batch->pending->job;
    for (uint32_t i = 0; i < job->op_count; i++) {
        const struct tp_copy_op *op = &job->ops[i];
        bool write = (const unsigned char *)op->from >= buffer &&
                     (const unsigned char *)op->from < buffer + ROOM;
        const unsigned char *ours = write ? op->from : op->to;
        if (op->bytes == 0 || op->bytes > TP_GRAIN_BYTES || ours < buffer ||
            ours + op->bytes > buffer + ROOM)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct rig_request requests[256];
    if (!engine)
        start();
    if (size < 1 + REQUEST_BYTES)
        return 0;
    size_t count = (size - 1) / REQUEST_BYTES;
    if (count > 256)
        count = 256;
    for (size_t i = 0; i < count; i++)
        requests[i] = request_from(data + 1 + i * REQUEST_BYTES);
    struct tp_requests list = {requests, sizeof(requests[0]), count};
    struct tp_submit submit;
    enum tp_plan plan = tp_submit_begin(engine, 0x77, count, &list, data[0] & 1, &submit);
    if (plan == TP_PLAN_NONE)
        return 0;
    check_ops(&submit);
    if (data[0] & 2) {
        tp_submit_abort(&submit);
        return 0;
    }
    tp_submit_commit(&submit);
    struct tp_task_status status = {0};
    while (tp_batch_status(0x77, &status) != TP_ANSWER_UNKNOWN && status.state == TP_TASK_WAITING)
        ;
    if (status.state != TP_TASK_COMPLETED || rig_free(0x77) != 0)
        abort();
    return 0;
}

#ifdef REPLAY
static void replay(const char *path) {
    static uint8_t data[8192];
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    size_t size = fread(data, 1, sizeof(data), file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv) {
    static uint8_t data[1024];
    uint64_t state = 88172645463325252u;
    for (int i = 1; i < argc; i++)
        replay(argv[i]);
    for (int round = 0; argc == 1 && round < 20000; round++) {
        for (size_t i = 0; i < sizeof(data); i++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            data[i] = (uint8_t)state;
            /* Mostly requests that nearly fit, or nothing would get past the first check. */
            size_t field = (i - 1) % REQUEST_BYTES;
            if (i > 0 && state >> 40 & 7 &&
                ((field > 8 && field < 14) || field > 16 || (field == 8 && data[i] > 15)))
                data[i] = 0;
            if (i > 0 && field == 0)
                data[i] %= 4;
        }
        LLVMFuzzerTestOneInput(data, 1 + REQUEST_BYTES * (state % 40));
    }
    fake_end(&store);
    return 0;
}
#endif
