/* SPDX-License-Identifier: Apache-2.0 */
/* next */
#include "env/env.h"
