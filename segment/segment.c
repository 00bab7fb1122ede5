/* SPDX-License-Identifier: Apache-2.0 */
/* The table of overlays and published ranges. */
#include "segment/segment.h"
