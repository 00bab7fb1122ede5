/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between the processes of one host. */
#include "segment/wire.h"
