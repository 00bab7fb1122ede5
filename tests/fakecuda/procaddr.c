/* SPDX-License-Identifier: Apache-2.0 */
/* cuGetProcAddress: a base name and a CUDA version to the function of that version. It must not
 * know what they do. */
#include "state.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Where a name has had more than one form, or did not exist from the start: the first version of
 * each form. */
static const struct {
    const char *base, *symbol;
    int since;
} forms[] = {
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000},
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12080},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuGetProcAddress", "cuGetProcAddress", 11030},
    {"cuCtxCreate", "cuCtxCreate_v4", 13000},
    {"cuCtxCreate", "cuCtxCreate_v2", 3020},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
    {"cuEventElapsedTime", "cuEventElapsedTime", 2000},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2", 10010},
};

static void *own_symbol(const char *name) {
    static void *self;
    Dl_info info;

    if (!self && dladdr((void *)fc_settings, &info))
        self = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_NOW);
    return self ? dlsym(self, name) : NULL;
}

/* 0, or one of CU_GET_PROC_ADDRESS_*. */
static int find(const char *base, int version, void **ret) {
    char versioned[128];
    bool known = false;
    void *found;

    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        if (strcmp(forms[i].base, base) != 0)
            continue;
        known = fc_settings()->driver_version >= forms[i].since;
        if (known && version >= forms[i].since && (found = own_symbol(forms[i].symbol))) {
            *ret = found;
            return CU_GET_PROC_ADDRESS_SUCCESS;
        }
        if (i + 1 == sizeof forms / sizeof forms[0] || strcmp(forms[i + 1].base, base) != 0)
            return known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                         : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    if (strncmp(base, "cu", 2) != 0 || strstr(base, "_v"))
        return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND; /* base names only */
    snprintf(versioned, sizeof versioned, "%s_v2", base);
    found = own_symbol(versioned);
    if (!found)
        found = own_symbol(base);
    if (!found)
        return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *ret = found;
    return CU_GET_PROC_ADDRESS_SUCCESS;
}

/*
 * As driver 580 does: a version that the driver does not have is an error that leaves the status
 * alone; a name that is not found is none, for the form of 12.0. The form of 11.3 has no status to
 * say so and fails.
 */
static CUresult lookup(const char *name, const char *symbol, void **function, int version,
                       int *status) {
    int found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    struct fc_call call;

    if (fc_enter(&call, name, FC_ANYTIME, "symbol=%s version=%d", symbol, version)) {
        *function = NULL;
        if (version > fc_settings()->driver_version) {
            call.result = CUDA_ERROR_INVALID_VALUE;
        } else {
            found = find(symbol, version, function);
            if (status)
                *status = found;
            else if (!*function)
                call.result = CUDA_ERROR_NOT_FOUND;
        }
    }
    return fc_leave(&call);
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return lookup("cuGetProcAddress", symbol, function, version, NULL);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             int *status) {
    return lookup("cuGetProcAddress_v2", symbol, function, version, status);
}
