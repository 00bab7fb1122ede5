/* SPDX-License-Identifier: Apache-2.0 */
/* cuda */
#include "transport/transport.h"
