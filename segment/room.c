/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Room for segments in files: what the mount and the kernel's pools of huge pages have, held
 * against what a segment needs, and waited for.
 *
 * It must not know: how the files are made, who lets go.
 */
#include "segment/room.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <time.h>

#include "env/env.h"
#include "segment/backing.h"
#include "segment/hugepages.h"

#define POLL_MS 250
#define SAY_MS 5000

/* tmpfs always says how much it may hold, hugetlbfs only when it was mounted with a size. */
static bool mount_fits(const struct tp_room *room, const struct tp_need *need,
                       struct tp_shortage *ret_shortage) {
    struct statfs mount;
    uint64_t pages = need->bytes / room->page_bytes;
    uint64_t held = need->held_bytes / room->page_bytes;
    if (fstatfs(room->dir_fd, &mount) < 0 || (int64_t)mount.f_blocks <= 0 ||
        (uint64_t)mount.f_bavail >= pages)
        return true;
    uint64_t total = (uint64_t)mount.f_blocks;
    *ret_shortage = (struct tp_shortage){.mount = true,
                                         .node = -1,
                                         .need_pages = pages,
                                         .free_pages = (uint64_t)mount.f_bavail,
                                         .total_pages = total > held ? total - held : 0};
    return false;
}

/* Of a line of mountinfo (proc_pid_mountinfo(5)), if it is that of a hugetlbfs on `device`: its
 * min_size in bytes, which the kernel prints so whatever unit it was mounted with; else 0. */
static uint64_t min_size_of_line(const char *line, dev_t device) {
    unsigned major_number;
    unsigned minor_number;
    const char *type = strstr(line, " - hugetlbfs ");
    const char *option = type != NULL ? strstr(type, ",min_size=") : NULL;
    if (option == NULL || sscanf(line, "%*d %*d %u:%u ", &major_number, &minor_number) != 2 ||
        makedev(major_number, minor_number) != device)
        return 0;
    return strtoull(option + strlen(",min_size="), NULL, 10);
}

static uint64_t min_size(dev_t device) {
    FILE *file = fopen("/proc/self/mountinfo", "re");
    char *line = NULL;
    size_t room = 0;
    uint64_t bytes = 0;
    while (file != NULL && bytes == 0 && getline(&line, &room, file) > 0)
        bytes = min_size_of_line(line, device);
    free(line);
    if (file != NULL)
        (void)fclose(file);
    return bytes;
}

/*
 * A hugetlbfs that was mounted with min_size= has so many pages promised to its files. How many of
 * them are used is only told where it has a size= too; else as many as the kernel's pool says that
 * are promised at all may be this mount's.
 */
static uint64_t promised_pages(const struct tp_room *room) {
    struct stat directory;
    struct statfs mount;
    if (fstat(room->dir_fd, &directory) < 0)
        return 0;
    uint64_t pages = min_size(directory.st_dev) / room->page_bytes;
    if (pages == 0 || fstatfs(room->dir_fd, &mount) < 0 || (int64_t)mount.f_blocks <= 0)
        return pages;
    uint64_t used = (uint64_t)mount.f_blocks - (uint64_t)mount.f_bfree;
    return pages > used ? pages - used : 0;
}

static bool hopeless(const struct tp_shortage *shortage) {
    return shortage->total_pages < shortage->need_pages;
}

static bool fits(const struct tp_room *room, const struct tp_need *need,
                 struct tp_shortage *ret_shortage) {
    struct tp_shortage mount;
    bool pool_good = !room->hugetlb ||
                     tp_hugepages_fit(need, room->page_bytes, promised_pages(room), ret_shortage);
    bool mount_good = mount_fits(room, need, &mount);
    if (!mount_good && (pool_good || hopeless(&mount)))
        *ret_shortage = mount;
    return pool_good && mount_good;
}

/* "64 pages of 2 MiB", "128 MiB" */
static const char *amount(const struct tp_room *room, uint64_t pages, char text[static 48]) {
    if (room->hugetlb)
        snprintf(text, 48, "%" PRIu64 " pages of %" PRIu64 " MiB", pages, room->page_bytes >> 20);
    else
        snprintf(text, 48, "%" PRIu64 " MiB", pages * room->page_bytes >> 20);
    return text;
}

static void say(enum tp_log_level level, const struct tp_room *room,
                const struct tp_shortage *shortage, const char *then) {
    char need[48];
    char have[48];
    char missing[48];
    char where[32] = "";
    if (shortage->node >= 0)
        snprintf(where, sizeof where, " on NUMA node %d", shortage->node);
    tp_log(level,
           "MC_STORE_SHM_SEGMENT_DIR=%s: the segment needs %s%s, %s has %s free, %s are missing: "
           "%s",
           room->path, amount(room, shortage->need_pages, need), where,
           shortage->mount ? "the mount" : "the kernel", amount(room, shortage->free_pages, have),
           amount(room, shortage->need_pages - shortage->free_pages, missing), then);
}

static const char *remedy(const struct tp_room *room, const struct tp_shortage *shortage,
                          char text[static 160]) {
    if (shortage->mount)
        snprintf(text, 160, "mount it with a larger size= or make the segment smaller");
    else if (shortage->node >= 0)
        snprintf(text, 160,
                 "raise /sys/devices/system/node/node%d/hugepages/hugepages-%" PRIu64
                 "kB/nr_hugepages or make the segment smaller",
                 shortage->node, room->page_bytes >> 10);
    else if (room->page_bytes >> 30 > 0)
        snprintf(text, 160,
                 "raise /sys/kernel/mm/hugepages/hugepages-%" PRIu64
                 "kB/nr_hugepages (or hugepages= at boot) or make the segment smaller",
                 room->page_bytes >> 10);
    else
        snprintf(text, 160, "raise vm.nr_hugepages or make the segment smaller");
    return text;
}

/*
 * Sleep for POLL_MS. Returns true if this process was asked to end meanwhile: the handler of a
 * signal that does so ran in this thread, or such a signal is pending because the host has blocked
 * it. A host like python looks at what its handler noted only after this wait. Other signals are
 * blocked while this thread sleeps, so that they do not look like one of these.
 */
static bool sleep_until_asked_to_end(void) {
    static const int ending[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    const struct timespec limit = {.tv_nsec = POLL_MS * 1000000L};
    sigset_t mask;
    sigset_t blocked;
    sigset_t pending;
    bool asked = false;
    sigfillset(&mask);
    sigemptyset(&pending);
    (void)pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    (void)sigpending(&pending);
    for (unsigned i = 0; i < sizeof ending / sizeof *ending; i++) {
        struct sigaction action;
        if (sigismember(&blocked, ending[i]) == 0)
            sigdelset(&mask, ending[i]);
        else if (sigismember(&pending, ending[i]) == 1 &&
                 sigaction(ending[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            asked = true;
    }
    return asked || (ppoll(NULL, 0, &limit, &mask) < 0 && errno == EINTR);
}

/* Others hold what is missing. Returns 0 if they have let go in time, another error if they
 * have not, -EINTR with one line logged if this process was asked to end. */
static int wait_for_others(const struct tp_room *room, const struct tp_need *need,
                           struct tp_shortage *shortage) {
    char text[160];
    uint64_t start = tp_now_ms();
    uint64_t limit = (uint64_t)room->wait_s * 1000;
    uint64_t said = 0;
    for (uint64_t waited = 0; waited < limit; waited = tp_now_ms() - start) {
        if (waited == 0 || waited - said >= SAY_MS) {
            snprintf(text, sizeof text,
                     "waiting for others to let go, %" PRIu64
                     " of at most %u s so far (MC_STORE_SHM_SEGMENT_WAIT_S)",
                     waited / 1000, room->wait_s);
            say(TP_LOG_WARN, room, shortage, text);
            said = waited;
        }
        if (sleep_until_asked_to_end()) {
            tp_log(TP_LOG_ERROR,
                   "MC_STORE_SHM_SEGMENT_DIR=%s: a signal asks this process to end: it waits for "
                   "pages no longer, after %" PRIu64 " ms, and gets no segment",
                   room->path, tp_now_ms() - start);
            return -EINTR;
        }
        if (fits(room, need, shortage)) {
            tp_log(TP_LOG_WARN,
                   "MC_STORE_SHM_SEGMENT_DIR=%s: there is room now, after %" PRIu64 " ms",
                   room->path, tp_now_ms() - start);
            return 0;
        }
        if (hopeless(shortage)) /* the pool was made smaller meanwhile */
            return -ENOMEM;
    }
    return -ETIMEDOUT;
}

int tp_room_wait(const struct tp_room *room, const struct tp_need *need) {
    struct tp_shortage shortage;
    char text[320];
    char what[160];
    if (fits(room, need, &shortage))
        return 0;
    if (!hopeless(&shortage)) {
        int error = wait_for_others(room, need, &shortage);
        if (error == 0 || error == -EINTR)
            return error;
    }
    (void)remedy(room, &shortage, what);
    if (hopeless(&shortage))
        say(TP_LOG_ERROR, room, &shortage, what);
    else {
        snprintf(text, sizeof text,
                 "others still hold them after %u s: end those processes (grep -l %.60s "
                 "/proc/*/maps), or %s",
                 room->wait_s, room->path, what);
        say(TP_LOG_ERROR, room, &shortage, text);
    }
    return shortage.mount ? -ENOSPC : -ENOMEM;
}
