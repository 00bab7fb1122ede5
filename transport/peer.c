/* SPDX-License-Identifier: Apache-2.0 */
/* peer */
#include "transport/transport.h"
