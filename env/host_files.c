/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the small text files by which the kernel describes the host. It must not know what the
 * texts mean. */
#include "env/host_files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *tp_host_root = "";

int tp_host_read_text(const char *path, char *ret_text, size_t bytes) {
    char full_path[PATH_MAX];
    size_t done = 0;
    int fd, length;

    length = snprintf(full_path, sizeof(full_path), "%s%s", tp_host_root, path);
    if (length < 0 || (size_t)length >= sizeof(full_path))
        return -ENAMETOOLONG;
    fd = open(full_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return -errno;
    while (done < bytes - 1) {
        ssize_t got = read(fd, ret_text + done, bytes - 1 - done);

        if (got < 0) {
            int rc = -errno;

            close(fd);
            return rc;
        }
        if (got == 0)
            break;
        done += (size_t)got;
    }
    close(fd);
    while (done > 0 && strchr(" \t\r\n", ret_text[done - 1]))
        done--;
    ret_text[done] = '\0';
    return 0;
}

int tp_host_read_u64(const char *path, uint64_t *ret_value) {
    char text[64] = "";
    char *end;
    unsigned long long value;
    int rc = tp_host_read_text(path, text, sizeof(text));

    if (rc < 0)
        return rc;
    if (text[0] < '0' || text[0] > '9')
        return -EINVAL;
    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || *end)
        return -EINVAL;
    *ret_value = value;
    return 0;
}

static int read_number(const char **text, unsigned *ret_number) {
    unsigned number = 0;
    const char *at = *text;

    if (*at < '0' || *at > '9')
        return -EINVAL;
    for (; *at >= '0' && *at <= '9'; at++) {
        number = number * 10 + (unsigned)(*at - '0');
        if (number > 1000000)
            return -EINVAL;
    }
    *text = at;
    *ret_number = number;
    return 0;
}

int tp_host_each_listed(const char *text, unsigned limit, void (*each)(unsigned number, void *arg),
                        void *arg) {
    unsigned count = 0;

    while (*text) {
        unsigned first, last;

        if (read_number(&text, &first) < 0)
            return -EINVAL;
        last = first;
        if (*text == '-') {
            text++;
            if (read_number(&text, &last) < 0 || last < first)
                return -EINVAL;
        }
        for (unsigned number = first; number <= last; number++) {
            if (count == limit)
                return (int)count;
            each(number, arg);
            count++;
        }
        if (*text == ',')
            text++;
        else if (*text)
            return -EINVAL;
    }
    return (int)count;
}
