/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bound that a benchmark compares with: the same blocks, copied by memcpy in as many threads as
 * there are cores, between an ordinary buffer and a memfd mapping (as a store's memory is). It must
 * not know: the library.
 *
 * usage: plain_memcpy BLOCKS BLOCK_BYTES PUT_OR_GET     reads lines, copies once for each, answers
 * with the seconds it took. "put" copies into the memfd, "get" out of it. The threads wait at a
 * barrier between rounds, so starting them is not part of the time.
 */
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64

struct work {
    char *to;
    const char *from;
    size_t blocks, block_bytes;
    unsigned threads;
    pthread_barrier_t barrier;
    bool over;
};

struct share {
    struct work *work;
    unsigned number;
};

static void copy_share(const struct work *work, unsigned number) {
    size_t first = work->blocks * number / work->threads;
    size_t end = work->blocks * (number + 1) / work->threads;

    for (size_t block = first; block < end; block++) {
        memcpy(work->to + block * work->block_bytes, work->from + block * work->block_bytes,
               work->block_bytes);
    }
}

static void *run(void *arg) {
    const struct share *share = arg;

    for (;;) {
        pthread_barrier_wait(&share->work->barrier);
        if (share->work->over) {
            return NULL;
        }
        copy_share(share->work, share->number);
        pthread_barrier_wait(&share->work->barrier);
    }
}

static double now_s(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static char *map(size_t bytes, bool shared) {
    int fd = shared ? memfd_create("plain_memcpy", MFD_CLOEXEC) : -1;
    char *memory = MAP_FAILED;

    if (shared && (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)) {
        perror("memfd");
        exit(1);
    }
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                  (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS), fd, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    memset(memory, shared ? 1 : 2, bytes);
    return memory;
}

static unsigned usable_cpus(void) {
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) < 0) {
        return 1;
    }
    return (unsigned)CPU_COUNT(&set) < MAX_THREADS ? (unsigned)CPU_COUNT(&set) : MAX_THREADS;
}

static void start(struct work *work, pthread_t *threads, struct share *shares) {
    pthread_barrier_init(&work->barrier, NULL, work->threads);
    for (unsigned i = 1; i < work->threads; i++) {
        shares[i] = (struct share){work, i};
        if (pthread_create(&threads[i], NULL, run, &shares[i]) != 0) {
            (void)fprintf(stderr, "plain_memcpy: no thread\n");
            exit(1);
        }
    }
}

int main(int argc, char **argv) {
    pthread_t threads[MAX_THREADS];
    struct share shares[MAX_THREADS];
    struct work work = {.threads = usable_cpus()};
    char line[64];
    bool put = false;

    if (argc != 4) {
        (void)fprintf(stderr, "usage: plain_memcpy BLOCKS BLOCK_BYTES put|get\n");
        return 2;
    }
    work.blocks = strtoull(argv[1], NULL, 10);
    work.block_bytes = strtoull(argv[2], NULL, 10);
    put = strcmp(argv[3], "put") == 0;
    work.to = map(work.blocks * work.block_bytes, put);
    work.from = map(work.blocks * work.block_bytes, !put);
    start(&work, threads, shares);
    while (fgets(line, sizeof(line), stdin)) {
        double begin = now_s();

        pthread_barrier_wait(&work.barrier);
        copy_share(&work, 0);
        pthread_barrier_wait(&work.barrier);
        (void)printf("%.9f\n", now_s() - begin);
        (void)fflush(stdout);
    }
    work.over = true;
    pthread_barrier_wait(&work.barrier);
    for (unsigned i = 1; i < work.threads; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}
