/* SPDX-License-Identifier: Apache-2.0 */
/* What the test sets in, and reads from, the driver double of test_cuda_classify. */
#ifndef TIDEPOOL_CLASSIFY_DRIVER_H
#define TIDEPOOL_CLASSIFY_DRIVER_H

#include <stdint.h>

struct classify_driver {
    int result; /* of every query; 0: answer with the fields below */
    unsigned memory_type, managed;
    int ordinal;
    unsigned queries;
    uint64_t last_address;
};

#endif
