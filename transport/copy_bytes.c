/* SPDX-License-Identifier: Apache-2.0 */
/* copy_bytes */
#include "transport/transport.h"
