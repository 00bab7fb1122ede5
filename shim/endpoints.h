/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Under which name peers open the memory of this process. A process may hold several engines: a
 * store's, and those of clients that lend nothing. The name that the server tells is that of an
 * engine with published memory, whichever engine started last.
 */
#ifndef TIDEPOOL_ENDPOINTS_H
#define TIDEPOOL_ENDPOINTS_H

/* `engine`, of whatever module, is opened by this name. Any thread. */
void tp_endpoints_learn(const void *engine, const char *name);

/* `engine` has published memory: its name is the one that is told. Any thread. */
void tp_endpoints_serve(const void *engine);

/* `engine` is another object from now on, at `now`. Any thread. */
void tp_endpoints_move(const void *engine, const void *now);

/* `engine` is gone: another one's name is told if it has memory. Any thread. */
void tp_endpoints_forget(const void *engine);

#endif
