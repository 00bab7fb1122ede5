/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which object called: found from the return address, looked at once, remembered for ever.
 *
 * It must not know what the hooks do. It never holds a lock while it calls the dynamic linker: a
 * module's constructors run under the linker's lock and may call a hook.
 */
#include "shim/modules.h"

#include "env/env.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* std::vector<TransferRequest>::reserve, a weak symbol of store modules: called on an empty vector
 * it shows the element size */
#define RESERVE "_ZNSt6vectorIN8mooncake9Transport15TransferRequestESaIS2_EE7reserveEm"
/* mooncake::tent::getMachineID[abi:cxx11](): only TENT builds have it */
#define TENT_MARK "_ZN8mooncake4tent12getMachineIDB5cxx11Ev"
/* mooncake::MultiTransport::allocateBatchID: every object with a transfer engine of its own has it
 */
#define ALLOCATE "_ZN8mooncake14MultiTransport15allocateBatchIDEm"

static struct tp_module modules[TP_MODULES];
static _Atomic unsigned module_count;
static _Atomic(struct tp_module *) last_module;
/* The bystander seen last (libstdc++, python): looking it up again would cost a walk over all
 * objects. */
static _Atomic uintptr_t bystander_low, bystander_high;
static pthread_mutex_t modules_lock = PTHREAD_MUTEX_INITIALIZER;

bool tp_element_known(size_t bytes) {
    return bytes == 48 || bytes == 56 || bytes == 72;
}

static bool lies_in(const void *code, const char *part_of_name) {
    Dl_info info;

    return dladdr(code, &info) && info.dli_sname && strstr(info.dli_sname, part_of_name);
}

bool tp_registers_segment(const void *caller) {
    return lies_in(caller, "6Client") && lies_in(caller, "MountSegment");
}

bool tp_registers_hot_cache(const void *caller) {
    return lies_in(caller, "LocalHotCache");
}

static struct tp_module *known_module(uintptr_t address) {
    unsigned count = atomic_load_explicit(&module_count, memory_order_acquire);
    for (unsigned i = 0; i < count; i++) {
        if (address >= modules[i].low && address < modules[i].high) {
            return &modules[i];
        }
    }
    return NULL;
}

struct range_search {
    uintptr_t address, low, high;
};

static int find_range(struct dl_phdr_info *info, size_t size, void *arg) {
    struct range_search *search = arg;
    uintptr_t low = UINTPTR_MAX;
    uintptr_t high = 0;

    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type != PT_LOAD) {
            continue;
        }
        uintptr_t start = info->dlpi_addr + header->p_vaddr;
        low = start < low ? start : low;
        high = start + header->p_memsz > high ? start + header->p_memsz : high;
    }
    if (search->address < low || search->address >= high) {
        return 0;
    }
    search->low = low;
    search->high = high;
    return 1;
}

static void *symbol_of(void *handle, const char *name) {
    void *symbol = handle ? dlsym(handle, name) : NULL;
    return tp_symbol_foreign(symbol) ? symbol : NULL;
}

/*
 * The allocation function that the module's own calls reach: one that the program or a preload
 * (tcmalloc, a sanitizer) defines comes before libstdc++'s, which is all that a search from the
 * module's handle would find. Memory passes between the two sides.
 */
static void *allocation_symbol(void *handle, const char *name) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    return tp_symbol_foreign(symbol) ? symbol : symbol_of(handle, name);
}

static bool set_in_environment(const char *name) {
    const char *value = getenv(name);
    return value && *value;
}

/* Ask the module itself how large its TransferRequest is: reserve 16 on an empty vector, look,
 * free. */
static size_t measured_element(const struct tp_module *module) {
    void (*reserve)(struct cxx_vector *, size_t) = NULL;
    void *symbol = symbol_of(module->handle, RESERVE);
    struct cxx_vector vector = {0};
    size_t count = 16;

    if (!symbol || !module->operator_delete) {
        return 0;
    }
    memcpy(&reserve, &symbol, sizeof(reserve));
    reserve(&vector, count);
    size_t bytes = (size_t)(vector.capacity_end - vector.begin);
    if (vector.begin) {
        module->operator_delete(vector.begin);
    }
    return bytes % count == 0 ? bytes / count : 0;
}

static void look_at(struct tp_module *module) {
    static const char *const store_marks[] = {
        "_ZN8mooncake6Client12MountSegmentEPKvm",
        "_ZN8mooncake6Client12MountSegmentEPKvmRKNSt7__cxx1112basic_stringIcSt11char_"
        "traitsIcESaIcEEE",
        "_ZN8mooncake6Client12MountSegmentEPKvmRKNSt7__cxx1112basic_stringIcSt11char_"
        "traitsIcESaIcEEESA_",
    };
    void *symbol = allocation_symbol(module->handle, "_Znwm");

    memcpy(&module->operator_new, &symbol, sizeof(symbol));
    symbol = allocation_symbol(module->handle, "_ZdlPv");
    memcpy(&module->operator_delete, &symbol, sizeof(symbol));
    for (size_t i = 0; i < sizeof(store_marks) / sizeof(*store_marks); i++) {
        module->store |= symbol_of(module->handle, store_marks[i]) != NULL;
    }
    module->tent = symbol_of(module->handle, TENT_MARK) &&
                   (set_in_environment("MC_USE_TENT") || set_in_environment("MC_USE_TEV1"));

    size_t bytes = measured_element(module);
    if (bytes && !tp_element_known(bytes)) {
        module->layout_refused = true;
        tp_log(TP_LOG_WARN,
               "%s: its TransferRequest has %zu bytes, known are 48, 56 and 72: this Mooncake is "
               "newer than Tidepool " TP_VERSION " and runs as stock; upgrade Tidepool",
               module->path, bytes);
        return;
    }
    atomic_store(&module->element_bytes, bytes);
    tp_log(TP_LOG_DEBUG, "%s: %s module%s, TransferRequest of %zu bytes%s", module->path,
           module->store ? "store" : "engine", module->tent ? " with TENT" : "", bytes,
           bytes ? "" : " (learned later)");
}

/* Does this object carry a transfer engine, or link one? Bystanders (libstdc++, python) do not. */
static bool concerns_us(void *handle) {
    return symbol_of(handle, ALLOCATE) != NULL;
}

static struct tp_module *add_module(const struct tp_module *found) {
    struct tp_module *module;

    pthread_mutex_lock(&modules_lock);
    module = known_module(found->low);
    unsigned count = atomic_load(&module_count);
    if (!module && count < TP_MODULES) {
        module = &modules[count];
        memcpy(module, found, sizeof(*module));
        atomic_store_explicit(&module_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&modules_lock);
    return module;
}

static struct tp_module *new_module(const void *return_address) {
    struct range_search search = {.address = (uintptr_t)return_address};
    struct tp_module found = {0};
    struct link_map *map = NULL;
    Dl_info info;

    if (!dl_iterate_phdr(find_range, &search) ||
        !dladdr1(return_address, &info, (void **)&map, RTLD_DL_LINKMAP) || !map) {
        return NULL;
    }
    found.low = search.low;
    found.high = search.high;
    strncpy(found.path, map->l_name[0] ? map->l_name : "the main program", sizeof(found.path) - 1);
    found.handle = dlopen(map->l_name[0] ? map->l_name : NULL, RTLD_NOLOAD | RTLD_LAZY);
    /* A program that links a shared engine finds our definitions under its own handle: the
     * originals are in the next object. */
    bool main_program = map->l_name[0] == '\0';
    if (!found.handle || (!concerns_us(found.handle) &&
                          !(main_program && tp_symbol_foreign(dlsym(RTLD_NEXT, ALLOCATE))))) {
        atomic_store(&bystander_low, found.low);
        atomic_store(&bystander_high, found.high);
        return NULL;
    }
    look_at(&found);
    return add_module(&found);
}

static bool known_bystander(uintptr_t address) {
    return address >= atomic_load_explicit(&bystander_low, memory_order_relaxed) &&
           address < atomic_load_explicit(&bystander_high, memory_order_relaxed);
}

struct tp_module *tp_module_of(const void *return_address) {
    struct tp_module *module = known_module((uintptr_t)return_address);

    if (!module && !known_bystander((uintptr_t)return_address)) {
        module = new_module(return_address);
    }
    if (!module) {
        return atomic_load_explicit(&last_module, memory_order_acquire);
    }
    if (atomic_load_explicit(&last_module, memory_order_relaxed) != module) {
        atomic_store_explicit(&last_module, module, memory_order_release);
    }
    return module;
}
