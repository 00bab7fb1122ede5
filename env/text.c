/* SPDX-License-Identifier: Apache-2.0 */
/* Bounded one-line texts. It must not know where the values come from; all of them may be hostile.
 */
#include "env/text.h"

#include <stdio.h>

void tp_text_one_line(char *text) {
    for (unsigned char *at = (unsigned char *)text; *at; at++) {
        if (*at < 0x20 || *at == 0x7f) {
            *at = '?';
        } else if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0) {
            /* U+0080..U+009F: U+009B starts an escape sequence on some terminals. */
            at[0] = '?';
            at[1] = '?';
        }
    }
}

void tp_text_vformat(char *ret_text, size_t bytes, const char *format, va_list args) {
    if (bytes == 0)
        return;
    if (vsnprintf(ret_text, bytes, format, args) < 0)
        ret_text[0] = '\0';
    ret_text[bytes - 1] = '\0';
    tp_text_one_line(ret_text);
}

void tp_text_format(char *ret_text, size_t bytes, const char *format, ...) {
    va_list args;

    va_start(args, format);
    tp_text_vformat(ret_text, bytes, format, args);
    va_end(args);
}
