/* SPDX-License-Identifier: Apache-2.0 */
/* Claim: the question whether free() comes here has its answer for threads that ask at once. This
 * program is the preload: its free() is the hook. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "shim/hooks_libc.h"

#define THREADS 4
#define TIMES 100000

static atomic_int ready, wrong;

static void *ask(void *unused) {
    (void)unused;
    atomic_fetch_add(&ready, 1);
    while (atomic_load(&ready) < THREADS) {
    }
    for (unsigned i = 0; i < TIMES && atomic_load(&wrong) == 0; i++) {
        if (!tp_libc_hooks_reached())
            atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, ask, NULL) != 0)
            return 1;
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("%d were told that it does not\n", atomic_load(&wrong));
    return atomic_load(&wrong) == 0 ? 0 : 1;
}
