/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel's files say about other hosts is read right, and unsafe directories are refused
 * in words that help. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/env.h"
#include "env/host_files.h"
#include "scratch.h"
#include "segment/wire.h"

#define GIB (UINT64_C(1) << 30)

static char root[64];

static void make_root(void) {
    strcpy(root, "/tmp/tidepool-host-XXXXXX");
    cr_assert(scratch_directory(root));
}

static void drop_root(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(host, .timeout = 30, .init = make_root, .fini = drop_root);

static const char *in_root(const char *path) {
    static char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", root, path);
    return full;
}

/* A file of the described host, with the folders on its way. */
static void put(const char *path, const char *text) {
    char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        cr_assert(mkdir(full, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(full, "we");
    cr_assert(file);
    cr_assert_geq(fputs(text, file), 0);
    fclose(file);
    tp_host_root = root;
}

Test(host, identity_is_boot_id_and_machine_id) {
    char identity[96];
    put("/proc/sys/kernel/random/boot_id", "64994438-1b4e-47bf-951e-e3ccee05fcb6\n");
    cr_assert_eq(tp_host_identity(false, identity), 0);
    cr_assert_str_eq(identity, "64994438-1b4e-47bf-951e-e3ccee05fcb6");
    put("/etc/machine-id", "3d1219c7c4c5404aaa1f6d2a48adfda4\n");
    cr_assert_eq(tp_host_identity(false, identity), 0);
    cr_assert_str_eq(identity,
                     "64994438-1b4e-47bf-951e-e3ccee05fcb6:3d1219c7c4c5404aaa1f6d2a48adfda4");
    cr_assert_eq(tp_host_identity(true, identity), 0);
    cr_assert_str_eq(identity, "64994438-1b4e-47bf-951e-e3ccee05fcb6");
}

Test(host, identity_is_never_the_machine_id_alone) {
    char identity[96] = "untouched";
    put("/etc/machine-id", "3d1219c7c4c5404aaa1f6d2a48adfda4\n");
    cr_assert_eq(tp_host_identity(false, identity), -ENOENT);
    put("/proc/sys/kernel/random/boot_id", "\n");
    cr_assert_eq(tp_host_identity(false, identity), -ENODATA);
    cr_assert_str_eq(identity, "untouched");
}

Test(host, identity_of_hostile_files_is_one_bounded_line) {
    char identity[96], text[5000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    text[3] = '\n';
    put("/proc/sys/kernel/random/boot_id", text);
    put("/etc/machine-id", text);
    cr_assert_eq(tp_host_identity(false, identity), 0);
    cr_assert_lt(strlen(identity), 96);
    cr_assert_not(strchr(identity, '\n'));
}

Test(host, this_hosts_identity_fits_its_kernel) {
    char identity[96];
    cr_assert_eq(tp_host_identity(true, identity), 0);
    cr_assert_eq(strlen(identity), 36);
}

Test(host, random_ids_differ) {
    uint8_t one[16], two[16];
    cr_assert_eq(tp_random_id(one), 0);
    cr_assert_eq(tp_random_id(two), 0);
    cr_assert_neq(memcmp(one, two, 16), 0);
}

Test(host, netns_is_the_inode) {
    struct stat status;
    cr_assert_eq(stat("/proc/self/ns/net", &status), 0);
    cr_assert_eq(tp_host_netns(), status.st_ino);
}

/* ---- NUMA ---- */

static void check_nodes(const int *expected, unsigned count) {
    int nodes[TP_MAX_NODES];
    cr_assert_eq(tp_host_memory_nodes(nodes), count);
    cr_assert_eq(memcmp(nodes, expected, count * sizeof *expected), 0);
}

Test(host, nodes_with_memory_that_the_cpuset_allows) {
    put("/sys/devices/system/node/online", "0-7\n");
    put("/sys/devices/system/node/has_memory", "0-1,4,6-7\n");
    check_nodes((const int[]){0, 1, 4, 6, 7}, 5);
    put("/proc/self/status",
        "Name:\tx\nMems_allowed:\t00000000,000000d0\nMems_allowed_list:\t4,6-7\nx:\t1\n");
    check_nodes((const int[]){4, 6, 7}, 3);
    put("/proc/self/status",
        "Name:\tx\nMems_allowed_list:\t3\n"); /* nothing left: the files disagree */
    check_nodes((const int[]){0, 1, 4, 6, 7}, 5);
}

Test(host, no_numa_is_node_0) {
    put("/proc/self/status", "Name:\tx\n");
    check_nodes((const int[]){0}, 1);
    put("/sys/devices/system/node/has_memory", "\n");
    put("/sys/devices/system/node/online", "garbage\n");
    check_nodes((const int[]){0}, 1);
}

Test(host, more_nodes_than_fit_are_cut) {
    int nodes[TP_MAX_NODES];
    put("/sys/devices/system/node/has_memory", "0-1023\n");
    cr_assert_eq(tp_host_memory_nodes(nodes), TP_MAX_NODES);
    put("/sys/devices/system/node/has_memory", "0-4000000000\n");
    cr_assert_eq(tp_host_memory_nodes(nodes), 1);
}

/* ---- CPUs ---- */

static unsigned mask_cpus(void) {
    cpu_set_t set;
    cr_assert_eq(sched_getaffinity(0, sizeof set, &set), 0);
    return (unsigned)CPU_COUNT(&set);
}

Test(host, cpus_follow_the_affinity_mask) {
    cpu_set_t set;
    put("/proc/self/cgroup", "0::/\n");
    cr_assert_eq(tp_host_cpus(), mask_cpus());
    CPU_ZERO(&set);
    CPU_SET(sched_getcpu(), &set);
    cr_assert_eq(sched_setaffinity(0, sizeof set, &set), 0);
    cr_assert_eq(tp_host_cpus(), 1);
}

Test(host, cpu_quota_of_any_ancestor_counts) {
    if (mask_cpus() < 2)
        return;
    put("/proc/self/cgroup", "0::/kubepods/pod1/c1\n");
    put("/sys/fs/cgroup/kubepods/pod1/c1/cpu.max", "max 100000\n");
    cr_assert_eq(tp_host_cpus(), mask_cpus());
    put("/sys/fs/cgroup/kubepods/pod1/cpu.max", "100001 100000\n"); /* 1.00001: rounded up */
    cr_assert_eq(tp_host_cpus(), 2);
    put("/sys/fs/cgroup/kubepods/cpu.max", "50000 100000\n");
    cr_assert_eq(tp_host_cpus(), 1);
}

Test(host, cpu_quota_at_the_mounts_root_counts_where_the_path_is_the_hosts) {
    put("/proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n0::/../../docker/abc\n");
    put("/sys/docker/abc/cpu.max", "100000 100000\n"); /* beside the mount: not ours */
    put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    cr_assert_eq(tp_host_cpus(), mask_cpus());
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n");
    cr_assert_eq(tp_host_cpus(), 1);
}

Test(host, cpu_garbage_is_no_limit) {
    put("/proc/self/cgroup", "::\n0\n:\nx:y\n0:::\n0::/a\n0::relative\n");
    put("/sys/fs/cgroup/a/cpu.max", "0 0\n");
    put("/sys/fs/cgroup/cpu.max", "12\n");
    cr_assert_eq(tp_host_cpus(), mask_cpus());
}

/* ---- memory ---- */

static uint64_t room(void) {
    uint64_t bytes = 0;
    cr_assert_eq(tp_host_memory_available(&bytes), 0);
    return bytes;
}

#define MEMINFO                                                                                    \
    "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   33554432 kB\n" /* 32 GiB */

Test(host, memory_without_limits_is_memavailable) {
    put("/proc/meminfo", MEMINFO);
    cr_assert_eq(room(), 32 * GIB);
    put("/proc/self/cgroup", "0::/a\n");
    put("/sys/fs/cgroup/a/memory.max", "max\n");
    put("/sys/fs/cgroup/a/memory.current", "123456\n");
    cr_assert_eq(room(), 32 * GIB);
}

Test(host, memory_limit_of_any_ancestor_counts_without_droppable_cache) {
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    put("/sys/fs/cgroup/a/memory.max", "8589934592\n");
    put("/sys/fs/cgroup/a/memory.current", "6442450944\n");
    cr_assert_eq(room(), 2 * GIB);
    put("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 1073741824\nactive_file 0\n");
    cr_assert_eq(room(), 3 * GIB);
    /* What was read twice can be dropped as well, and the kernel's own caches; not shared memory,
     * nor what must be written to a disk before. */
    put("/sys/fs/cgroup/a/memory.stat",
        "file 4294967296\nshmem 1073741824\nfile_dirty 536870912\nfile_writeback 536870912\n"
        "inactive_file 1073741824\nactive_file 2147483648\nslab_reclaimable 1073741824\n"
        "slab_unreclaimable 77\n");
    cr_assert_eq(room(), 5 * GIB);
    put("/sys/fs/cgroup/a/memory.current", "9663676416\n"); /* above the limit */
    put("/sys/fs/cgroup/a/memory.stat", "inactive_file 0\n");
    cr_assert_eq(room(), 0);
}

Test(host, memory_limit_of_version_1_counts) {
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "4:memory:/docker/abc\n0::/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n");
    cr_assert_eq(room(), 32 * GIB);
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n");
    cr_assert_eq(room(), 3 * GIB);
    put("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1073741824\n");
    cr_assert_eq(room(), 4 * GIB);
    put("/sys/fs/cgroup/memory/memory.stat",
        "inactive_file 1073741824\nactive_file 1073741824\ntotal_shmem 1073741824\n"
        "total_dirty 268435456\ntotal_writeback 0\ntotal_inactive_file 268435456\n"
        "total_active_file 536870912\n");
    cr_assert_eq(room(), 3 * GIB + GIB / 2);
}

Test(host, memory_needs_meminfo) {
    uint64_t bytes = 7;
    put("/etc/x", "");
    cr_assert_eq(tp_host_memory_available(&bytes), -ENOENT);
    put("/proc/meminfo", "MemTotal: 1 kB\n");
    cr_assert_eq(tp_host_memory_available(&bytes), -ENODATA);
    cr_assert_eq(bytes, 7);
}

/* ---- directories ---- */

static char error[256];
static struct tp_config config;

static int open_dir(const char *path, bool create) {
    memset(error, 0, sizeof error);
    int fd = tp_host_open_dir(path, create, &config, error, sizeof error);
    if (fd < 0)
        cr_assert(error[0] && !strchr(error, '\n'), "\"%s\"", error);
    return fd;
}

static void names(const char *fragment) {
    cr_assert(strstr(error, fragment), "no \"%s\" in: %s", fragment, error);
}

Test(host, a_missing_directory_is_made_private) {
    struct stat status;
    int fd;
    cr_assert_eq(open_dir(in_root("/a"), false), -ENOENT);
    names("/a: no such directory");
    fd = open_dir(in_root("/a"), true);
    cr_assert_geq(fd, 0, "%s", error);
    cr_assert_eq(fstat(fd, &status), 0);
    cr_assert_eq(status.st_mode & 07777, 0700);
    cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    close(fd);
    cr_assert_eq(open_dir(in_root("/b/c"), true), -ENOENT);
    names("cannot create directory");
}

Test(host, a_directory_that_others_may_write_is_refused) {
    cr_assert_eq(mkdir(in_root("/a"), 0700), 0);
    cr_assert_eq(chmod(in_root("/a"), 01777), 0);
    cr_assert_eq(open_dir(in_root("/a"), true), -EPERM);
    names("mode 1777");
    names("chmod o-w");
    cr_assert_eq(chmod(in_root("/a"), 0770), 0);
    int fd = open_dir(in_root("/a"), true);
    cr_assert_geq(fd, 0, "%s", error);
    close(fd);
}

Test(host, not_a_directory_is_refused) {
    put("/file", "");
    cr_assert_eq(open_dir(in_root("/file"), true), -ENOTDIR);
    names("not a directory");
    cr_assert_eq(open_dir("relative", true), -EINVAL);
    names("\"relative\" is not an absolute path");
    cr_assert_eq(open_dir("", true), -EINVAL);
}

Test(host, a_strangers_directory_is_refused_unless_listed) {
    if (geteuid() != 0)
        return; /* only root can make one */
    cr_assert_eq(mkdir(in_root("/a"), 0755), 0);
    cr_assert_eq(chown(in_root("/a"), 12345, 12345), 0);
    cr_assert_eq(open_dir(in_root("/a"), true), -EPERM);
    names("belongs to uid 12345");
    names("mode 0755");
    names("our uid 0");
    names("TIDEPOOL_ALLOW_UIDS");
    config.allow_uids[0] = 12345;
    config.allow_uid_count = 1;
    int fd = open_dir(in_root("/a"), true);
    cr_assert_geq(fd, 0, "%s", error);
    close(fd);
}

Test(host, no_permission_names_owner_mode_and_our_uid) {
    if (geteuid() != 0)
        return;
    cr_assert_eq(chmod(root, 0755), 0);
    cr_assert_eq(mkdir(in_root("/a"), 0700), 0);
    cr_assert_eq(mkdir(in_root("/a/b"), 0700), 0);
    cr_assert_eq(seteuid(12345), 0);
    cr_assert_eq(open_dir(in_root("/a"), false), -EACCES);
    names(root);
    names("owner uid 0, mode 0700");
    names("as uid 12345");
    names("Permission denied");
    cr_assert_eq(open_dir(in_root("/a/b"), false), -EACCES);
    names("parent directories");
    cr_assert_eq(open_dir(in_root("/new"), true), -EACCES);
    names("cannot create");
    cr_assert_eq(seteuid(0), 0);
}

Test(host, long_and_hostile_names_stay_one_line) {
    char path[5000];
    memset(path, 'x', sizeof path - 1);
    path[0] = '/';
    path[1] = '\n';
    path[sizeof path - 1] = '\0';
    cr_assert_eq(open_dir(path, false), -ENAMETOOLONG);
    cr_assert_lt(strlen(error), sizeof error);
    names("File name too long");
}

Test(host, a_failed_open_leaks_no_fd) {
    int before = dup(0);
    close(before);
    for (int i = 0; i < 100; i++)
        cr_assert_lt(open_dir("/tmp", false), 0);
    int after = dup(0);
    close(after);
    cr_assert_eq(before, after);
}

/* ---- users ---- */

/* In a namespace that maps nobody: what is trusted there. */
static int look_from_a_bare_namespace(void) {
    int pair[2];
    uint32_t uid = 0;
    if (unshare(CLONE_NEWUSER) < 0)
        return 77;
    if (geteuid() != 65534 || open_dir(root, false) != -EPERM ||
        !strstr(error, "not mapped in this user namespace"))
        return 1;
    config.allow_uid_count = 1;
    config.allow_uids[0] = 65534;
    if (open_dir(root, false) != -EPERM)
        return 2;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) < 0)
        return 3;
    return tp_wire_check_peer(pair[0], &config, &uid, NULL) == -EACCES && uid == 65534 ? 0 : 4;
}

Test(host, a_uid_that_stands_for_all_unmapped_ones_is_not_trusted) {
    int status = -1;
    pid_t child = fork();
    if (child == 0)
        _exit(look_from_a_bare_namespace());
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        cr_skip("CONFIG: user namespaces are not allowed here");
    cr_assert_eq(WEXITSTATUS(status), 0);
}

Test(host, the_overflow_uid_is_a_user_like_others_where_all_are_mapped) {
    config.allow_uid_count = 1;
    config.allow_uids[0] = 65534;
    cr_assert(tp_host_uid_is_trusted(65534, &config) && tp_host_uid_is_trusted(0, NULL));
    cr_assert_not(tp_host_uid_is_trusted(65533, &config));
    put("/proc/self/uid_map", "0 100000 65536\n65536 300000 10\n");
    put("/proc/sys/kernel/overflowuid", "65534\n");
    tp_host_root = root;
    bool trusted = tp_host_uid_is_trusted(65534, &config);
    put("/proc/self/uid_map",
        "         0          0       1000\n      1000       1000 4294966295\n");
    bool mapped = tp_host_uid_is_trusted(65534, &config);
    tp_host_root = "";
    cr_assert_not(trusted);
    cr_assert(mapped);
}
