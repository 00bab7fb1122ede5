/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of anonymous memory. */
#include "segment/segment.h"
