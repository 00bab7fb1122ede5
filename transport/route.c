/* SPDX-License-Identifier: Apache-2.0 */
/* route */
#include "transport/transport.h"
