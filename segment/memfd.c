/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pieces of anonymous memory: memfds, on huge pages of the kernel's pool when asked for and there,
 * else on ordinary pages with advice for transparent huge ones.
 *
 * It must not know: addresses of segments, who maps them, the server.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "env/env.h"
#include "env/memfd.h"
#include "segment/backing.h"
#include "segment/hugepages.h"

#define MFD_HUGE_SHIFT_BITS 26 /* linux/memfd.h: the logarithm of the page size lies there */

#define SMALL_PAGE UINT64_C(4096)
#define HUGE_PAGE (UINT64_C(2) << 20)

/*
 * Huge pages of a memfd can be taken away by whoever maps it: no seal but F_SEAL_WRITE forbids to
 * punch a hole, and once others hold all pages of the pool, a touch there is SIGBUS. Ordinary pages
 * come back as zeros. So the huge ones are only for processes of root and of our own user.
 */
static bool hugepages_wanted(const struct tp_config *config) {
    return config->store.hugepages && config->allow_uid_count == 0;
}

static const char *setting_of(const struct tp_config *config) {
    return config->store.hugepage_bytes ? "MC_STORE_USE_HUGEPAGE" : "TIDEPOOL_HUGEPAGES=1";
}

static void say_not_for_others(const struct tp_config *config) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    if (config->store.hugepages && config->allow_uid_count > 0)
        tp_log_once(&said, TP_LOG_WARN,
                    "%s: segments get ordinary pages, since TIDEPOOL_ALLOW_UIDS lists other users: "
                    "a process of theirs could take huge pages out of a segment, and engines that "
                    "touch it would die of SIGBUS; unset one of the two",
                    setting_of(config));
}

/* True when the segment can lie on 2 MiB pages; otherwise one line said why it will not. */
static bool hugepages_possible(const struct tp_config *config, const struct tp_need *need,
                               uint64_t page_bytes) {
    const char *setting = setting_of(config);
    struct tp_shortage shortage;
    if (need->address % page_bytes != 0) {
        tp_log(TP_LOG_WARN,
               "%s: the segment at %#" PRIx64 " is not aligned to %" PRIu64
               " KiB; it gets ordinary pages",
               setting, need->address, page_bytes >> 10);
        return false;
    }
    if (need->bytes < page_bytes)
        return false;
    if (tp_hugepages_fit(need, page_bytes, 0, &shortage))
        return true;
    char where[32] = "";
    if (shortage.node >= 0)
        snprintf(where, sizeof where, " on node %d", shortage.node);
    tp_log(TP_LOG_WARN,
           "%s: the segment needs %" PRIu64 " pages of %" PRIu64 " KiB%s and %" PRIu64
           " are free (vm.nr_hugepages); it gets ordinary pages",
           setting, shortage.need_pages, page_bytes >> 10, where, shortage.free_pages);
    return false;
}

static uint64_t memfd_page_bytes(const struct tp_config *config) {
    uint64_t huge = config->store.hugepage_bytes ? config->store.hugepage_bytes : HUGE_PAGE;
    return hugepages_wanted(config) ? huge : SMALL_PAGE;
}

static int memfd_open(const struct tp_config *config, const struct tp_need *need,
                      struct tp_backing *ret_backing) {
    uint64_t huge_bytes = memfd_page_bytes(config);
    bool huge = hugepages_wanted(config) && hugepages_possible(config, need, huge_bytes);
    say_not_for_others(config);
    *ret_backing = (struct tp_backing){.ops = &tp_backing_memfd,
                                       .page_bytes = huge ? huge_bytes : SMALL_PAGE,
                                       .hugetlb = huge,
                                       .reserve_first = huge,
                                       .advise_thp = !huge,
                                       .dir_fd = -1};
    if (huge)
        snprintf(ret_backing->detail, sizeof ret_backing->detail, "memfd, %" PRIu64 " MiB pages",
                 huge_bytes >> 20);
    else
        snprintf(ret_backing->detail, sizeof ret_backing->detail, "memfd, THP advised");
    if (need->address % SMALL_PAGE != 0) {
        tp_log(TP_LOG_ERROR, "segment at %#" PRIx64 " is not aligned to 4096 bytes: not shared",
               need->address);
        return -EINVAL;
    }
    return 0;
}

static int make_memfd(const struct tp_backing *backing) {
    unsigned flags = 0;
    if (backing->hugetlb)
        flags = MFD_HUGETLB | (unsigned)__builtin_ctzll(backing->page_bytes) << MFD_HUGE_SHIFT_BITS;
    return tp_memfd_make("tidepool-segment", flags);
}

static int memfd_create_piece(struct tp_backing *backing, uint64_t bytes, int *ret_fd) {
    int fd = make_memfd(backing);
    if (fd < 0)
        return fd;
    /*
     * The size is final before anyone can see the piece: a reader needs no guard against SIGBUS.
     * F_SEAL_SEAL so that no reader can add F_SEAL_WRITE, which would stop the store itself.
     */
    int result = tp_host_resize(fd, bytes);
    if (result == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        result = -errno;
    if (result < 0) {
        close(fd);
        return result;
    }
    *ret_fd = fd;
    return 0;
}

static void memfd_close(struct tp_backing *backing) {
    (void)backing;
}

const struct tp_backing_ops tp_backing_memfd = {
    .wire_kind = TP_WIRE_MMAP,
    .page_bytes = memfd_page_bytes,
    .open = memfd_open,
    .create = memfd_create_piece,
    .close = memfd_close,
};
