/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calling C++ from a thread of the library: an exception that nobody catches there would end the
 * host's process.
 *
 * It must not know what is called.
 */
#ifndef TIDEPOOL_CATCH_H
#define TIDEPOOL_CATCH_H

#include "shim/modules.h"

/*
 * Can exceptions of code in `module` be caught? Looks the C++ runtime's functions up through the
 * module on the first call that finds them. Any thread.
 */
bool tp_catch_ready(const struct tp_module *module);

/*
 * Call run(arg). True: it threw, and the exception was ended as an empty `catch (...)` does. Only
 * once tp_catch_ready was true. Any thread.
 */
bool tp_catch(void (*run)(void *arg), void *arg);

#endif
