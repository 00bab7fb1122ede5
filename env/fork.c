/* SPDX-License-Identifier: Apache-2.0 */
/* A forked child starts inert; threads of the library. */
#include "env/env.h"
