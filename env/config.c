/* SPDX-License-Identifier: Apache-2.0 */
/* Settings from the environment and MC_TENT_CONF. */
#include "env/env.h"
