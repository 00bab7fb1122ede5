/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes. The app's own memory is only touched through process_vm_readv/writev on this process:
 * memory that went away or may not be written gives -EFAULT there and not a fault in the worker. It
 * must not know ranges or locks.
 */
#include "state.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int raw_read(unsigned char *to, const unsigned char *from, size_t size) {
    while (size) {
        struct iovec local = {.iov_base = to, .iov_len = size},
                     remote = {.iov_base = (void *)from, .iov_len = size};
        ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);

        if (got <= 0) {
            if (got < 0 && (errno == ENOSYS || errno == EPERM)) {
                memcpy(to, from, size);
                return 0;
            }
            return -EFAULT;
        }
        to += got;
        from += got;
        size -= (size_t)got;
    }
    return 0;
}

static int raw_write(unsigned char *to, const unsigned char *from, size_t size) {
    while (size) {
        struct iovec local = {.iov_base = (void *)from, .iov_len = size},
                     remote = {.iov_base = to, .iov_len = size};
        ssize_t put = process_vm_writev(getpid(), &local, 1, &remote, 1, 0);

        if (put <= 0) {
            if (put < 0 && (errno == ENOSYS || errno == EPERM)) {
                memcpy(to, from, size);
                return 0;
            }
            return -EFAULT;
        }
        to += put;
        from += put;
        size -= (size_t)put;
    }
    return 0;
}

bool fc_readable(uintptr_t address) {
    unsigned char byte;

    return !raw_read(&byte, (const unsigned char *)address, 1);
}

static int move_bytes(unsigned char *to, bool raw_to, const unsigned char *from, bool raw_from,
                      size_t size) {
    unsigned char bounce[16384];
    int error = 0;

    if (!raw_to && !raw_from) {
        memmove(to, from, size);
        return 0;
    }
    if (!raw_to)
        return raw_read(to, from, size);
    if (!raw_from)
        return raw_write(to, from, size);
    while (size && !error) {
        size_t part = size < sizeof bounce ? size : sizeof bounce;

        error = raw_read(bounce, from, part);
        if (!error)
            error = raw_write(to, bounce, part);
        to += part;
        from += part;
        size -= part;
    }
    return error;
}

int fc_move(const struct fc_span *to, const struct fc_span *from, size_t size) {
    size_t t = 0, f = 0, t_at = 0, f_at = 0;
    int error = 0;

    while (size && !error) {
        const struct fc_piece *tp = &to->pieces[t], *fp = &from->pieces[f];
        size_t part = tp->size - t_at < fp->size - f_at ? tp->size - t_at : fp->size - f_at;

        error = move_bytes(tp->bytes + t_at, tp->raw, fp->bytes + f_at, fp->raw, part);
        t_at += part;
        f_at += part;
        size -= part;
        if (t_at == tp->size) {
            t++;
            t_at = 0;
        }
        if (f_at == fp->size) {
            f++;
            f_at = 0;
        }
    }
    return error;
}

int fc_fill(const struct fc_span *to, unsigned char value) {
    unsigned char bytes[4096];
    int error = 0;

    memset(bytes, value, sizeof bytes);
    for (size_t i = 0; i < to->count && !error; i++) {
        for (size_t at = 0; at < to->pieces[i].size && !error; at += sizeof bytes) {
            size_t rest = to->pieces[i].size - at;

            error = move_bytes(to->pieces[i].bytes + at, to->pieces[i].raw, bytes, false,
                               rest < sizeof bytes ? rest : sizeof bytes);
        }
    }
    return error;
}
