/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the Mooncake of a Python one that the hooks fit? Which symbols are needed is read from
 * shim/hooks.def, the table that the hooks themselves are made from.
 */
#include "tools/doctor.h"
#include "tools/probe.h"

#include "env/env.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROBE_MS 60000

enum role { ROLE_TRANSFER, ROLE_TRANSFER13, ROLE_LINK, ROLE_TENT, ROLE_STORE, ROLE_OPTIONAL };

struct hook {
    const char *identifier, *mangled;
    enum role role;
    const char *since;
};

static const struct hook hooks[] = {
#define HOOK(identifier, result, parameters, mangled, role, since, why)                            \
    {#identifier, mangled, ROLE_##role, since},
#include "shim/hooks.def"
#undef HOOK
};

#define HOOK_COUNT (sizeof(hooks) / sizeof(*hooks))

/* What is known of a module when its symbols are judged. */
struct module {
    const char *name, *path, *found; /* found: '1' or '0' for each hook */
    uint64_t element_bytes;          /* 0: not shown by this module */
    bool store, tent;
    unsigned version; /* major * 10000 + minor * 100 + patch; 0 unknown */
};

static unsigned parse_version(const char *text) {
    unsigned major = 0;
    unsigned minor = 0;
    unsigned patch = 0;

    if (sscanf(text, "%u.%u.%u", &major, &minor, &patch) != 3 || minor > 99 || patch > 99) {
        return 0;
    }
    return major * 10000 + minor * 100 + patch;
}

static bool set_in_environment(const char *name) {
    const char *value = getenv(name);
    return value && *value;
}

/* Without which nothing goes through shared memory, whatever else is there. */
static bool indispensable(const struct hook *hook) {
    static const char *const links[] = {"te_init", "te_open", "te_register"};

    for (size_t i = 0; i < sizeof(links) / sizeof(*links); i++) {
        if (strcmp(hook->identifier, links[i]) == 0) {
            return true;
        }
    }
    return hook->role != ROLE_LINK;
}

/* Should this module have it? STORE is judged apart: one variant of several is enough. */
static bool expected(const struct hook *hook, const struct module *module) {
    if (module->version && module->version < parse_version(hook->since)) {
        return false;
    }
    switch (hook->role) {
    case ROLE_TRANSFER:
    case ROLE_LINK:
        return true;
    case ROLE_TRANSFER13:
        return module->element_bytes ? module->element_bytes > 48
                                     : module->version >= parse_version("0.3.13");
    case ROLE_TENT:
        return module->tent &&
               (set_in_environment("MC_USE_TENT") || set_in_environment("MC_USE_TEV1"));
    case ROLE_STORE:
    case ROLE_OPTIONAL:
        return false;
    }
    return false;
}

static bool any_variant(const struct module *module, const char *prefix) {
    for (size_t i = 0; i < HOOK_COUNT; i++) {
        if (hooks[i].role == ROLE_STORE && module->found[i] == '1' &&
            strncmp(hooks[i].identifier, prefix, strlen(prefix)) == 0) {
            return true;
        }
    }
    return false;
}

/* "te_open mt_free": what is missing of one importance. */
static size_t list_missing(const struct module *module, bool indispensables, char *ret_list,
                           size_t bytes) {
    size_t used = 0;
    size_t count = 0;

    ret_list[0] = '\0';
    for (size_t i = 0; i < HOOK_COUNT; i++) {
        if (module->found[i] == '1' || !expected(&hooks[i], module) ||
            indispensable(&hooks[i]) != indispensables) {
            continue;
        }
        count++;
        if (used < bytes) {
            int n = snprintf(ret_list + used, bytes - used, "%s%s", used ? " " : "",
                             hooks[i].identifier);
            used += n > 0 ? (size_t)n : 0;
        }
    }
    return count;
}

static void judge_hooks(const struct module *module, struct findings *findings) {
    char missing[512];
    size_t present = 0;

    for (size_t i = 0; i < HOOK_COUNT; i++) {
        present += module->found[i] == '1';
    }
    if (list_missing(module, true, missing, sizeof(missing))) {
        finding_add(findings, FINDING_FAIL, module->name,
                    "this Mooncake does not fit the hooks: upgrade Tidepool, or report it",
                    "lacks %s", missing);
        return;
    }
    if (module->store && (!any_variant(module, "allocate_") || !any_variant(module, "free_"))) {
        finding_add(findings, FINDING_FAIL, module->name,
                    "a store from it publishes nothing: upgrade Tidepool, or report it",
                    "no allocator that the hooks know");
        return;
    }
    if (list_missing(module, false, missing, sizeof(missing))) {
        finding_add(findings, FINDING_WARN, module->name, NULL, "works without %s", missing);
    }
    finding_add(findings, FINDING_OK, module->name, NULL,
                "%zu of %zu hooks, all that this version needs%s (%s)", present, HOOK_COUNT,
                module->tent ? "; a TENT build" : "", module->path);
}

static void judge_element(const struct module *module, struct findings *findings) {
    unsigned long long bytes = module->element_bytes;

    if (bytes == 0) {
        finding_add(findings, FINDING_OK, module->name, NULL,
                    "TransferRequest: size not shown by this module, learned at run time");
    } else if (bytes == 48 || bytes == 56 || bytes == 72) {
        finding_add(findings, FINDING_OK, module->name, NULL,
                    "TransferRequest of %llu bytes, known", bytes);
    } else {
        finding_add(
            findings, FINDING_FAIL, module->name, "upgrade Tidepool",
            "TransferRequest of %llu bytes: unknown version, Tidepool leaves this module alone",
            bytes);
    }
}

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* Why a module cannot be imported, and what that means: the driver's library is the usual one. */
static void judge_import_error(const char *name, const char *error, struct findings *findings) {
    const char *advice = "Mooncake itself does not start here: mend that first";

    if (strstr(error, "libcuda.so")) {
        advice = "this wheel needs the CUDA driver's library: install the driver, or use the wheel "
                 "without CUDA on hosts without GPU";
    } else if (strstr(error, "libcudart.so")) {
        advice = "this wheel needs the CUDA runtime on LD_LIBRARY_PATH (PyPI: nvidia-cuda-runtime)";
    } else if (strcmp(error, "no such file") == 0) {
        advice = "this package has no such native module: reinstall the wheel";
    }
    finding_add(findings, FINDING_FAIL, name, advice, "cannot be imported: %s", error);
}

static void judge_module(const json_t *line, unsigned version, struct findings *findings) {
    char name[64];
    const char *short_name = text_of(line, "module");

    (void)snprintf(name, sizeof(name), "mooncake.%s", short_name);
    if (text_of(line, "error")[0]) {
        judge_import_error(name, text_of(line, "error"), findings);
        return;
    }
    struct module module = {
        .name = name,
        .path = text_of(line, "path"),
        .found = text_of(line, "found"),
        .element_bytes = (uint64_t)json_integer_value(json_object_get(line, "element")),
        .store = strcmp(short_name, "store") == 0,
        .tent = json_is_true(json_object_get(line, "tent")),
        .version = version,
    };
    if (strlen(module.found) != HOOK_COUNT) {
        finding_add(findings, FINDING_FAIL, name, NULL,
                    "the answer about its symbols is not understood");
        return;
    }
    judge_element(&module, findings);
    judge_hooks(&module, findings);
}

/* The package: which wheel. Returns its version as a number, 0 when unknown. */
static unsigned judge_package(const json_t *line, bool chosen, struct findings *findings) {
    const json_t *wheels = json_object_get(line, "wheels");
    const json_t *first = json_array_get(wheels, 0);
    const char *name = json_string_value(json_array_get(first, 0));
    const char *version = json_string_value(json_array_get(first, 1));

    finding_add(findings, FINDING_OK, "python", NULL, "%s, %s", text_of(line, "python"),
                text_of(line, "executable"));
    if (text_of(line, "error")[0]) {
        finding_add(findings, chosen ? FINDING_FAIL : FINDING_WARN, "mooncake",
                    "name the interpreter that runs Mooncake: --python PYTHON", "%s",
                    text_of(line, "error"));
        return 0;
    }
    if (!name || !version) {
        finding_add(findings, FINDING_OK, "mooncake", NULL, "not from a wheel, in %s",
                    text_of(line, "directory"));
        return 0;
    }
    unsigned number = parse_version(version);
    if (json_array_size(wheels) > 1) {
        finding_add(findings, FINDING_WARN, "mooncake",
                    "they overwrite each other's files: keep one",
                    "%zu wheels in one environment, %s %s among them", json_array_size(wheels),
                    name, version);
        return 0;
    }
    bool old = number && number < parse_version("0.3.6");
    finding_add(findings, old ? FINDING_FAIL : FINDING_OK, "mooncake",
                old ? "Tidepool knows 0.3.6 and later" : NULL, "%s %s", name, version);
    return number;
}

void doctor_mooncake(const char *python, bool chosen, struct findings *findings) {
    const char *symbols[HOOK_COUNT];
    struct probe probe = {0};
    const char *begun = "Python's own modules";
    unsigned version = 0;
    bool ended = false;
    const json_t *line;
    size_t index;

    for (size_t i = 0; i < HOOK_COUNT; i++) {
        symbols[i] = hooks[i].mangled;
    }
    int error = probe_run(python, symbols, HOOK_COUNT, PROBE_MS, &probe);
    if (error) {
        finding_add(findings, chosen ? FINDING_FAIL : FINDING_WARN, "python",
                    "name the interpreter that runs Mooncake: --python PYTHON", "%s: %s", python,
                    strerror(-error));
        return;
    }
    json_array_foreach(probe.lines, index, line) {
        ended |= json_is_true(json_object_get(line, "end"));
        if (json_object_get(line, "begin")) {
            begun = text_of(line, "path");
        } else if (json_object_get(line, "python")) {
            version = judge_package(line, chosen, findings);
        } else if (json_object_get(line, "module")) {
            judge_module(line, version, findings);
        }
    }
    if (!ended) {
        finding_add(findings, FINDING_FAIL, "python",
                    "Mooncake itself does not start here: mend that first",
                    "%s: %s while importing %s; its last words: %s", python,
                    probe.problem[0] ? probe.problem : "ended early", begun,
                    probe.last_words[0] ? probe.last_words : "none");
    }
    probe_free(&probe);
}
