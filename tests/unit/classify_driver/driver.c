/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 of one function, for test_cuda_classify: every address is what the test says, and
 * calls are counted. cuInit and everything that could make a context is missing on purpose.
 */
#include "tests/unit/classify_driver/driver.h"

#include <string.h>

struct classify_driver classify_driver;

__attribute__((unused)) static int pointer_get_attribute(void *data, int attribute,
                                                         uint64_t address) {
    struct classify_driver *d = &classify_driver;
    d->queries++;
    d->last_address = address;
    if (d->result)
        return d->result;
    if (attribute == 2)
        memcpy(data, &d->memory_type, sizeof(d->memory_type));
    else if (attribute == 8)
        memcpy(data, &d->managed, sizeof(d->managed));
    else if (attribute == 9)
        memcpy(data, &d->ordinal, sizeof(d->ordinal));
    else
        return 1;
    return 0;
}

#ifdef WITH_SYMBOL
int cuPointerGetAttribute(void *data, int attribute, uint64_t address);
int cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
    return pointer_get_attribute(data, attribute, address);
}
#endif

#ifdef WITH_V1
int cuGetProcAddress(const char *symbol, void **ret_function, int version, uint64_t flags);
int cuGetProcAddress(const char *symbol, void **ret_function, int version, uint64_t flags) {
    if (version < 4000 || flags != 0 || strcmp(symbol, "cuPointerGetAttribute") != 0)
        return 500;
    *ret_function = (void *)pointer_get_attribute;
    return 0;
}
#endif

#ifdef WITH_V2
int cuGetProcAddress_v2(const char *symbol, void **ret_function, int version, uint64_t flags,
                        int *ret_status);
int cuGetProcAddress_v2(const char *symbol, void **ret_function, int version, uint64_t flags,
                        int *ret_status) {
    *ret_status = 1;
    if (version < 4000 || flags != 0 || strcmp(symbol, "cuPointerGetAttribute") != 0)
        return 500;
    *ret_function = (void *)pointer_get_attribute;
    *ret_status = 0;
    return 0;
}
#endif
