/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bounded one-line texts: what log lines and the errors of config and host are made of. Internal to
 * env/.
 *
 * It must not know: who reads the text, or where its values came from (they are taken as hostile).
 */
#ifndef TIDEPOOL_ENV_TEXT_H
#define TIDEPOOL_ENV_TEXT_H

#include <stdarg.h>
#include <stddef.h>

/*
 * Replace what could break a line or drive a terminal by '?': ASCII control characters, DEL, and
 * the C1 controls in UTF-8. Other bytes are kept, so that paths and names in UTF-8 stay readable.
 */
void tp_text_one_line(char *text);

/* vsnprintf, cut at `bytes` and made one line. A format that cannot be written gives an empty text.
 */
void tp_text_vformat(char *ret_text, size_t bytes, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));
void tp_text_format(char *ret_text, size_t bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
