/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The record of addresses, and the choice of new ones.
 *
 * The file is a ring of fixed records behind a header, each written at once and within one page: a
 * process that dies while it writes leaves all of a record or nothing. Writers hold its flock(2).
 * Content is as hostile as everything else in files: what is not right in every record is no record
 * of ours, and the file is begun anew. Where the file cannot be used, what this process knows by
 * itself is all there is, and the addresses are random still.
 *
 * It must not know: what lies at the addresses.
 */
#include "segment/addresses.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "env/env.h"

#define NAME "addresses"
#define MAGIC "tp-addrs"
#define VERSION 1U
#define RECORDS 4096U
#define SMALL_PAGE UINT64_C(4096)
#define HUGETLBFS_TYPE 0x958458f6UL /* linux/magic.h */
#define LOCK_MS 1000
#define LOCK_PAUSE_MS 5
#define DRAWS 64   /* before fewer of the records are heeded */
#define RESERVES 8 /* ranges in which this process has something already */

#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER true
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREAD_SANITIZER true
#endif
#endif
#ifndef THREAD_SANITIZER
#define THREAD_SANITIZER false
#endif

/*
 * User space of x86-64 is 47 bits. Below the first TiB lie programs that are not
 * position-independent and CUDA's own reservations, and below 16 TiB the shadow memory of
 * AddressSanitizer; from near the end downwards the kernel places what it chooses itself.
 * ThreadSanitizer leaves to programs what is near the end and little else.
 */
#define SPACE (UINT64_C(1) << 47)
#define LOWEST (THREAD_SANITIZER ? UINT64_C(0x7e8000000000) : UINT64_C(17) << 40)
#define HIGHEST (THREAD_SANITIZER ? UINT64_C(0x7f0000000000) : SPACE - (UINT64_C(2) << 40))
/* Records that cover more than this are forgotten, the oldest first: new ones find room. */
#define COVERED (SPACE / 4)

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

struct header {
    char magic[8];
    uint32_t version, records;
    uint64_t spare[6];
};

struct record {
    uint64_t number; /* from 1 on; its place is number % RECORDS. 0: there is none */
    uint64_t base, bytes;
    uint8_t instance[16];
    uint64_t seconds; /* CLOCK_REALTIME, for people */
    uint64_t spare[2];
};

_Static_assert(sizeof(struct header) == 64 && sizeof(struct record) == 64,
               "none crosses the end of a page");

struct image {
    struct header header;
    struct record records[RECORDS];
};

/* Under the lock: what is known, and what was just read. `last` is the newest record's number. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct image known;
static struct image loaded;
static uint64_t last;
static uint8_t own[16];

/* ---- the records ---- */

static bool right(const struct record *record, unsigned place) {
    static const struct record none;
    if (record->number == 0)
        return memcmp(record, &none, sizeof none) == 0;
    return record->number % RECORDS == place && record->number < UINT64_MAX / 2 &&
           record->base % SMALL_PAGE == 0 && record->base > 0 && record->base < SPACE &&
           record->bytes > 0 && record->bytes <= SPACE - record->base;
}

/* Of the records, the newest `count`: how far back one lies is told by its number. NULL: it has
 * none there. */
static const struct record *newest(unsigned index) {
    const struct record *record = &known.records[(last - index) % RECORDS];
    return last > index && record->number == last - index ? record : NULL;
}

/* Has one of the newest `heeded` records any of these addresses? Those of this process count when
 * `also_own`. */
static bool had(uint64_t base, uint64_t bytes, unsigned heeded, bool also_own) {
    uint64_t covered = 0;
    for (unsigned i = 0; i < heeded; i++) {
        const struct record *record = newest(i);
        if (record == NULL)
            continue;
        covered += record->bytes;
        if (covered > COVERED)
            return false;
        if (base < record->base + record->bytes && record->base < base + bytes &&
            (also_own || memcmp(record->instance, own, sizeof own) != 0))
            return true;
    }
    return false;
}

/* ---- the file ---- */

static int read_all(int fd, size_t bytes) {
    char *to = (char *)&loaded;
    size_t got = 0;
    memset(&loaded, 0, sizeof loaded);
    while (got < bytes) {
        ssize_t length = pread(fd, to + got, bytes - got, (off_t)got);
        if (length < 0 && errno == EINTR)
            continue;
        if (length <= 0)
            return length < 0 ? -errno : -EIO;
        got += (size_t)length;
    }
    return 0;
}

static int write_all(int fd, const void *from, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t length =
            pwrite(fd, (const char *)from + done, bytes - done, (off_t)(offset + done));
        if (length < 0 && errno == EINTR)
            continue;
        if (length <= 0)
            return length < 0 ? -errno : -EIO;
        done += (size_t)length;
    }
    return 0;
}

/* Is what was read a record of ours? *ret_last: its newest number. */
static bool all_right(size_t bytes, uint64_t *ret_last) {
    if (bytes % sizeof(struct record) != 0 || memcmp(loaded.header.magic, MAGIC, 8) != 0 ||
        loaded.header.version != VERSION || loaded.header.records != RECORDS)
        return false;
    *ret_last = 0;
    for (unsigned i = 0; i < RECORDS; i++) {
        if (!right(&loaded.records[i], i))
            return false;
        if (loaded.records[i].number > *ret_last)
            *ret_last = loaded.records[i].number;
    }
    return true;
}

/* The file's records become what is known; a file that holds none gets what is known. */
static int load(int fd, const char *path, size_t bytes) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    uint64_t number = 0;
    int result = bytes > 0 && bytes <= sizeof loaded ? read_all(fd, bytes) : 0;
    if (result < 0)
        return result;
    if (bytes > 0 && bytes <= sizeof loaded && all_right(bytes, &number)) {
        known = loaded;
        last = number;
        return 0;
    }
    if (bytes > 0)
        tp_log_once(&said, TP_LOG_WARN,
                    "%s/" NAME " is no record of addresses: begun anew; what earlier stores had is "
                    "not known, and nothing but Tidepool should write there",
                    path);
    known.header = (struct header){.magic = MAGIC, .version = VERSION, .records = RECORDS};
    if (ftruncate(fd, 0) < 0)
        return -errno;
    size_t used = last < RECORDS ? (size_t)last + 1 : RECORDS;
    return write_all(fd, &known, sizeof known.header + used * sizeof(struct record), 0);
}

static int lock_file(int fd) {
    for (unsigned waited = 0;; waited += LOCK_PAUSE_MS) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return 0;
        if (errno != EWOULDBLOCK || waited >= LOCK_MS)
            return -errno;
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_MS * 1000000L}, NULL);
    }
}

/* The lock goes with unlocking, not with closing: a child forked meanwhile has the fd too. */
static void close_file(int fd) {
    (void)flock(fd, LOCK_UN);
    close(fd);
}

/* Open, locked, and read. The fd or -errno. */
static int open_in(int dir_fd, const char *path) {
    struct stat status;
    struct statfs mount;
    /* Files on huge pages cannot be written to, and one would take a page from the segments. */
    if (fstatfs(dir_fd, &mount) == 0 && ((uint64_t)mount.f_type & 0xffffffff) == HUGETLBFS_TYPE)
        return -EOPNOTSUPP;
    int fd = openat(dir_fd, NAME, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    int result = lock_file(fd);
    if (result == 0 && fstat(fd, &status) < 0)
        result = -errno;
    /* Something that a name of ours was given to would be written over. */
    if (result == 0 &&
        (!S_ISREG(status.st_mode) || status.st_uid != geteuid() || status.st_nlink > 1))
        result = -EPERM;
    if (result == 0)
        result = load(fd, path, (size_t)status.st_size);
    if (result < 0) {
        close_file(fd);
        return result;
    }
    return fd;
}

static void say_unusable(const char *path, int error) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    tp_log_once(&said, TP_LOG_INFO,
                "%s/" NAME " cannot be used (%s): what addresses the segments of earlier stores "
                "had is not known, and new ones are random alone",
                path, strerror(-error));
}

/* Under the lock: make known what the file says. The fd, or -1 where it cannot be used. */
static int open_file(const struct tp_config *config) {
    const char *path = config->store.socket_dir;
    char error[512];
    if (path[0] == 0)
        return -1;
    int dir_fd = tp_host_open_dir(path, false, config, error, sizeof error);
    int fd = dir_fd;
    if (dir_fd >= 0) {
        fd = open_in(dir_fd, path);
        close(dir_fd);
    }
    if (fd < 0) {
        say_unusable(path, fd);
        return -1;
    }
    return fd;
}

/* The process's counters have an id as well, but may be missing. */
static void know_own(void) {
    static const uint8_t none[16];
    if (memcmp(own, none, sizeof own) == 0)
        (void)tp_random_id(own);
}

/* Under the lock: a record more, and into the file too (`fd` -1: there is none). */
static void record(int fd, const char *path, uint64_t base, uint64_t bytes) {
    struct timespec now = {0};
    (void)clock_gettime(CLOCK_REALTIME, &now);
    last++;
    struct record *made = &known.records[last % RECORDS];
    *made = (struct record){
        .number = last, .base = base, .bytes = bytes, .seconds = (uint64_t)now.tv_sec};
    memcpy(made->instance, own, sizeof own);
    int result = fd < 0
                     ? 0
                     : write_all(fd, made, sizeof *made,
                                 offsetof(struct image, records) + last % RECORDS * sizeof *made);
    if (result < 0)
        say_unusable(path, result);
}

/* ---- the choice ---- */

static uint64_t random_number(void) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number)
        number = tp_now_ns() * UINT64_C(0x9e3779b97f4a7c15);
    return number;
}

/* Under the lock. Fewer and fewer records are heeded when no place is found: many small ones in
 * all of the space leave none to a large segment. */
static int choose(uint64_t bytes, uint64_t alignment, uint64_t *ret_base) {
    if (bytes == 0 || alignment > COVERED || bytes > HIGHEST - LOWEST - alignment)
        return -ENOMEM;
    uint64_t places = (HIGHEST - LOWEST - bytes) / alignment;
    for (unsigned heeded = RECORDS;; heeded /= 2) {
        for (unsigned i = 0; i < DRAWS; i++) {
            uint64_t first = (LOWEST + alignment - 1) / alignment * alignment;
            uint64_t base = first + random_number() % places * alignment;
            if (!had(base, bytes, heeded, true)) {
                *ret_base = base;
                return 0;
            }
        }
    }
}

int tp_addresses_draw(const struct tp_config *config, uint64_t bytes, uint64_t alignment,
                      uint64_t *ret_base) {
    pthread_mutex_lock(&lock);
    know_own();
    int fd = open_file(config);
    int result = choose(bytes, alignment, ret_base);
    if (result == 0)
        record(fd, config->store.socket_dir, *ret_base, bytes);
    if (fd >= 0)
        close_file(fd);
    pthread_mutex_unlock(&lock);
    return result;
}

bool tp_addresses_take(const struct tp_config *config, const void *base, uint64_t bytes,
                       bool anyway) {
    uint64_t first = (uintptr_t)base / SMALL_PAGE * SMALL_PAGE;
    pthread_mutex_lock(&lock);
    know_own();
    int fd = open_file(config);
    bool free_of_others = !had(first, bytes, RECORDS, false);
    if (free_of_others || anyway)
        record(fd, config->store.socket_dir, first, bytes);
    if (fd >= 0)
        close_file(fd);
    pthread_mutex_unlock(&lock);
    return free_of_others || anyway;
}

int tp_addresses_reserve(const struct tp_config *config, uint64_t bytes, uint64_t alignment,
                         void **ret_base) {
    for (unsigned i = 0; i < RESERVES; i++) {
        uint64_t base;
        int result = tp_addresses_draw(config, bytes, alignment, &base);
        if (result < 0)
            return result;
        void *got = mmap((void *)base, bytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (got == (void *)base) {
            *ret_base = got;
            return 0;
        }
        if (got == MAP_FAILED && errno != EEXIST)
            return -errno;
        if (got != MAP_FAILED) /* Linux before 4.17 has no such flag */
            (void)munmap(got, bytes);
    }
    return -EADDRNOTAVAIL;
}
