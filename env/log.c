/* SPDX-License-Identifier: Apache-2.0 */
/* One line at a time to standard error. */
#include "env/env.h"
