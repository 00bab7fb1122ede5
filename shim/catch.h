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
 * Can exceptions of code in `module` be caught? Looks the C++ runtime's functions up on the first
 * call that finds them. Any thread. All that follows: only once this was true.
 */
bool tp_catch_ready(const struct tp_module *module);

/*
 * Call run(arg). NULL when it returned. Else what ended it: an exception, which belongs to no
 * thread then and goes to tp_throw or tp_catch_drop, on any thread; or the thread's own end
 * (pthread_exit, cancellation), which goes to tp_throw on this thread, soon. Any thread.
 */
void *tp_catch(void (*run)(void *arg), void *arg);

/* Is what tp_catch returned its thread's end? */
bool tp_catch_is_end(const void *thrown);

/* End an exception as an empty `catch (...)` does. */
void tp_catch_drop(void *exception);

/* Throw it from here. Frames of the library on the way are left as they are: nothing in them may
 * wait for a cleanup. */
_Noreturn void tp_throw(void *thrown);

#endif
