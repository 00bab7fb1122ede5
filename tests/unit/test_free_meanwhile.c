/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: memory is not given back to its allocator while another thread still takes the overlay
 * away: the mapping that it lays there would come over whatever is at these addresses by then.
 * Built with mmap64 wrapped. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "env/env.h"
#include "segment/segment.h"

#define BYTES ((size_t)4 << 20)

void *__real_mmap64(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);

static _Thread_local bool slow;
static _Atomic bool standing, go_on;

/* A slow thread stands still before it maps; for a second and a half, if nobody lets it go on. */
void *__wrap_mmap64(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    for (unsigned i = 0; slow && i < 1500 && !atomic_load(&go_on); i++) {
        atomic_store(&standing, true);
        usleep(1000);
    }
    return __real_mmap64(address, bytes, protection, flags, fd, offset);
}

static void *restore(void *memory) {
    slow = true;
    (void)tp_segment_restore(memory);
    return NULL;
}

static void give_back(char *memory, bool by_restore) {
    if (by_restore)
        (void)tp_segment_restore(memory);
    else
        (void)tp_segment_free(memory);
    (void)munmap(memory, BYTES);
}

/* What another thread puts there as soon as the addresses are free stays as it is. */
static bool stays(const struct tp_config *config, bool by_restore) {
    pthread_t thread;
    char *memory =
        __real_mmap64(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    atomic_store(&standing, false);
    atomic_store(&go_on, false);
    if (tp_segment_overlay(memory, BYTES, false, config) != 0 ||
        pthread_create(&thread, NULL, restore, memory) != 0)
        return false;
    while (!atomic_load(&standing))
        usleep(1000);
    give_back(memory, by_restore);
    char *other = __real_mmap64(memory, BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (other != memory)
        return false;
    memset(other, 7, BYTES);
    atomic_store(&go_on, true);
    pthread_join(thread, NULL);
    bool same = other[0] == 7 && other[BYTES - 1] == 7;
    (void)munmap(other, BYTES);
    return same;
}

int main(void) {
    static struct tp_config config = {.store.half = TP_HALF_ON, .store.kind = TP_SEGMENT_MEMFD};
    bool right = true;
    for (unsigned by_restore = 0; by_restore < 2; by_restore++) {
        bool good = stays(&config, by_restore);
        printf("%s: %s\n", by_restore ? "restore" : "free", good ? "good" : "overwritten");
        right = right && good;
    }
    return right ? 0 : 1;
}
