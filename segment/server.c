/* SPDX-License-Identifier: Apache-2.0 */
/* Hands out pieces and counters over a socket. */
#include "segment/segment.h"
