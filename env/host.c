/* SPDX-License-Identifier: Apache-2.0 */
/* Where this process runs. */
#include "env/env.h"
