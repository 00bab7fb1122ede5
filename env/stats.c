/* SPDX-License-Identifier: Apache-2.0 */
/* The counters' shared page. */
#include "env/stats.h"
