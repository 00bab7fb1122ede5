/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: up to which size the copy kernel beats the copy engines, on this machine. */
#ifndef TIDEPOOL_CALIBRATE_H
#define TIDEPOOL_CALIBRATE_H

#include "transport/gpu.h"

/*
 * Measure once and set the GPU's kernel_max of both directions. Ends within 150 ms: 100 ms
 * after it began nothing more is measured. 16 MiB of pinned and of GPU memory, freed at the end.
 * The result is kept for the life of the process. Measures nothing when the settings decide; leaves
 * what is set when it cannot measure. In a background thread.
 */
void tp_calibrate(struct tp_gpu *gpu);

#endif
