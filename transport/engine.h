/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: what batch.c asks of engine.c. */
#ifndef TIDEPOOL_ENGINE_H
#define TIDEPOOL_ENGINE_H

#include <stdint.h>

struct tp_engine;
struct tp_name;

/* The name that `handle` stands for now, NULL when it was never opened or is closed. Lock-free. */
struct tp_name *tp_engine_name(const struct tp_engine *engine, uint64_t handle);

#endif
