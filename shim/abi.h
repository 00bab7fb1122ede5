/* SPDX-License-Identifier: Apache-2.0 */
/*
 * C views of the C++ types at Mooncake's border (x86-64, libstdc++ with the cxx11 ABI). No other
 * file names a C++ type.
 *
 * Sources: the layouts are libstdc++'s since GCC 5; Mooncake's own were read from the wheels 0.3.6
 * to 0.3.14 (UPSTREAM.md). A class that is not trivially copyable is passed by a pointer to it and
 * returned through a hidden first pointer, which the function also returns (Itanium C++ ABI 3.1.2):
 * that is why hooks of methods that return Status or std::string have `ret` as first parameter.
 */
#ifndef TIDEPOOL_ABI_H
#define TIDEPOOL_ABI_H

#include <stddef.h>
#include <stdint.h>

/* std::string */
struct cxx_string {
    char *data; /* points to `local` when the text is short */
    size_t bytes;
    union {
        char local[16];
        size_t capacity;
    } u;
};
_Static_assert(sizeof(struct cxx_string) == 32, "std::string of the cxx11 ABI");

/* std::vector<T> of any T */
struct cxx_vector {
    char *begin, *end, *capacity_end;
};
_Static_assert(sizeof(struct cxx_vector) == 24, "std::vector");

/* std::shared_ptr<T> of any T */
struct cxx_shared_ptr {
    void *object, *control;
};
_Static_assert(sizeof(struct cxx_shared_ptr) == 16, "std::shared_ptr");

/* mooncake::Status: delete[] of `message` in its destructor, so ours is NULL or made with the
 * module's operator new[] */
struct cxx_status {
    uint16_t code;
    const char *message;
};
_Static_assert(sizeof(struct cxx_status) == 16, "mooncake::Status");

enum {
    CXX_STATUS_OK = 0,
    CXX_STATUS_INVALID_ARGUMENT = 1,
    CXX_STATUS_BATCH_BUSY = 4,
    CXX_STATUS_NOT_IMPLEMENTED = 999,
};

/* mooncake::Transport::TransferStatus */
struct cxx_transfer_status {
    int32_t state; /* 0 WAITING, 4 COMPLETED, 5 TIMEOUT, 6 FAILED */
    size_t bytes;
};
_Static_assert(sizeof(struct cxx_transfer_status) == 16, "mooncake::Transport::TransferStatus");

enum { CXX_TASK_WAITING = 0, CXX_TASK_COMPLETED = 4, CXX_TASK_TIMEOUT = 5, CXX_TASK_FAILED = 6 };

#endif
