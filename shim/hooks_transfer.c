/* SPDX-License-Identifier: Apache-2.0 */
/* hooks_transfer */
#include "env/env.h"
