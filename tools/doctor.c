/* SPDX-License-Identifier: Apache-2.0 */
/* doctor */
#include "env/env.h"
