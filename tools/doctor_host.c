/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The machine, as far as shared memory between processes needs it. Each check tries the thing
 * itself where it can: what a kernel version promises, a seccomp profile may forbid.
 */
#include "tools/doctor.h"

#include "env/env.h"
#include "tools/tool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <numaif.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#define PIECE_BYTES (UINT64_C(2) << 30) /* the default of MC_STORE_CUMEM_PIECE_BYTES */

/* The first line of a small file, without its end; false when it cannot be read. */
static bool read_line(const char *path, char *ret_line, size_t bytes) {
    FILE *file = fopen(path, "re");
    bool read = file && fgets(ret_line, (int)bytes, file);

    if (read) {
        ret_line[strcspn(ret_line, "\n")] = '\0';
    }
    if (file) {
        (void)fclose(file);
    }
    return read;
}

static void check_system(struct findings *findings) {
    struct utsname system;
    unsigned major = 0;
    unsigned minor = 0;

    if (uname(&system) != 0) {
        return;
    }
    bool fits = strcmp(system.machine, "x86_64") == 0;
    finding_add(findings, fits ? FINDING_OK : FINDING_FAIL, "cpu",
                fits ? NULL : "the hooks follow the x86-64 ABI", "%s", system.machine);
    (void)sscanf(system.release, "%u.%u", &major, &minor);
    /* 3.17 memfd_create and seals; 4.14 MFD_HUGETLB; tested from 5.4 on */
    if (major < 3 || (major == 3 && minor < 17)) {
        finding_add(findings, FINDING_FAIL, "kernel", "memfd_create needs Linux 3.17", "%s",
                    system.release);
    } else if (major < 5 || (major == 5 && minor < 4)) {
        finding_add(findings, FINDING_WARN, "kernel", "tested from Linux 5.4 on", "%s",
                    system.release);
    } else {
        finding_add(findings, FINDING_OK, "kernel", NULL, "%s", system.release);
    }
}

static void check_memfd(struct findings *findings) {
    int fd = memfd_create("tidepool-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0) {
        finding_add(findings, FINDING_FAIL, "memfd",
                    "allow memfd_create in the container's seccomp profile", "memfd_create: %s",
                    strerror(errno));
        return;
    }
    if (ftruncate(fd, 4096) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        finding_add(findings, FINDING_FAIL, "memfd",
                    "segments must be sealed before they are shared", "sealing: %s",
                    strerror(errno));
    } else {
        finding_add(findings, FINDING_OK, "memfd", NULL,
                    "can be made and sealed; /dev/shm is not used");
    }
    (void)close(fd);
}

static void check_thp(struct findings *findings) {
    char line[128];

    if (!read_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", line, sizeof(line))) {
        finding_add(findings, FINDING_OK, "transparent pages", NULL,
                    "shmem_enabled cannot be read: memfd segments have 4 KiB pages");
        return;
    }
    bool off = strstr(line, "[never]") || strstr(line, "[deny]");
    finding_add(findings, off ? FINDING_WARN : FINDING_OK, "transparent pages",
                off ? "for 2 MiB pages in memfd segments: echo advise > "
                      "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
                    : NULL,
                "shmem_enabled: %s", line);
}

/* The pages of 1 GiB or 2 MiB that Mooncake asks for (MC_STORE_HUGEPAGE_SIZE: "2MB" when it is not
 * set, or "1GB"). */
static uint64_t mooncakes_page_kib(void) {
    const char *size = getenv("MC_STORE_HUGEPAGE_SIZE");

    return size && strncasecmp(size, "1G", 2) == 0 ? 1024 * 1024 : 2048;
}

/* The page size that the store is configured to take from a pool of huge pages; 0: none. */
static uint64_t needed_pool_kib(const struct tp_store_config *store) {
    struct statfs about;

    if (store->half != TP_HALF_ON) {
        return 0;
    }
    if (store->kind == TP_SEGMENT_FILES && statfs(store->segment_dir, &about) == 0 &&
        about.f_type == HUGETLBFS_MAGIC) {
        return (uint64_t)about.f_bsize / 1024;
    }
    if (store->kind != TP_SEGMENT_MEMFD) {
        return 0;
    }
    if (store->asks_hugepages) {
        return mooncakes_page_kib();
    }
    return store->hugepages ? 2048 : 0; /* MFD_HUGE_2MB */
}

static void check_hugepage_size(const char *name, uint64_t needed_kib, struct findings *findings) {
    char path[PATH_MAX];
    char total[32] = "0";
    char unused[32] = "0";
    char what[64];
    unsigned long kib = 0;

    if (sscanf(name, "hugepages-%lukB", &kib) != 1) {
        return;
    }
    (void)snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/%s/nr_hugepages", name);
    (void)read_line(path, total, sizeof(total));
    (void)snprintf(path, sizeof(path), "/sys/kernel/mm/hugepages/%s/free_hugepages", name);
    (void)read_line(path, unused, sizeof(unused));
    (void)snprintf(what, sizeof(what), "hugepages %lu MiB", kib / 1024);
    bool needed = kib == needed_kib;
    bool none = needed && strtoull(total, NULL, 10) == 0;
    bool used_up = needed && !none && strtoull(unused, NULL, 10) == 0;
    finding_add(findings,
                none      ? FINDING_FAIL
                : used_up ? FINDING_WARN
                          : FINDING_OK,
                what,
                none      ? "the store takes them: reserve them (as root: sysctl vm.nr_hugepages=N)"
                : used_up ? "fine when a running store has them; otherwise reserve more"
                          : NULL,
                "%s reserved, %s free%s", total, unused, needed ? "" : " (not asked for)");
}

static void check_hugepages(const struct tp_config *config, struct findings *findings) {
    DIR *dir = opendir("/sys/kernel/mm/hugepages");
    uint64_t needed_kib = needed_pool_kib(&config->store);
    const struct dirent *file;

    while (dir && (file = readdir(dir))) {
        check_hugepage_size(file->d_name, needed_kib, findings);
    }
    if (dir) {
        (void)closedir(dir);
    } else if (needed_kib) {
        finding_add(findings, FINDING_FAIL, "hugepages",
                    "this kernel has none: unset TIDEPOOL_HUGEPAGES or MC_STORE_USE_HUGEPAGE",
                    "not supported");
    }
}

static const char *limit_text(rlim_t limit, char ret_text[static 16]) {
    if (limit == RLIM_INFINITY) {
        (void)snprintf(ret_text, 16, "unlimited");
        return ret_text;
    }
    return text_bytes(limit, ret_text);
}

static void check_memlock(const struct tp_config *config, struct findings *findings) {
    bool registers = config->engine.half == TP_HALF_ON && config->engine.register_peer_memory;
    uint64_t need = registers ? config->engine.register_max_bytes : 0;
    struct rlimit limit;
    char have_text[16];
    char need_text[16];

    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
        return;
    }
    bool little =
        registers && limit.rlim_cur != RLIM_INFINITY && (need == 0 || limit.rlim_cur < need);
    finding_add(findings, little ? FINDING_WARN : FINDING_OK, "memlock limit",
                little ? "register_peer_memory locks memory: ulimit -l unlimited (containers: "
                         "--ulimit memlock=-1)"
                       : NULL,
                "%s, needed %s", limit_text(limit.rlim_cur, have_text),
                !registers ? "0 B (host memory is not locked)"
                : need     ? text_bytes(need, need_text)
                           : "the store's size");
}

/* One fd for each piece of a store as large as this machine, its clients, and what Mooncake itself
 * opens. */
static void check_nofile(const struct tp_config *config, struct findings *findings) {
    uint64_t piece = config->store.piece_bytes ? config->store.piece_bytes : PIECE_BYTES;
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t need = memory / piece + 1 + 64 + 512;
    struct rlimit limit;
    char advice[128];

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return;
    }
    bool little = limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < need;
    (void)snprintf(advice, sizeof(advice), "ulimit -n %" PRIu64 " (hard limit here: %" PRIu64 ")",
                   need, (uint64_t)limit.rlim_max);
    finding_add(findings, little ? FINDING_WARN : FINDING_OK, "open files limit",
                little ? advice : NULL,
                "%" PRIu64 ", a store of this machine's memory needs about %" PRIu64,
                (uint64_t)limit.rlim_cur, need);
}

static void check_memory(struct findings *findings) {
    uint64_t bytes = 0;
    char text[16];
    int error = tp_host_memory_available(&bytes);

    if (error) {
        finding_add(findings, FINDING_WARN, "memory", NULL, "how much is free cannot be read: %s",
                    strerror(-error));
        return;
    }
    finding_add(findings, FINDING_OK, "memory", NULL,
                "%s can still be allocated (cgroup limit included), %u CPUs",
                text_bytes(bytes, text), tp_host_cpus());
}

static bool in_container(void) {
    const char *container = getenv("container");

    return access("/.dockerenv", F_OK) == 0 || access("/run/.containerenv", F_OK) == 0 ||
           (container && *container) || getenv("KUBERNETES_SERVICE_HOST");
}

static void check_identity(const struct tp_config *config, struct findings *findings) {
    char identity[96] = "";
    char machine_id[64] = "";
    int error = tp_host_identity(config->boot_id_only, identity);

    if (error) {
        finding_add(findings, FINDING_FAIL, "host identity",
                    "/proc/sys/kernel/random/boot_id must be readable", "%s", strerror(-error));
        return;
    }
    bool has_machine_id =
        read_line("/etc/machine-id", machine_id, sizeof(machine_id)) && machine_id[0];
    /* Images bring their own /etc/machine-id, or none: processes of one host then look like two
     * hosts. */
    bool risky = !config->boot_id_only && (in_container() || !has_machine_id);
    finding_add(findings, risky ? FINDING_WARN : FINDING_OK, "host identity",
                risky ? "store and engines must have the same; for containers set "
                        "MC_TENT_MACHINE_ID=boot_id on both sides"
                      : NULL,
                "%s%s", identity,
                config->boot_id_only ? " (boot_id only)"
                : has_machine_id     ? ""
                                     : " (no /etc/machine-id)");
}

static void check_numa(struct findings *findings) {
    int nodes[TP_MAX_NODES];
    unsigned count = tp_host_memory_nodes(nodes);
    unsigned long mask = count && nodes[0] < 64 ? 1UL << nodes[0] : 1;
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int error = 0;

    if (page == MAP_FAILED) {
        return;
    }
    if (mbind(page, 4096, MPOL_PREFERRED, &mask, 65, 0) != 0) {
        error = errno;
    }
    (void)munmap(page, 4096);
    /* Docker's default seccomp profile forbids mbind without CAP_SYS_NICE. */
    finding_add(findings, error && count > 1 ? FINDING_WARN : FINDING_OK, "numa",
                error && count > 1 ? "segments will not be spread over the nodes: run the "
                                     "container with --cap-add SYS_NICE"
                                   : NULL,
                "%u %s with memory, mbind %s", count, count == 1 ? "node" : "nodes",
                error ? strerror(error) : "allowed");
}

void doctor_host(const struct tp_config *config, struct findings *findings) {
    check_system(findings);
    check_memfd(findings);
    check_thp(findings);
    check_hugepages(config, findings);
    check_memory(findings);
    check_memlock(config, findings);
    check_nofile(config, findings);
    check_numa(findings);
    check_identity(config, findings);
}
