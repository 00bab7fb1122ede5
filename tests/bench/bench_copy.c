/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast host memory is copied: by one thread with the library's instructions, by a plain
 * multi-threaded memcpy of the same blocks, and by the pool with a caller that submits jobs and
 * then polls them in order, as Mooncake's callers do. One side is a MAP_SHARED memfd, as a store's
 * memory is. Runs of the ways that are compared alternate; medians are printed.
 *
 * Usage: bench_copy [raw|pool|jobs|alone|all] [rounds]
 * "alone" runs the pool only: the plain copies leave other things in the caches than it does.
 */
#include "tests/unit/double_env.h"
#include "transport/copy_host.h"
#include "transport/copy_stream.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define AREA (256 * MIB)
#define MAX_ROUNDS 200
#define MAX_JOBS 4096

static char *private_area, *shared_area;
static unsigned rounds = 15;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void make_areas(void) {
    int fd = memfd_create("bench", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)AREA) < 0) {
        perror("memfd");
        exit(1);
    }
    shared_area = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    private_area = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (shared_area == MAP_FAILED || private_area == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    memset(shared_area, 1, AREA);
    memset(private_area, 2, AREA);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, unsigned count) {
    qsort(values, count, sizeof(*values), by_value);
    return values[count / 2];
}

/* ---- one thread ---------------------------------------------------------------------------------
 */

typedef void (*copy_fn)(void *to, const void *from, size_t bytes);

static void plain(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

/* Copy `total` bytes in blocks within the first `span` bytes of the areas; GB/s. */
static double raw_run(copy_fn copy, bool write, size_t block, size_t span, size_t total) {
    char *to = write ? shared_area : private_area, *from = write ? private_area : shared_area;
    size_t at = 0, done = 0;
    double start = now_s();
    for (; done < total; done += block) {
        copy(to + at, from + at, block);
        at = at + 2 * block <= span ? at + block : 0;
    }
    tp_copy_fence();
    return (double)done / (now_s() - start) * 1e-9;
}

static void raw(void) {
    static const size_t blocks[] = {KIB, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB};
    static const size_t spans[] = {MIB, 16 * MIB, AREA};
    static const struct {
        const char *name;
        copy_fn copy;
    } ways[] = {{"memcpy", plain}, {"tp_copy_bytes", tp_copy_bytes}, {"AVX2", tp_stream_avx2}};
    enum { WAYS = sizeof(ways) / sizeof(ways[0]) };
    printf("one thread, GB/s: block KiB, span MiB, direction, then %s, %s, %s\n", ways[0].name,
           ways[1].name, ways[2].name);
    for (int write = 0; write < 2; write++) {
        for (size_t s = 0; s < sizeof(spans) / sizeof(spans[0]); s++) {
            for (size_t b = 0; b < sizeof(blocks) / sizeof(blocks[0]); b++) {
                double rate[WAYS][MAX_ROUNDS];
                for (unsigned r = 0; r < rounds; r++) {
                    for (unsigned w = 0; w < WAYS; w++)
                        rate[w][r] = raw_run(ways[w].copy, write, blocks[b], spans[s], 64 * MIB);
                }
                printf("%5zu %4zu %s", blocks[b] / KIB, spans[s] / MIB, write ? "put" : "get");
                for (unsigned w = 0; w < WAYS; w++)
                    printf(" %7.2f", median(rate[w], rounds));
                printf("\n");
            }
        }
    }
}

/* ---- the pool against threads that share the blocks evenly
 * --------------------------------------- */

struct shape {
    size_t jobs, blocks, bytes;
    unsigned pause_us; /* before each run: long enough for workers to fall asleep */
};

/* Where block i of all lies: far apart on one side, so that neighbours are not merged. */
static size_t place(size_t i, size_t bytes) {
    size_t slots = AREA / (bytes + 64);
    return (i * 7 % slots) * (bytes + 64);
}

struct part {
    const struct shape *shape;
    bool write;
    size_t first, end;
};

static void *copy_part(void *arg) {
    struct part *part = arg;
    for (size_t i = part->first; i < part->end; i++) {
        size_t at = place(i, part->shape->bytes);
        char *a = private_area + at, *b = shared_area + at;
        memcpy(part->write ? b : a, part->write ? a : b, part->shape->bytes);
    }
    return NULL;
}

static double plain_run(const struct shape *shape, bool write, unsigned threads) {
    size_t count = shape->jobs * shape->blocks;
    pthread_t ids[64];
    struct part parts[64];
    double start = now_s();
    for (unsigned t = 0; t < threads; t++) {
        parts[t] = (struct part){shape, write, count * t / threads, count * (t + 1) / threads};
        if (t + 1 < threads && pthread_create(&ids[t], NULL, copy_part, &parts[t]) != 0)
            exit(1);
    }
    copy_part(&parts[threads - 1]);
    for (unsigned t = 0; t + 1 < threads; t++)
        pthread_join(ids[t], NULL);
    return now_s() - start;
}

static bool alone;
static struct tp_copy_job jobs[MAX_JOBS];

/* Submit all, then poll each until done, as Mooncake's callers do. */
static double pool_run(const struct shape *shape, bool write) {
    double start = now_s();
    for (size_t j = 0; j < shape->jobs; j++) {
        tp_copy_reset(&jobs[j]);
        for (size_t i = 0; i < shape->blocks; i++) {
            size_t at = place(j * shape->blocks + i, shape->bytes);
            char *a = private_area + at, *b = shared_area + at;
            if (tp_copy_add(&jobs[j], write ? b : a, write ? a : b, shape->bytes, NULL, NULL) < 0)
                exit(1);
        }
        tp_copy_start(&jobs[j]);
    }
    for (size_t j = 0; j < shape->jobs; j++) {
        while (!tp_copy_done(&jobs[j]))
            tp_copy_help(&jobs[j]);
    }
    double end = now_s();
    for (size_t j = 0; j < shape->jobs; j++) {
        while (!tp_copy_idle(&jobs[j]))
            sched_yield();
    }
    return end - start;
}

static void compare(const struct shape *shapes, size_t count, unsigned threads) {
    printf("jobs x blocks x KiB, direction: plain 1 thread, plain %u threads, pool (GB/s); pool / "
           "plain; us a job\n",
           threads);
    for (size_t s = 0; s < count; s++) {
        for (int write = 0; write < 2; write++) {
            double one[MAX_ROUNDS], many[MAX_ROUNDS], pool[MAX_ROUNDS], ratio[MAX_ROUNDS];
            double bytes = (double)(shapes[s].jobs * shapes[s].blocks * shapes[s].bytes);
            for (unsigned r = 0; r < rounds; r++) {
                one[r] = alone ? 1 : plain_run(&shapes[s], write, 1);
                many[r] = alone ? 1 : plain_run(&shapes[s], write, threads);
                if (shapes[s].pause_us)
                    usleep(shapes[s].pause_us);
                pool[r] = pool_run(&shapes[s], write);
                ratio[r] = many[r] / pool[r];
            }
            double us = median(pool, rounds) * 1e6 / (double)shapes[s].jobs;
            printf("%4zu x %3zu x %6zu%s %s: %6.2f %6.2f %6.2f; %5.2f; %8.2f\n", shapes[s].jobs,
                   shapes[s].blocks, shapes[s].bytes / KIB, shapes[s].pause_us ? " rested" : "",
                   write ? "put" : "get", bytes / median(one, rounds) * 1e-9,
                   bytes / median(many, rounds) * 1e-9, bytes / median(pool, rounds) * 1e-9,
                   median(ratio, rounds), us);
        }
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "all";
    if (argc > 2)
        rounds = (unsigned)atoi(argv[2]);
    if (rounds < 1 || rounds > MAX_ROUNDS)
        rounds = 15;
    bool all = strcmp(what, "all") == 0;
    alone = strcmp(what, "alone") == 0;
    double_cpus = (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
    unsigned threads = double_cpus < 9 ? double_cpus : 9;
    make_areas();
    for (size_t j = 0; j < MAX_JOBS; j++)
        tp_copy_init(&jobs[j]);
    static const struct shape large[] = {{128, 1, MIB},    {32, 1, 4 * MIB}, {8, 1, 16 * MIB},
                                         {4, 1, 32 * MIB}, {1, 1, MIB},      {1, 1, MIB, 300}};
    static const struct shape small[] = {
        {32, 61, 64 * KIB},    {1, 61, 64 * KIB},     {1, 61, 64 * KIB, 300}, {128, 61, 4 * KIB},
        {1, 61, 4 * KIB},      {1, 61, 4 * KIB, 300}, {512, 1, 64 * KIB},     {1, 1, 64 * KIB},
        {1, 1, 64 * KIB, 300}, {1024, 1, 32 * KIB},   {1024, 1, 16 * KIB},    {1024, 1, 4 * KIB}};
    if (all || strcmp(what, "raw") == 0)
        raw();
    if (all || alone || strcmp(what, "pool") == 0)
        compare(large, sizeof(large) / sizeof(large[0]), threads);
    if (all || alone || strcmp(what, "jobs") == 0)
        compare(small, sizeof(small) / sizeof(small[0]), threads);
    tp_copy_pool_stop();
    return 0;
}
