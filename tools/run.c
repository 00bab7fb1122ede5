/* SPDX-License-Identifier: Apache-2.0 */
/* run */
#include "env/env.h"
