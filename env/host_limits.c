/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the host this process may use: CPUs, memory, NUMA nodes. All of it is read from the
 * kernel's files: libnuma prints to standard error and may exit, and a container's seccomp filter
 * may refuse its calls.
 *
 * It must not know: what the memory or the CPUs are wanted for.
 */
#include "env/env.h"
#include "env/host_files.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define MAX_CPUS 65536

/* ---- NUMA nodes
 * ---------------------------------------------------------------------------------------------------
 */

struct node_set {
    bool has[1024]; /* the kernel's largest MAX_NUMNODES (NODES_SHIFT is 10) */
};

static void add_node(unsigned node, void *arg) {
    struct node_set *set = arg;

    if (node < sizeof(set->has) / sizeof(*set->has))
        set->has[node] = true;
}

static bool read_nodes(const char *path, struct node_set *ret_set) {
    char text[4096];

    memset(ret_set, 0, sizeof(*ret_set));
    return tp_host_read_text(path, text, sizeof(text)) == 0 &&
           tp_host_each_listed(text, 1024, add_node, ret_set) > 0;
}

/* A cpuset may forbid nodes that have memory: binding to one fails with EINVAL. */
static bool read_allowed_nodes(struct node_set *ret_set) {
    char text[16384];
    char *line, *end;

    memset(ret_set, 0, sizeof(*ret_set));
    if (tp_host_read_text("/proc/self/status", text, sizeof(text)) < 0)
        return false;
    line = strstr(text, "\nMems_allowed_list:");
    if (!line)
        return false;
    line = strchr(line, ':') + 1;
    line += strspn(line, " \t");
    end = strchr(line, '\n');
    if (end)
        *end = '\0';
    return tp_host_each_listed(line, 1024, add_node, ret_set) > 0;
}

static unsigned list_nodes(const struct node_set *memory, const struct node_set *allowed,
                           int *ret_nodes) {
    unsigned count = 0;

    for (int node = 0; node < 1024 && count < TP_MAX_NODES; node++) {
        if (memory->has[node] && (!allowed || allowed->has[node]))
            ret_nodes[count++] = node;
    }
    return count;
}

unsigned tp_host_memory_nodes(int ret_nodes[static TP_MAX_NODES]) {
    struct node_set memory, allowed;
    unsigned count = 0;

    if (!read_nodes("/sys/devices/system/node/has_memory", &memory) &&
        !read_nodes("/sys/devices/system/node/online", &memory))
        add_node(0, &memory);
    if (read_allowed_nodes(&allowed))
        count = list_nodes(&memory, &allowed, ret_nodes);
    if (count == 0)
        count = list_nodes(&memory, NULL, ret_nodes);
    return count;
}

/* ---- cgroups
 * ------------------------------------------------------------------------------------------------------
 */

/*
 * This process's path in the hierarchy of a version 1 controller, or of version 2 where
 * `controller` is NULL: from /proc/self/cgroup, whose lines read "ID:controller,controller:path";
 * version 2 has ID 0 and no controllers.
 */
static bool own_cgroup(const char *controller, char *ret_path, size_t bytes) {
    char text[8192];
    char *save = NULL;

    if (tp_host_read_text("/proc/self/cgroup", text, sizeof(text)) < 0)
        return false;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *names = strchr(line, ':');
        char *path = names ? strchr(names + 1, ':') : NULL;
        char *save_name = NULL;
        bool found = false;

        if (!path)
            continue;
        *names++ = '\0';
        *path++ = '\0';
        if (!controller)
            found = !strcmp(line, "0") && !*names;
        for (char *name = strtok_r(names, ",", &save_name); controller && name;
             name = strtok_r(NULL, ",", &save_name))
            found = found || !strcmp(name, controller);
        if (!found || path[0] != '/' || strlen(path) >= bytes)
            continue;
        memcpy(ret_path, path, strlen(path) + 1);
        return true;
    }
    return false;
}

/*
 * Calls `read_level` with the directory of this process's group and of each of its ancestors, as
 * far as they are visible: without a cgroup namespace the path is the host's while a container's
 * mount shows only its own part, so the mount's root always is the last one called.
 */
static void each_level(const char *mount, const char *controller,
                       void (*read_level)(const char *dir, void *arg), void *arg) {
    char path[PATH_MAX], dir[PATH_MAX];

    if (!own_cgroup(controller, path, sizeof(path)))
        return;
    if (!strcmp(path, "/"))
        path[0] = '\0';
    for (;;) {
        char *slash = strrchr(path, '/');
        int length = snprintf(dir, sizeof(dir), "%s%s", mount, path);

        if (length > 0 && (size_t)length < sizeof(dir) && !strstr(path, "/.."))
            read_level(dir, arg);
        if (!path[0] || !slash)
            return;
        *slash = '\0';
    }
}

static int read_in(const char *dir, const char *file, char *ret_text, size_t bytes) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof(path), "%s/%s", dir, file);

    if (length < 0 || (size_t)length >= sizeof(path))
        return -ENAMETOOLONG;
    return tp_host_read_text(path, ret_text, bytes);
}

static int read_u64_in(const char *dir, const char *file, uint64_t *ret_value) {
    char path[PATH_MAX];
    int length = snprintf(path, sizeof(path), "%s/%s", dir, file);

    if (length < 0 || (size_t)length >= sizeof(path))
        return -ENAMETOOLONG;
    return tp_host_read_u64(path, ret_value);
}

static const char *const unified_mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};

/* ---- CPUs
 * ---------------------------------------------------------------------------------------------------------
 */

static void lower_cpus(unsigned *cpus, uint64_t quota_us, uint64_t period_us) {
    uint64_t whole;

    if (quota_us == 0 || period_us == 0)
        return;
    whole = quota_us / period_us + (quota_us % period_us != 0);
    if (whole < *cpus)
        *cpus = (unsigned)whole;
}

static void read_cpu_max(const char *dir, void *arg) {
    char text[64];
    char *end;
    unsigned long long quota_us, period_us;

    if (read_in(dir, "cpu.max", text, sizeof(text)) < 0 || text[0] < '0' || text[0] > '9')
        return; /* "max 100000": no limit at this level */
    quota_us = strtoull(text, &end, 10);
    period_us = strtoull(end, NULL, 10);
    lower_cpus(arg, quota_us, period_us);
}

static void read_cfs_quota(const char *dir, void *arg) {
    uint64_t quota_us, period_us;

    /* -1 is "no limit" and no number here. */
    if (read_u64_in(dir, "cpu.cfs_quota_us", &quota_us) == 0 &&
        read_u64_in(dir, "cpu.cfs_period_us", &period_us) == 0)
        lower_cpus(arg, quota_us, period_us);
}

/* sched_getaffinity answers EINVAL until the mask has room for every CPU that the kernel was built
 * for. */
static unsigned affinity_cpus(void) {
    for (size_t cpus = 1024; cpus <= MAX_CPUS; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        int count = -1;
        bool retry = false;

        if (!set)
            break;
        if (sched_getaffinity(0, CPU_ALLOC_SIZE(cpus), set) == 0)
            count = CPU_COUNT_S(CPU_ALLOC_SIZE(cpus), set);
        else
            retry = errno == EINVAL;
        CPU_FREE(set);
        if (count > 0)
            return (unsigned)count;
        if (!retry)
            break;
    }
    return 1;
}

unsigned tp_host_cpus(void) {
    unsigned cpus = affinity_cpus();

    for (size_t i = 0; i < 2; i++)
        each_level(unified_mounts[i], NULL, read_cpu_max, &cpus);
    each_level("/sys/fs/cgroup/cpu", "cpu", read_cfs_quota, &cpus);
    return cpus > 0 ? cpus : 1;
}

/* ---- memory
 * -------------------------------------------------------------------------------------------------------
 */

static bool find_field(const char *text, const char *name, uint64_t *ret_value) {
    size_t length = strlen(name);

    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, name, length) != 0 || !strchr(" \t:", line[length]) || !line[length])
            continue;
        *ret_value = strtoull(line + length + strspn(line + length, " \t:"), NULL, 10);
        return true;
    }
    return false;
}

/*
 * Fields of memory.stat. The kernel drops clean page cache of files, used recently or not, and
 * caches of its own before it fails an allocation; pages that have to be written first may take
 * longer than it tries. tmpfs and shared memory are in none of these fields: they cannot be
 * dropped. Version 1 does not count slabs.
 */
struct cache_fields {
    const char *reclaimable[3], *unwritten[2];
};
static const struct cache_fields unified_fields = {
    .reclaimable = {"active_file", "inactive_file", "slab_reclaimable"},
    .unwritten = {"file_dirty", "file_writeback"},
};
static const struct cache_fields version_1_fields = {
    .reclaimable = {"total_active_file", "total_inactive_file"},
    .unwritten = {"total_dirty", "total_writeback"},
};

static uint64_t sum_fields(const char *text, const char *const *names, unsigned count) {
    uint64_t sum = 0;

    for (unsigned i = 0; i < count; i++) {
        uint64_t value = 0;

        if (names[i] && find_field(text, names[i], &value) && value <= UINT64_MAX - sum)
            sum += value;
    }
    return sum;
}

static void lower_room(uint64_t *room, const char *dir, const struct cache_fields *fields,
                       uint64_t limit, uint64_t used) {
    char text[16384];
    uint64_t cache = 0, unwritten = 0, left;

    if (read_in(dir, "memory.stat", text, sizeof(text)) == 0) {
        cache = sum_fields(text, fields->reclaimable, 3);
        unwritten = sum_fields(text, fields->unwritten, 2);
    }
    cache -= unwritten < cache ? unwritten : cache;
    used -= cache < used ? cache : used;
    left = used < limit ? limit - used : 0;
    if (left < *room)
        *room = left;
}

static void read_memory_max(const char *dir, void *arg) {
    uint64_t limit, used;

    if (read_u64_in(dir, "memory.max", &limit) == 0 &&
        read_u64_in(dir, "memory.current", &used) == 0)
        lower_room(arg, dir, &unified_fields, limit, used);
}

static void read_memory_limit(const char *dir, void *arg) {
    uint64_t limit, used;

    if (read_u64_in(dir, "memory.limit_in_bytes", &limit) == 0 &&
        read_u64_in(dir, "memory.usage_in_bytes", &used) == 0)
        lower_room(arg, dir, &version_1_fields, limit, used);
}

int tp_host_memory_available(uint64_t *ret_bytes) {
    char text[8192];
    uint64_t room = 0;
    int rc = tp_host_read_text("/proc/meminfo", text, sizeof(text));

    if (rc < 0)
        return rc;
    if (!find_field(text, "MemAvailable", &room) || room > UINT64_MAX / 1024)
        return -ENODATA;
    room *= 1024;
    for (size_t i = 0; i < 2; i++)
        each_level(unified_mounts[i], NULL, read_memory_max, &room);
    each_level("/sys/fs/cgroup/memory", "memory", read_memory_limit, &room);
    *ret_bytes = room;
    return 0;
}

/* ---- sizes of files
 * -----------------------------------------------------------------------------------------------
 */

int tp_host_resize(int fd, uint64_t bytes) {
    struct rlimit limit;

    if (bytes > INT64_MAX || getrlimit(RLIMIT_FSIZE, &limit) != 0 || bytes > limit.rlim_cur)
        return -EFBIG;
    return ftruncate(fd, (off_t)bytes) == 0 ? 0 : -errno;
}
