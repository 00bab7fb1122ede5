/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the subcommands of `tidepool` share: their entry points, exit statuses, and how text from
 * elsewhere is printed.
 *
 * The tool is a program of its own: it may print and exit, holds no lock of the library's and never
 * loads Mooncake into itself (a module that crashes on import must not take the report with it).
 */
#ifndef TIDEPOOL_TOOL_H
#define TIDEPOOL_TOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum tool_exit {
    TOOL_OK = 0,
    TOOL_NOT_OK = 1,        /* status: nothing there or attention needed; doctor: not fit */
    TOOL_USAGE = 2,         /* wrong usage, or no permission to look */
    TOOL_RUN_REFUSED = 125, /* run: nothing was started. 125 to 127 are those of env(1) */
    TOOL_RUN_NO_EXEC = 126,
    TOOL_RUN_NOT_FOUND = 127,
};

/* Each takes its own argv: argv[0] is the subcommand's name. Returns the exit status. */
int tool_run(int argc, char **argv);
int tool_status(int argc, char **argv);
int tool_doctor(int argc, char **argv);
int tool_settings(int argc, char **argv);

/* "tidepool NAME: text" on standard error; control characters replaced. */
void tool_error(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same for what getopt_long did not take: `option` is its answer (':': the value is missing),
 * `argument` the word that it was at. */
void tool_wrong_option(const char *name, int option, const char *argument);

/* The getenv of tp_config_parse for this process's own environment. */
const char *tool_getenv(const char *name, void *arg);

/*
 * The directory that the tool's own executable lies in, resolved. 0 or -errno (-ENAMETOOLONG when
 * `bytes` are too few).
 */
int tool_own_dir(char *ret_dir, size_t bytes);

/*
 * The preload library that belongs to this tool: beside it (build folder) or in the library
 * directory of its prefix. 0, or -ENOENT with what was looked for in ret_looked ("A, B, C").
 */
int tool_find_library(char *ret_path, size_t path_bytes, char *ret_looked, size_t looked_bytes);

/*
 * LD_LIBRARY_PATH with, at its end, the folders of stand-ins for those CUDA libraries that this
 * process could not load: libcuda.so.1, libcudart.so.12 and .13. They lie near `preload`, the
 * preload library; one that does not is said on standard error. *ret_library_path is the caller's
 * to free, NULL when nothing is to change. 0 or -ENOMEM.
 */
int tool_stand_ins(const char *preload, char **ret_library_path);

/*
 * Shall a store's memory be CUDA's, as far as this environment and the driver here say? `library`
 * is what will be preloaded. ret_why: the reason, in words. Takes 30 s at most; what the driver
 * does for it ends with a child.
 */
bool tool_choose_cuda(const char *library, char *ret_why, size_t bytes);

/* ---- text ------------------------------------------------------------------------------------ */

/*
 * Copy text that another process wrote: everything but printable ASCII becomes '?', so that it can
 * neither move the cursor nor break a line or a JSON string. Always terminated.
 */
void text_clean(char *ret_text, size_t bytes, const char *untrusted);

/* "12.3 GiB", "0 B". Rounded; never more than 15 characters. */
const char *text_bytes(uint64_t count, char ret_text[static 16]);

/* "42s", "1h02m", "3d04h". */
const char *text_age(uint64_t seconds, char ret_text[static 16]);

/* "1 store", "2 stores". */
void text_count(FILE *out, uint64_t count, const char *noun);

/* One word for a POSIX shell: as it is when harmless, else in single quotes. */
void text_shell_quoted(FILE *out, const char *word);

#endif
