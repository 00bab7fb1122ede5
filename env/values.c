/* SPDX-License-Identifier: Apache-2.0 */
/* The forms that values of settings take. It must not know which setting a value belongs to. */
#include "env/values.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

int tp_value_bool(const char *text, bool *ret_value) {
    if (!strcmp(text, "1") || !strcasecmp(text, "true"))
        *ret_value = true;
    else if (!strcmp(text, "0") || !strcasecmp(text, "false"))
        *ret_value = false;
    else
        return -EINVAL;
    return 0;
}

/* Digits at *text, which moves past them. */
static int read_digits(const char **text, uint64_t max, uint64_t *ret_value) {
    const char *at = *text;
    uint64_t value = 0;
    bool over = false;

    if (*at < '0' || *at > '9')
        return -EINVAL;
    for (; *at >= '0' && *at <= '9'; at++) {
        uint64_t digit = (uint64_t)(*at - '0');

        over = over || value > max / 10 || value * 10 > max - digit;
        if (!over)
            value = value * 10 + digit;
    }
    *text = at;
    if (over)
        return -ERANGE;
    *ret_value = value;
    return 0;
}

int tp_value_u64(const char *text, uint64_t max, uint64_t *ret_value) {
    uint64_t value = 0;
    int rc = read_digits(&text, max, &value);

    if (*text)
        return -EINVAL;
    if (rc == 0)
        *ret_value = value;
    return rc;
}

int tp_value_bytes(const char *text, uint64_t *ret_bytes) {
    static const char units[] = "kmgt";
    uint64_t value = 0;
    unsigned shift = 0;
    int rc = read_digits(&text, TP_VALUE_MAX_BYTES, &value);

    if (rc == -EINVAL)
        return rc;
    if (*text) {
        const char *unit = strchr(units, *text | 0x20);

        if (!unit || !*unit || (text[1] && strcasecmp(text + 1, "ib") != 0))
            return -EINVAL;
        shift = 10 * (unsigned)(unit - units + 1);
    }
    if (rc < 0 || value > TP_VALUE_MAX_BYTES >> shift)
        return -ERANGE;
    *ret_bytes = value << shift;
    return 0;
}

/* Appends `number` unless it is there. */
static int add_number(uint64_t number, unsigned limit, uint64_t *numbers, unsigned *count) {
    for (unsigned i = 0; i < *count; i++) {
        if (numbers[i] == number)
            return 0;
    }
    if (*count == limit)
        return -ERANGE;
    numbers[(*count)++] = number;
    return 0;
}

int tp_value_list(const char *text, uint64_t max, unsigned limit, uint64_t *ret_numbers,
                  unsigned *ret_count) {
    unsigned count = 0;

    for (;;) {
        uint64_t first = 0, last;
        int rc;

        text += strspn(text, " ");
        rc = read_digits(&text, max, &first);
        last = first;
        if (rc == 0 && *text == '-') {
            text++;
            rc = read_digits(&text, max, &last);
        }
        if (rc == 0 && last < first)
            rc = -EINVAL;
        /* A range of more numbers than fit fails after `limit` of them. */
        for (uint64_t number = first; rc == 0; number++) {
            rc = add_number(number, limit, ret_numbers, &count);
            if (number == last)
                break;
        }
        if (rc < 0)
            return rc;
        text += strspn(text, " ");
        if (!*text)
            break;
        if (*text++ != ',')
            return -EINVAL;
    }
    *ret_count = count;
    return 0;
}
