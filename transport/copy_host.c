/* SPDX-License-Identifier: Apache-2.0 */
/* copy_host */
#include "transport/transport.h"
