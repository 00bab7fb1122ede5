/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_segment */
#include "env/env.h"
