/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks on Mooncake's own modes of segment memory: huge pages (MC_STORE_USE_HUGEPAGE), NUMA
 * segments (rdma with cards on several nodes), interleaved transparent huge pages (efa), which it
 * maps itself, and pinning (MC_STORE_PIN_MEMORY_MAX_BYTES).
 *
 * With Tidepool as store, such memory is laid here instead of Mooncake's mapping: laid over it
 * afterwards, it would need its huge pages twice, and pages that are pinned by then would be lost.
 * Whatever of a mode cannot be kept is said in one line, by the part that finds it.
 *
 * It must not know what an overlay is made of.
 */
#include "env/env.h"
#include "segment/segment.h"
#include "shim/hooks.h"
#include "shim/modules.h"
#include "shim/overlays.h"
#include "shim/start.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CALLER() __builtin_return_address(0)

#define SMALL_PAGE ((size_t)4096)
#define HUGE_PAGE ((size_t)2 << 20)
#define LARGEST_PAGE ((size_t)1 << 30)

/* What allocate_buffer_mmap_memory is asked for: segments with the page size as alignment, the SSD
 * restore buffer with 4096, and the client's local buffer, which is never shared, with 64. */
#define SHARED_ALIGNMENT SMALL_PAGE

/* As many segments as a process can share (segment/wire.h). */
#define MAPPINGS 64

static struct mapping {
    void *address; /* NULL: unused */
    size_t bytes;
} mappings[MAPPINGS];
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

static bool remember(void *address, size_t bytes) {
    bool found = false;

    pthread_mutex_lock(&mappings_lock);
    for (size_t i = 0; i < MAPPINGS && !found; i++) {
        if (!mappings[i].address) {
            mappings[i] = (struct mapping){address, bytes};
            found = true;
        }
    }
    pthread_mutex_unlock(&mappings_lock);
    return found;
}

/* The size of what was mapped here at `address`, 0 when it was not. Without the lock in a forked
 * child: the thread that holds it may be one that the child has not. */
static size_t forget(const void *address) {
    bool locks = !tp_inert();
    size_t bytes = 0;

    if (locks) {
        pthread_mutex_lock(&mappings_lock);
    }
    for (size_t i = 0; i < MAPPINGS && !bytes; i++) {
        if (mappings[i].address == address) {
            bytes = mappings[i].bytes;
            mappings[i] = (struct mapping){0};
        }
    }
    if (locks) {
        pthread_mutex_unlock(&mappings_lock);
    }
    return bytes;
}

/* ---- laying
 * ------------------------------------------------------------------------------------------------------------
 */

struct wish {
    size_t bytes;      /* a multiple of the page size */
    size_t page_bytes; /* of the kernel's pool when more than 4096 */
    const int *nodes;  /* where the regions shall lie, one a region; NULL: anywhere */
    size_t node_count;
};

static size_t round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* Private memory at an address that is a multiple of `alignment`; nothing of it is resident. */
static void *reserve(void *unused, size_t alignment, size_t bytes) {
    size_t whole = bytes + alignment;
    char *start = mmap(NULL, whole, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (start == MAP_FAILED) {
        tp_log(TP_LOG_ERROR, "no address space for a segment of %zu MiB", bytes >> 20);
        return NULL;
    }
    char *first = start + (round_up((uintptr_t)start, alignment) - (uintptr_t)start);
    if (first > start) {
        (void)munmap(start, (size_t)(first - start));
    }
    (void)munmap(first + bytes, whole - (size_t)(first - start) - bytes);
    if (!remember(first, bytes)) {
        tp_log(TP_LOG_ERROR, "a segment of %zu MiB: a process can share %d segments, all in use",
               bytes >> 20, MAPPINGS);
        (void)munmap(first, bytes);
        return NULL;
    }
    return first;
}

static void release(void *unused, void *address) {
    (void)munmap(address, forget(address));
}

/* Regions are pieces: the first node gets the first, and so on. */
static void place(const struct wish *wish, struct tp_store_config *store) {
    static atomic_flag said = ATOMIC_FLAG_INIT;

    if (!wish->nodes || wish->node_count > TP_MAX_NODES) {
        return;
    }
    if (store->node_count) {
        tp_log_once(&said, TP_LOG_WARN,
                    "MC_STORE_CUMEM_NUMA_NODES wins over the NUMA nodes of the network cards, on "
                    "which Mooncake wants its segments");
        return;
    }
    store->node_count = (unsigned)wish->node_count;
    memcpy(store->nodes, wish->nodes, wish->node_count * sizeof(*wish->nodes));
    store->piece_bytes = wish->bytes / wish->node_count;
}

static void *lay(const struct wish *wish, const struct tp_config *config) {
    const struct tp_allocator next = {.allocate = reserve, .release = release};
    struct tp_config *own; /* the process's, as this mode wants it */
    void *address;

    if (config->store.half == TP_HALF_INVALID) {
        return NULL; /* its line was logged when it was read */
    }
    own = malloc(sizeof(*own));
    if (!own) {
        tp_log(TP_LOG_ERROR, "no memory for the settings of a segment of %zu MiB",
               wish->bytes >> 20);
        return NULL;
    }
    *own = *config;
    if (wish->page_bytes > SMALL_PAGE) {
        own->store.hugepages = true;
        own->store.hugepage_bytes = wish->page_bytes;
    }
    place(wish, &own->store);
    address = tp_overlays_allocate(&next, HUGE_PAGE, wish->bytes, own);
    free(own);
    return address;
}

static bool page_size(size_t bytes) {
    return bytes >= SMALL_PAGE && bytes <= LARGEST_PAGE && (bytes & (bytes - 1)) == 0;
}

/* The settings, if this process lends memory that others can map. */
static const struct tp_config *sharing(void) {
    const struct tp_config *config = tp_shim_config();

    return config && config->store.half != TP_HALF_OFF ? config : NULL;
}

/* ---- Mooncake's mappings
 * -----------------------------------------------------------------------------------------------
 */

static bool wish_of_mmap(size_t bytes, size_t alignment, struct wish *ret_wish) {
    size_t page = alignment > SMALL_PAGE ? alignment : HUGE_PAGE;

    if (alignment < SHARED_ALIGNMENT || !page_size(alignment) || bytes == 0 ||
        bytes > SIZE_MAX / 2) {
        return false;
    }
    *ret_wish = (struct wish){.bytes = round_up(bytes, page), .page_bytes = page};
    return true;
}

void *tp_hook_allocate_mmap(size_t bytes, size_t alignment) {
    tp_real_allocate_mmap real =
        (tp_real_allocate_mmap)tp_next(TP_HOOK_allocate_mmap, tp_module_of(CALLER()));
    const struct tp_config *config = sharing();
    struct wish wish;

    if (config && wish_of_mmap(bytes, alignment, &wish)) {
        return lay(&wish, config);
    }
    return real ? real(bytes, alignment) : NULL;
}

void *tp_hook_allocate_mmap_defer(size_t bytes, size_t alignment, bool defer) {
    tp_real_allocate_mmap_defer real =
        (tp_real_allocate_mmap_defer)tp_next(TP_HOOK_allocate_mmap_defer, tp_module_of(CALLER()));
    const struct tp_config *config = sharing();
    struct wish wish;

    if (config && wish_of_mmap(bytes, alignment, &wish)) {
        return lay(&wish, config);
    }
    return real ? real(bytes, alignment, defer) : NULL;
}

void *tp_hook_allocate_numa(size_t bytes, const struct cxx_vector *nodes, size_t page_bytes) {
    tp_real_allocate_numa real =
        (tp_real_allocate_numa)tp_next(TP_HOOK_allocate_numa, tp_module_of(CALLER()));
    const struct tp_config *config = sharing();
    size_t count = (size_t)(nodes->end - nodes->begin) / sizeof(int);
    size_t page = page_bytes ? page_bytes : SMALL_PAGE;

    if (!config || count == 0 || bytes == 0 || bytes > SIZE_MAX / 2 || !page_size(page)) {
        return real ? real(bytes, nodes, page_bytes) : NULL;
    }
    struct wish wish = {.bytes = round_up(bytes / count, page) * count,
                        .page_bytes = page,
                        .nodes = (const int *)(const void *)nodes->begin,
                        .node_count = count};
    return lay(&wish, config);
}

void *tp_hook_allocate_thp(size_t bytes) {
    tp_real_allocate_thp real =
        (tp_real_allocate_thp)tp_next(TP_HOOK_allocate_thp, tp_module_of(CALLER()));
    const struct tp_config *config = sharing();
    static atomic_flag said = ATOMIC_FLAG_INIT;

    if (!config || bytes == 0 || bytes > SIZE_MAX / 2) {
        return real ? real(bytes) : NULL;
    }
    struct wish wish = {.bytes = round_up(bytes, HUGE_PAGE), .page_bytes = SMALL_PAGE};
    void *address = lay(&wish, config);
    if (address) {
        tp_log_once(&said, TP_LOG_WARN,
                    "Mooncake wants its segments on transparent huge pages interleaved over the "
                    "NUMA nodes (protocol efa): Tidepool's wins, which spreads them piece by piece "
                    "(MC_STORE_CUMEM_PIECE_BYTES)");
    }
    return address;
}

void tp_hook_free_mmap(void *address, size_t bytes) {
    tp_real_free_mmap real = (tp_real_free_mmap)tp_next(TP_HOOK_free_mmap, tp_module_of(CALLER()));
    size_t ours = forget(address);

    if (tp_segment_free(address)) {
        return;
    }
    if (tp_shim_config() && tp_segment_contains(address)) {
        (void)tp_segment_restore(address);
    }
    if (ours) {
        (void)munmap(address, ours);
    } else if (real) {
        real(address, bytes);
    }
}

/* ---- pinning
 * -----------------------------------------------------------------------------------------------------------
 */

/*
 * std::shared_ptr<RegisteredPinnedRegion> try_pin(...): an empty one says that the memory is not
 * pinned, which Mooncake goes on with. Called for each segment, whether pinning is wanted or not.
 */
struct cxx_shared_ptr *tp_hook_pin(struct cxx_shared_ptr *ret, void *self, void *address,
                                   size_t bytes, const struct cxx_string *owner) {
    tp_real_pin real = (tp_real_pin)tp_next(TP_HOOK_pin, tp_module_of(CALLER()));
    const struct tp_config *config = tp_inert() ? NULL : tp_config();
    static atomic_flag said = ATOMIC_FLAG_INIT;
    bool cpu = config && config->platform_cpu;
    bool cumem = config && config->store.kind == TP_SEGMENT_CUMEM && tp_segment_contains(address);

    if (real && !cpu && !cumem) {
        return real(ret, self, address, bytes, owner);
    }
    *ret = (struct cxx_shared_ptr){0};
    if (config && config->store.pins_segments) {
        tp_log_once(&said, TP_LOG_WARN, "MC_STORE_PIN_MEMORY_MAX_BYTES is not followed: %s",
                    cumem ? "segments of MC_STORE_CUMEM_SOCKET_DIR are pinned as they are"
                          : "pinning would make a CUDA context, and MC_TENT_PLATFORM=cpu wins");
    }
    return ret;
}

/* ---- at the start
 * ------------------------------------------------------------------------------------------------------
 */

void tp_modes_say(const struct tp_config *config) {
    if (config->force_shm) {
        tp_log(TP_LOG_WARN,
               "MC_FORCE_SHM: Mooncake's shared-memory transport does not reach a store's "
               "segments; Tidepool's does, and what it leaves goes as without MC_FORCE_SHM");
    }
    if (config->platform_cpu && config->pinned_restore) {
        tp_log(TP_LOG_WARN,
               "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES is memory of the CUDA runtime, and "
               "making it makes a context: it wins over MC_TENT_PLATFORM=cpu; unset it to keep "
               "this store off the GPU");
    }
}
