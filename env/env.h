/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this process was told (settings), where it runs (host identity, NUMA nodes, limits), and how
 * it speaks to people (one log line at a time). This is the only public header of env/ besides
 * stats.h.
 *
 * It must not know: Mooncake, CUDA, sockets, segments. Every other folder may include it; it
 * includes none of theirs.
 *
 * Errors: functions return 0 or a negative errno; out-parameters are named ret_* and are untouched
 * on failure. Nothing here runs before the first hook is called: no constructor reads a variable,
 * opens a file or starts a thread.
 */
#ifndef TIDEPOOL_ENV_H
#define TIDEPOOL_ENV_H

#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define TP_VERSION "0.1.0"
#define TP_MAX_NODES 64
#define TP_MAX_UIDS 32

/* ---- log: the only part that speaks to the user
 * ------------------------------------------------------------------ */

enum tp_log_level { TP_LOG_ERROR, TP_LOG_WARN, TP_LOG_INFO, TP_LOG_DEBUG };

/* True when lines of this level are printed (TIDEPOOL_LOG=error|warn|info|debug; default warn).
 * Cheap; any thread. */
bool tp_log_on(enum tp_log_level level);

/*
 * One line on standard error: "tidepool[PID] LEVEL: text\n", one write(2), at most 1023 bytes.
 * errno is preserved. Never called from `free`, from a signal handler or in a forked child. Any
 * thread.
 */
void tp_log(enum tp_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, at most once for each flag (zero-initialised, static): for conditions that would
 * repeat. Any thread. */
void tp_log_once(atomic_flag *flag, enum tp_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- config: every setting, parsed once
 * ---------------------------------------------------------------------------- */

/* What the store's segments are made of. */
enum tp_segment_kind {
    TP_SEGMENT_NONE,  /* the store half is not configured: leave allocation to Mooncake */
    TP_SEGMENT_MEMFD, /* MC_STORE_SHM_SEGMENT_DIR=memfd */
    TP_SEGMENT_FILES, /* MC_STORE_SHM_SEGMENT_DIR=DIR on hugetlbfs or tmpfs */
    TP_SEGMENT_CUMEM, /* MC_STORE_CUMEM_SOCKET_DIR=DIR */
};

/* A half of the library: what it may do in this process. */
enum tp_half {
    TP_HALF_OFF,     /* not configured: inert */
    TP_HALF_ON,      /* configured and right */
    TP_HALF_INVALID, /* configured wrongly: `error` says how; the store half fails allocations, the
                        engine half is inert */
};

enum tp_copy_engine { TP_COPY_AUTO, TP_COPY_DMA, TP_COPY_KERNEL };

struct tp_store_config {
    enum tp_half half;
    char error[512]; /* set when half is TP_HALF_INVALID: one line, names variable, value and what
                        was expected */
    enum tp_segment_kind kind;
    char segment_dir[PATH_MAX]; /* TP_SEGMENT_FILES: the directory; otherwise empty */
    char socket_dir[PATH_MAX];  /* where this process listens; see tp_config for the rule */
    uint64_t
        piece_bytes; /* as given; 0 means default (2 GiB). Users of it round up to the page size */
    bool hugepages;  /* TIDEPOOL_HUGEPAGES=1: memfd segments on hugetlb pages */
    bool overcommit; /* TIDEPOOL_OVERCOMMIT=1: also segments larger than the available memory */
    uint64_t hugepage_bytes; /* not a setting: the page size of a segment for which Mooncake asks
                                for huge pages (MC_STORE_USE_HUGEPAGE); 0 for all others */
    unsigned node_count;     /* 0: all online nodes */
    int nodes[TP_MAX_NODES];
    unsigned wait_s; /* MC_STORE_SHM_SEGMENT_WAIT_S, default 300 */
    /* Mooncake's, for its SSD tier: the size of the buffer from which engines pull what was read
     * back (MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES, default 1280 MiB), and whether it reads with
     * io_uring (MOONCAKE_OFFLOAD_USE_URING=true), which pins it. */
    uint64_t restore_bytes;
    bool restore_uring;
    bool pins_segments;  /* Mooncake's MC_STORE_PIN_MEMORY_MAX_BYTES is set and not 0 */
    bool asks_hugepages; /* Mooncake's MC_STORE_USE_HUGEPAGE is there, with whatever value */
};

struct tp_engine_config {
    enum tp_half half;
    char error[512];
    char socket_dir[PATH_MAX];
    bool device_copy;          /* default true */
    bool register_peer_memory; /* default false */
    uint64_t register_max_bytes;
    unsigned register_ahead_chunks;
    enum tp_copy_engine copy_engine;
    uint64_t kernel_max_bytes; /* 0: calibrated */
    unsigned kernel_blocks;    /* 0: calibrated */
    unsigned copy_threads;     /* TIDEPOOL_COPY_THREADS; 0: sized to the machine */
    unsigned call_threads;     /* TIDEPOOL_CALL_THREADS; 0: sized to the machine */
    bool batched_get;          /* MC_STORE_BATCHED_GET=1 */
    bool batched_put;          /* MC_STORE_BATCHED_PUT=1 */
};

struct tp_config {
    struct tp_store_config store;
    struct tp_engine_config engine;
    bool boot_id_only; /* MC_TENT_MACHINE_ID=boot_id */
    bool platform_cpu; /* MC_TENT_PLATFORM=cpu */
    /* Modes of Mooncake's own that are asked for: MC_FORCE_SHM, and
     * MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES. */
    bool force_shm, pinned_restore;
    unsigned allow_uid_count; /* TIDEPOOL_ALLOW_UIDS=1000,1001: peers accepted besides root and our
                                 own uid */
    uid_t allow_uids[TP_MAX_UIDS];
    unsigned notice_count; /* unknown keys, and values of no consequence */
    char notices[16][256];
};

/*
 * The settings of this process, read from the environment and MC_TENT_CONF on the first call and
 * never again. Never NULL; the object lives for ever and does not change. Any thread. Logs each
 * error once, on the first call.
 *
 * store.socket_dir: MC_STORE_CUMEM_SOCKET_DIR for cumem; otherwise TIDEPOOL_SOCKET_DIR when set,
 * else segment_dir (the segment layer checks that its file system takes sockets); for memfd without
 * TIDEPOOL_SOCKET_DIR the half is invalid. engine.socket_dir: transports.shm.socket_dir or
 * cumem_socket_dir of MC_TENT_CONF (the same meaning; both set to different values is an error),
 * else TIDEPOOL_SOCKET_DIR; transports.shm.enable=true without any is an error.
 */
const struct tp_config *tp_config(void);

/*
 * Parse without the process-wide cache: `getenv_fn` supplies variables. For tests, fuzzers and
 * `tidepool doctor`. Returns 0 always; the result's halves say what is wrong. Does not log.
 */
int tp_config_parse(const char *(*getenv_fn)(const char *name, void *arg), void *arg,
                    struct tp_config *ret_config);

/*
 * The reference of all settings, one entry each, for the manual, `tidepool doctor` and tests.
 * Terminated by name == NULL.
 */
struct tp_setting {
    const char *name;     /* environment variable, or JSON path such as "transports.shm.enable" */
    const char *expected; /* the values taken, in words: "a directory", "0 or 1" */
    const char *default_value; /* in words */
    const char *meaning;
};
extern const struct tp_setting tp_settings[];

/* ---- host: where this process runs
 * --------------------------------------------------------------------------------- */

/*
 * The text by which two processes know that they share a host: the kernel's boot_id, then ":" and
 * /etc/machine-id unless boot_id_only or there is none. (TENT's getMachineID has the same form;
 * unlike there, no boot_id is an error.) NUL-terminated, at most 95 characters. 0 or -errno. Any
 * thread.
 */
int tp_host_identity(bool boot_id_only, char ret_identity[static 96]);

/* 16 random bytes from getrandom(2): the instance id (generation) of a process. 0 or -errno. */
int tp_random_id(uint8_t ret_id[static 16]);

/* The NUMA nodes that have memory and that the cpuset allows, ascending. Returns their number (at
 * least 1: node 0 where the kernel has no NUMA). */
unsigned tp_host_memory_nodes(int ret_nodes[static TP_MAX_NODES]);

/* CPUs that this process may use: affinity mask and cgroup CPU quota, rounded up; at least 1. */
unsigned tp_host_cpus(void);

/*
 * Bytes that this process may still allocate: MemAvailable, and the room left under the limits of
 * its memory cgroup and that group's ancestors. Caches that the kernel can drop count as room. 0 or
 * -errno.
 */
int tp_host_memory_available(uint64_t *ret_bytes);

/* CLOCK_MONOTONIC. Any thread. */
static inline uint64_t tp_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
static inline uint64_t tp_now_ms(void) {
    return tp_now_ns() / 1000000u;
}

/* How long to wait before the next try of what has failed: `first` after the first failure, twice
 * as long after each further one, so many times. `failures` does not count this one. */
static inline uint64_t tp_backoff(uint64_t first, unsigned failures, unsigned doublings) {
    return first << (failures < doublings ? failures : doublings);
}

/*
 * ftruncate(2), but never the signal: a size beyond RLIMIT_FSIZE is -EFBIG here, where the kernel
 * sends SIGXFSZ too, for memfds as well (inode_newsize_ok in fs/attr.c), which ends a process that
 * does not expect it. 0 or -errno. Any thread.
 */
int tp_host_resize(int fd, uint64_t bytes);

/* Inode of this process's network namespace, 0 when it cannot be read. Two loopback names agree
 * only within one. */
uint64_t tp_host_netns(void);

/*
 * May a process or a file of this uid be trusted: root's, our own, or one that the settings list?
 * Never one that is ambiguous, whoever runs as it. `config` may be NULL. Any thread.
 */
bool tp_host_uid_is_trusted(uid_t uid, const struct tp_config *config);

/*
 * Does this uid stand for every user that is not mapped in this process's user namespace? The
 * kernel shows all of them as /proc/sys/kernel/overflowuid, 65534 (user_namespaces(7)). False in a
 * namespace that maps all uids, as the initial one does.
 */
bool tp_host_uid_is_ambiguous(uid_t uid);

/*
 * Check a directory by the safety rules: it exists, is a directory, belongs to root or to this user
 * (or to an allowed uid), and is not writable by others. Opens it O_PATH-free
 * (O_RDONLY|O_DIRECTORY|O_CLOEXEC) and returns the fd, or -errno. With `create`, a missing last
 * component is made 0700 first. On failure `ret_error` (at least 256 bytes) holds one line that
 * names the path, its owner and mode, our uid, and what to do.
 */
int tp_host_open_dir(const char *path, bool create, const struct tp_config *config, char *ret_error,
                     size_t error_bytes);

/* ---- fork: a child starts inert
 * ------------------------------------------------------------------------------------ */

/* True in a forked child of a process in which tp_fork_guard was armed. One relaxed load; any
 * thread. */
bool tp_inert(void);

/* Install the pthread_atfork handlers; first call only. Any thread. */
void tp_fork_guard(void);

/*
 * fds that a forked child must not keep (sockets: the connection is the lease; lock files: the lock
 * is the life). The child handler closes all that are listed. At most 1024; further ones return
 * -ENOSPC and are not listed. Any thread. Remove an fd before closing it. A fork just between the
 * two leaves it in the child, so shutdown(2) a socket first.
 */
int tp_fork_close_add(int fd);
void tp_fork_close_remove(int fd);

/* ---- threads
 * -------------------------------------------------------------------------------------------------------
 */

/*
 * Start a thread of the library: named (at most 15 characters), a stack of 256 KiB besides the TLS
 * of the host's modules, all signals blocked but the faults that a thread causes itself (a blocked
 * SIGSEGV or SIGBUS kills past every handler). 0 or -errno. The thread is joinable; the caller owns
 * *ret_thread.
 */
int tp_thread_start(const char *name, void *(*run)(void *arg), void *arg, pthread_t *ret_thread);

/* The same with a stack of this size, for threads that run deep code of others (a driver's
 * compiler). */
int tp_thread_start_deep(const char *name, size_t stack_bytes, void *(*run)(void *arg), void *arg,
                         pthread_t *ret_thread);

#endif
