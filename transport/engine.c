/* SPDX-License-Identifier: Apache-2.0 */
/* engine */
#include "transport/transport.h"
