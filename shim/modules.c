/* SPDX-License-Identifier: Apache-2.0 */
/* modules */
#include "env/env.h"
