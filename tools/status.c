/* SPDX-License-Identifier: Apache-2.0 */
/* status */
#include "env/env.h"
