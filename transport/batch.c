/* SPDX-License-Identifier: Apache-2.0 */
/* batch */
#include "transport/transport.h"
