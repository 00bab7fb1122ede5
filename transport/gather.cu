/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many small copies in one launch, between GPU memory and mapped host memory, or within either.
 *
 * Compiled to PTX that is committed beside it (gather.ptx; scripts/gather-ptx makes it again and compares), so neither building
 * nor running the library needs a CUDA toolkit. It must not know: streams, Mooncake, who made the addresses.
 *
 * A copy over PCIe moves bytes in flight / round trip. So a warp keeps 4 KiB of loads in flight (eight 16-byte loads a lane) before it
 * stores anything, and works through its own copies alone: no barrier, and small copies leave no thread idle. Few thread
 * blocks are enough to fill the link, and few leave the GPU to its owner.
 *
 * Copies are read from pinned host memory, 32 at a time by a warp (one lane each), so they need no upload of their own.
 */
#include <stdint.h>

struct copy {
    uint64_t to, from;
    uint64_t bytes;
};

#define LANES 32
#define IN_FLIGHT 8

static __device__ __forceinline__ uint4 load(const uint4 *at) {
    return __ldcs(at);
}

static __device__ __forceinline__ void store(uint4 *at, uint4 value) {
    __stcs(at, value);
}

/* `count` items of a type whose alignment both ends have. */
template <typename T>
static __device__ void copy_items(char *to, const char *from, uint64_t count, unsigned lane) {
    for (uint64_t i = lane; i < count; i += LANES)
        reinterpret_cast<T *>(to)[i] = reinterpret_cast<const T *>(from)[i];
}

/* Both ends are multiples of 16. */
static __device__ void copy_vectors(char *to, const char *from, uint64_t count, unsigned lane) {
    const uint4 *source = reinterpret_cast<const uint4 *>(from) + lane;
    uint4 *target = reinterpret_cast<uint4 *>(to) + lane;
    uint64_t done = 0;

    for (; done + LANES * IN_FLIGHT <= count; done += LANES * IN_FLIGHT) {
        uint4 held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            held[k] = load(source + done + k * LANES);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            store(target + done + k * LANES, held[k]);
    }
    uint64_t left = count - done;
    if (left == 0)
        return;
    uint4 held[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (lane + k * LANES < left)
            held[k] = load(source + done + k * LANES);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (lane + k * LANES < left)
            store(target + done + k * LANES, held[k]);
}

/* Any addresses, any length: the widest type that both ends agree on, after the bytes before its first multiple. */
static __device__ void copy_one(char *to, const char *from, uint64_t bytes, unsigned lane) {
    uint64_t apart = (uint64_t)to ^ (uint64_t)from;
    unsigned width = (apart & 15) == 0 ? 16 : (apart & 7) == 0 ? 8 : (apart & 3) == 0 ? 4 : 1;
    uint64_t head = (0 - (uint64_t)to) & (width - 1);

    head = head < bytes ? head : bytes;
    copy_items<uint8_t>(to, from, head, lane);
    to += head;
    from += head;
    bytes -= head;

    uint64_t count = bytes / width;
    if (width == 16)
        copy_vectors(to, from, count, lane);
    else if (width == 8)
        copy_items<uint64_t>(to, from, count, lane);
    else if (width == 4)
        copy_items<uint32_t>(to, from, count, lane);
    else
        copy_items<uint8_t>(to, from, count, lane);
    uint64_t moved = count * width;
    copy_items<uint8_t>(to + moved, from + moved, bytes - moved, lane);
}

/*
 * `count` copies. Any grid and block size (a multiple of 32). A warp takes `group` copies at a time (1 to 32).
 */
extern "C" __global__ void tp_gather(const struct copy *copies, unsigned count, unsigned group) {
    unsigned lane = threadIdx.x % LANES;
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    unsigned warps = gridDim.x * blockDim.x / LANES;

    for (unsigned first = warp * group; first < count; first += warps * group) {
        unsigned here = count - first < group ? count - first : group;
        struct copy mine = {0, 0, 0};
        if (lane < here)
            mine = copies[first + lane];
        for (unsigned i = 0; i < here; i++) {
            char *to = reinterpret_cast<char *>(__shfl_sync(0xffffffffu, mine.to, i));
            const char *from = reinterpret_cast<const char *>(__shfl_sync(0xffffffffu, mine.from, i));
            copy_one(to, from, __shfl_sync(0xffffffffu, mine.bytes, i), lane);
        }
    }
}
