/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces that are files of a directory. */
#include "segment/segment.h"
