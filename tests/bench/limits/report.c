/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `copy_limits` has measured, for people and as JSON. README.md lists the keys.
 */
#include "tests/bench/limits/limits.h"

#include "tools/tool.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>

/* ---- for people ---- */

static void print_rate(FILE *out, double rate, bool chosen) {
    char text[16];

    if (rate > 0) {
        (void)snprintf(text, sizeof(text), rate < 10 ? "%s%.2f" : "%s%.1f", chosen ? "*" : "",
                       rate);
    } else {
        (void)snprintf(text, sizeof(text), "-");
    }
    (void)fprintf(out, "%9s", text);
}

static void print_blocks(const struct bench *bench, const struct bench_gpu *gpu, FILE *out) {
    char size[16];

    (void)fprintf(out,
                  "  by block size, with %s as a store has it; * is what the library chooses\n",
                  bench->gpu_scratch.kind);
    (void)fputs("                      to the GPU                from it\n"
                "                   engine   kernel          engine   kernel\n",
                out);
    for (unsigned i = 0; i < BENCH_BLOCKS; i++) {
        (void)fprintf(out, "    %8s    ", text_bytes(bench_block(i), size));
        for (int to_device = 1; to_device >= 0; to_device--) {
            enum tp_gpu_method chosen = bench_chosen(gpu, to_device, bench_block(i));
            (void)fprintf(out, "%s", to_device ? "" : "       ");
            for (int method = 0; method < TP_GPU_METHODS; method++) {
                print_rate(out, gpu->rates[to_device][method][i], (int)chosen == method);
            }
        }
        (void)fputc('\n', out);
    }
}

static void print_gpus(const struct bench *bench, FILE *out) {
    if (!bench->gpu_count) {
        (void)fprintf(out, "NO GPU: %s; copies are from and to host memory, by the copy pool\n",
                      bench->no_gpu);
    }
    for (unsigned i = 0; i < bench->gpu_count; i++) {
        const struct bench_gpu *gpu = &bench->gpus[i];
        (void)fprintf(out, "%sGPU %d\n", i ? "\n" : "", gpu->device);
        if (gpu->problem[0]) {
            (void)fprintf(out, "  not measured: %s\n", gpu->problem);
            continue;
        }
        (void)fprintf(out, "  limit, 64 MiB of pinned memory: %.1f GB/s to it, %.1f from it\n",
                      gpu->pinned[1], gpu->pinned[0]);
        print_blocks(bench, gpu, out);
    }
}

static void print_row_name(const struct bench_row *row, FILE *out) {
    char name[32];

    if (row->gpu) {
        (void)snprintf(name, sizeof(name), "GPU %d%s", row->gpu->device,
                       row->registered ? ", registered" : "");
    } else {
        (void)snprintf(name, sizeof(name), "host memory");
    }
    (void)fprintf(out, "    %-19s", name);
}

static void print_row(const struct bench_row *row, FILE *out) {
    for (int way = BENCH_GET; way <= BENCH_PUT; way++) {
        print_row_name(row, out);
        if (row->problem[0]) {
            (void)fprintf(out, "not measured: %s\n", row->problem);
            return;
        }
        (void)fputs(way == BENCH_GET ? "get " : "put ", out);
        for (unsigned i = 0; i < BENCH_STORE_BLOCKS; i++) {
            print_rate(out, row->rates[way][i], false);
        }
        (void)fputc('\n', out);
    }
}

static void print_store(const struct bench_store *store, FILE *out) {
    char size[16];

    (void)fprintf(out, "  %s  ", store->name[0] ? store->name : store->id);
    if (store->pid) {
        (void)fprintf(out, "pid %d  ", store->pid);
    }
    if (store->bytes) {
        (void)fprintf(out, "%s (%s)", text_bytes(store->bytes, size), store->detail);
    }
    (void)fputc('\n', out);
    if (store->problem[0]) {
        (void)fprintf(out, "    not measured: %s\n", store->problem);
    }
    if (store->row_count) {
        (void)fprintf(out, "    %-23s", "");
        for (unsigned i = 0; i < BENCH_STORE_BLOCKS; i++) {
            (void)fprintf(out, "%9s", text_bytes(bench_store_block(i), size));
        }
        (void)fputc('\n', out);
    }
    for (unsigned i = 0; i < store->row_count; i++) {
        print_row(&store->rows[i], out);
    }
    if (store->row_count) {
        (void)fprintf(out,
                      "    gets read %s of the store's pages; puts went to scratch memory: %s\n",
                      text_bytes(store->sample_bytes, size),
                      store->scratch[0] ? store->scratch : "none could be made");
    }
}

void bench_print_text(const struct bench *bench, FILE *out) {
    char directory[512];

    print_gpus(bench, out);
    if (bench->store_count) {
        text_clean(directory, sizeof(directory), bench->directory);
        (void)fprintf(out, "\nSTORES in %s\n", directory);
    }
    for (unsigned i = 0; i < bench->store_count; i++) {
        print_store(&bench->stores[i], out);
    }
    (void)fprintf(out, "\nGB/s (10^9 bytes a second), medians; nothing was written to a store.\n");
}

/* ---- as JSON ---- */

static json_t *rate_json(double rate) {
    return rate > 0 ? json_real(rate) : json_null();
}

static json_t *text_or_null(const char *text) {
    return text[0] ? json_string(text) : json_null();
}

/* JSON has no unsigned 64-bit integers, and a store may claim any size. */
static json_t *number(uint64_t value) {
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

static json_t *way_json(const struct bench_gpu *gpu, bool to_device, unsigned block) {
    bool kernel = bench_chosen(gpu, to_device, bench_block(block)) == TP_GPU_KERNEL;

    return json_pack("{s:o, s:o, s:s}", "engine_gbs",
                     rate_json(gpu->rates[to_device][TP_GPU_ENGINE][block]), "kernel_gbs",
                     rate_json(gpu->rates[to_device][TP_GPU_KERNEL][block]), "chosen",
                     kernel ? "kernel" : "engine");
}

static json_t *gpu_json(const struct bench *bench, const struct bench_gpu *gpu) {
    json_t *blocks = json_array();

    for (unsigned i = 0; i < BENCH_BLOCKS && !gpu->problem[0]; i++) {
        (void)json_array_append_new(
            blocks, json_pack("{s:I, s:o, s:o}", "block_bytes", (json_int_t)bench_block(i), "to",
                              way_json(gpu, true, i), "from", way_json(gpu, false, i)));
    }
    return json_pack("{s:i, s:o, s:{s:o, s:o}, s:s, s:o}", "gpu", gpu->device, "problem",
                     text_or_null(gpu->problem), "limit_gbs", "to", rate_json(gpu->pinned[1]),
                     "from", rate_json(gpu->pinned[0]), "memory", bench->gpu_scratch.kind, "blocks",
                     blocks);
}

static json_t *row_json(const struct bench_row *row) {
    json_t *blocks = json_array();

    for (unsigned i = 0; i < BENCH_STORE_BLOCKS; i++) {
        (void)json_array_append_new(
            blocks, json_pack("{s:I, s:o, s:o}", "block_bytes", (json_int_t)bench_store_block(i),
                              "get_gbs", rate_json(row->rates[BENCH_GET][i]), "put_gbs",
                              rate_json(row->rates[BENCH_PUT][i])));
    }
    return json_pack("{s:o, s:b, s:o, s:o}", "gpu",
                     row->gpu ? json_integer(row->gpu->device) : json_null(), "registered",
                     (int)row->registered, "problem", text_or_null(row->problem), "blocks", blocks);
}

static json_t *store_json(const struct bench_store *store) {
    json_t *rows = json_array();

    for (unsigned i = 0; i < store->row_count; i++) {
        (void)json_array_append_new(rows, row_json(&store->rows[i]));
    }
    return json_pack("{s:s, s:s, s:o, s:o, s:s, s:o, s:o, s:o, s:o}", "instance", store->id, "name",
                     store->name, "pid", store->pid ? json_integer(store->pid) : json_null(),
                     "bytes", number(store->bytes), "detail", store->detail, "problem",
                     text_or_null(store->problem), "sample_bytes", number(store->sample_bytes),
                     "put_memory", text_or_null(store->scratch), "rows", rows);
}

void bench_print_json(const struct bench *bench, FILE *out) {
    json_t *gpus = json_array();
    json_t *stores = json_array();
    char directory[512] = "";

    for (unsigned i = 0; i < bench->gpu_count; i++) {
        (void)json_array_append_new(gpus, gpu_json(bench, &bench->gpus[i]));
    }
    for (unsigned i = 0; i < bench->store_count; i++) {
        (void)json_array_append_new(stores, store_json(&bench->stores[i]));
    }
    if (bench->directory) {
        text_clean(directory, sizeof(directory), bench->directory);
    }
    json_t *root = json_pack("{s:i, s:f, s:o, s:o, s:o, s:o}", "format", 1, "seconds",
                             bench->seconds, "no_gpu", text_or_null(bench->no_gpu), "gpus", gpus,
                             "directory", text_or_null(directory), "stores", stores);
    if (root) {
        (void)json_dumpf(root, out, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        (void)fputc('\n', out);
    }
    json_decref(root);
}
