/* SPDX-License-Identifier: Apache-2.0 */
/* The reference of all settings: what the manual and `tidepool doctor` print. It must not know how
 * they are parsed. */
#include "env/env.h"

const struct tp_setting tp_settings[] = {
    {"MC_STORE_SHM_SEGMENT_DIR", "a directory on hugetlbfs or tmpfs, or memfd",
     "not set: the store is Mooncake's own",
     "Store: segments and the SSD restore buffer are shared memory, files in that directory or "
     "anonymous memory."},
    {"MC_STORE_CUMEM_SOCKET_DIR", "a directory", "not set",
     "Store: segments are CUDA host memory on every NUMA node, served from a socket in that "
     "directory. Not together with "
     "MC_STORE_SHM_SEGMENT_DIR."},
    {"MC_STORE_CUMEM_NUMA_NODES", "NUMA nodes with memory, such as 0,1 or 0-3", "all of them",
     "Store: the nodes over which segments are spread, in that order."},
    {"MC_STORE_CUMEM_PIECE_BYTES", "bytes above 0, also with K, M, G or T (powers of 1024)", "2G",
     "Store: the size of one allocation; rounded up to the page size."},
    {"MC_STORE_SHM_SEGMENT_WAIT_S", "seconds from 0 to 86400", "300",
     "Store: how long to wait at start for engines to let go of the previous store's pages."},
    {"TIDEPOOL_SOCKET_DIR", "a directory", "the segment directory; needed for memfd",
     "Store: where it listens. Engine: used when MC_TENT_CONF names no directory."},
    {"TIDEPOOL_HUGEPAGES", "0 or 1", "0", "Store: memfd segments on hugetlb pages."},
    {"TIDEPOOL_OVERCOMMIT", "0 or 1", "0",
     "Store: make segments also where less memory is available than they need (MemAvailable and "
     "the cgroup's limit), with a warning. The kernel then swaps, or ends a process."},
    {"MC_TENT_CONF", "the path of a JSON file, or JSON that begins with {",
     "not set: the engine is Mooncake's own",
     "Engine: holds transports.shm; all other keys are Mooncake's. At most 1 MiB, no duplicate "
     "keys."},
    {"transports.shm.enable", "true or false", "false",
     "Engine: use shared memory for stores on this host."},
    {"transports.shm.socket_dir", "a directory", "TIDEPOOL_SOCKET_DIR",
     "Engine: the store's socket directory."},
    {"transports.shm.cumem_socket_dir", "a directory", "not set",
     "Engine: the same as transports.shm.socket_dir."},
    {"transports.shm.device_copy", "true or false", "true",
     "Engine: also for GPU memory; false leaves requests for GPU memory to Mooncake."},
    {"transports.shm.register_peer_memory", "true or false", "false",
     "Engine: register a store's memory with CUDA in chunks of 4 MiB, for stores on memfd, tmpfs "
     "or hugetlbfs. CUDA "
     "VMM memory does not need it, nor do hosts with HMM: both skip it."},
    {"transports.shm.register_max_bytes", "bytes, or a string such as \"4G\"; 0: no limit", "0",
     "Engine: how much of it may be registered at once, of which a quarter, 53 MiB a GPU at most, "
     "is for pinned memory: copies of what is not registered go by way of that. What was not used "
     "for longest, and not for two seconds, gives way to what is used more often."},
    {"transports.shm.register_ahead_chunks", "0 to 1024", "8",
     "Engine: chunks registered ahead of use, in the background."},
    {"transports.shm.copy_engine", "\"auto\", \"dma\" or \"kernel\"", "auto",
     "Engine: how GPU memory is copied."},
    {"transports.shm.kernel_max_bytes", "bytes, or a string such as \"64K\"; 0: calibrated", "0",
     "Engine: the largest block for which the copy kernel is used."},
    {"transports.shm.kernel_blocks", "0 to 1024; 0: calibrated", "0",
     "Engine: thread blocks of the copy kernel."},
    {"MC_STORE_BATCHED_GET", "0 or 1", "0",
     "Engine: one BatchGet moves all its memory replicas of a segment at once."},
    {"MC_STORE_BATCHED_PUT", "0 or 1", "0", "Engine: the same for BatchPut."},
    {"TIDEPOOL_CALL_THREADS", "0 to 16; 0: sized to the machine; 1: none but the caller's", "0",
     "Engine: threads that carry out one large batched call in parts, so that the copies of one "
     "overlap Mooncake's own work on the next; with MC_STORE_BATCHED_GET and _PUT."},
    {"TIDEPOOL_COPY_THREADS", "0 to 64; 0: sized to the machine", "0",
     "Engine: threads that copy host memory, and as many that stage copies of GPUs."},
    {"MC_TENT_MACHINE_ID", "boot_id", "not set: boot_id and /etc/machine-id",
     "Both: two processes share a host when the kernel's boot_id is equal, whatever "
     "/etc/machine-id says."},
    {"MC_TENT_PLATFORM", "cpu", "not set",
     "Store: keep it off the CUDA runtime. It makes no context, and with tidepool run it starts in "
     "a container without CUDA's libraries."},
    {"MOONCAKE_STORE_BACKEND", "not rs", "not set",
     "Mooncake's: its Rust store has no border that Tidepool could serve."},
    {"MC_STORE_PIN_MEMORY_MAX_BYTES", "bytes", "not set",
     "Mooncake's: segments are pinned after they were made shared; not under "
     "MC_TENT_PLATFORM=cpu, save by mooncake_client."},
    {"MC_STORE_USE_HUGEPAGE", "anything", "not set",
     "Mooncake's: segments lie on its huge pages; those of mooncake_client are not shared then."},
    {"MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", "bytes", "1280 MiB",
     "Mooncake's: by this size the SSD restore buffer is known."},
    {"MOONCAKE_OFFLOAD_USE_URING", "true", "not set",
     "Mooncake's: the restore buffer is then never CUDA memory, since io_uring pins it."},
    {"MOONCAKE_USE_URING", "true", "not set", "Mooncake's: the same under its older name."},
    {"MC_FORCE_SHM", "anything", "not set",
     "Mooncake's: its own shared memory does not reach a store's segments; Tidepool's path is used "
     "all the same."},
    {"MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES", "bytes", "not set",
     "Mooncake's: memory of the CUDA runtime, which makes a context also under "
     "MC_TENT_PLATFORM=cpu."},
    {"TIDEPOOL_ALLOW_UIDS", "at most 32 user ids such as 1000,1001", "none",
     "Both: peers and directory owners accepted besides root and our own user."},
    {"TIDEPOOL_LOG", "error, warn, info or debug", "warn",
     "Both: the lines printed to standard error."},
    {0},
};
