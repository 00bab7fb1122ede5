"""Engines that learn late that a store has taken memory back or has died, or that go on late with a put: what they report
as put is what others read, and what others have put stays."""

import os
import signal
import subprocess
import time

import pytest
from harness import actions_store as actions
from harness.cluster import MIB

pytestmark = pytest.mark.stores

SEGMENT, COUNT, SIZE = 64 * MIB, 8, 65536

# The thread that reads what stores say has read it, and does not come to act on it while the file is there.
LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t (*real)(int, struct msghdr *, int) = dlsym(RTLD_NEXT, "recvmsg");
    char name[16] = "";
    ssize_t result = real(fd, message, flags);
    int error = errno;
    prctl(PR_GET_NAME, name);
    while (strcmp(name, "tidepool-peer") == 0 && access(getenv("LATE_FILE"), F_OK) == 0)
        usleep(10000);
    errno = error;
    return result;
}
"""

# Once the file is there, the process stops itself at the STOP_AT-th time that Tidepool reads its coarse clock in a thread
# of Mooncake's: at each submit, each poll and each copy. Tidepool's own threads copy nothing between the file's appearing
# and the stop. So the last submit is behind it and most copies are ahead.
STOPPED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
static atomic_int looks, passed;
static int is_ours(void *caller) {
    Dl_info info;
    return dladdr(caller, &info) && strstr(info.dli_fname, "libtidepool.so");
}
int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*_Atomic real)(clockid_t, struct timespec *);
    char name[16] = "";
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    if (clock == CLOCK_MONOTONIC_COARSE && !passed && is_ours(__builtin_return_address(0)) &&
        access(getenv("LATE_FILE"), F_OK) == 0) {
        prctl(PR_GET_NAME, name);
        int copies = strncmp(name, "tp-copy", 7) == 0, own = copies || strncmp(name, "tidepool-", 9) == 0;
        if (!own && atomic_fetch_add(&looks, 1) + 1 == atoi(getenv("STOP_AT"))) {
            raise(SIGSTOP); /* this thread does not return before SIGCONT */
            passed = 1;
        }
        while (copies && !passed)
            usleep(1000);
    }
    return real(clock, time);
}
"""


def preload_environment(cluster, source, **more):
    """An engine's, with this source as another preload. The file `cluster.path` switches it."""
    cluster.path, text, library = (os.path.join(cluster.folder, name) for name in ("late", "late.c", "late.so"))
    if cluster.stock:
        return {}
    with open(text, "w") as file:
        file.write(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", text, "-o", library, "-ldl"], check=True)
    return cluster.engine_environment(LD_PRELOAD=f"{cluster.preload}:{library}", LATE_FILE=cluster.path, **more)


@pytest.fixture
def late(cluster):
    """A store, an engine whose thread is late while the file `late.path` is there, and a stock engine."""
    environment = preload_environment(cluster, LATE)
    cluster.store_process = cluster.store(segment_bytes=0)
    cluster.mounted = cluster.store_process.call(actions.mount, size=SEGMENT)
    cluster.engine_process = cluster.engine(environment=environment)
    cluster.stock_process = cluster.engine("stock", {})
    cluster.warm(cluster.engine_process)
    return cluster


def put(late, name):
    """The keys that the engine says it has put."""
    keys = [f"{name}{index}" for index in range(COUNT)]
    results = late.engine_process.call(actions.write_keys, keys=keys, sizes=[SIZE] * COUNT, seed=5)
    return [(key, 5 + index) for index, (key, result) in enumerate(zip(keys, results)) if result == 0]


def test_memory_that_was_taken_back(late):
    """Other memory comes to the same addresses."""
    engine, store = late.engine_process, late.store_process
    open(late.path, "w").close()
    assert store.call(actions.unmount, segments=late.mounted) == 0
    store.call(actions.mount, size=SEGMENT)
    good = put(late, "after")
    assert good, "nothing was put: the test shows nothing"
    for key, seed in good:
        got = late.stock_process.call(actions.read_keys, keys=[key], sizes=[SIZE], seed=seed)
        assert got == {"results": [SIZE], "wrong": []}, f"{key} lies in the memory that was taken back"
    os.unlink(late.path)
    late.warm(engine)


@pytest.mark.parametrize("stopped", [False, True], ids=["thread", "process"])
def test_a_store_that_was_killed(late, stopped):
    """Until Mooncake's master forgets the store it gives out places in its memory."""
    engine, store = late.engine_process, late.store_process
    open(late.path, "w").close()
    if stopped:
        engine.signal(signal.SIGSTOP)
    store.kill()
    if stopped:
        engine.signal(signal.SIGCONT)
    assert put(late, "after") == [], "put into the memory of the dead"


# The master gives the place of a put that has not ended to others after so many seconds.
DISCARD_S, RELEASE_S = 2, 4
# Longer than both, and than the library takes for a stall (TP_STALL_MS).
STOPPED_S = 7
PUT_COUNT, PUT_SIZE = 6, 8 * MIB
OTHER_COUNT, OTHER_SIZE = 4, MIB


def await_stopped(process, limit_s=60):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with open(f"/proc/{process.pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                return
        time.sleep(0.02)
    raise AssertionError("the engine does not stop during its put")


def fill(engine, total_bytes, limit_s=60):
    """Put objects, each of which is read, which keeps it from eviction, until they have so much. Returns keys and seeds."""
    kept, deadline, seed = [], time.monotonic() + limit_s, 1000
    while len(kept) * OTHER_SIZE < total_bytes:
        assert time.monotonic() < deadline, f"only {len(kept)} objects found room"
        seed += OTHER_COUNT
        keys, sizes = [f"other{seed + index}" for index in range(OTHER_COUNT)], [OTHER_SIZE] * OTHER_COUNT
        put = engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=seed)
        got = engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=seed)
        assert not [index for index in got["wrong"] if got["results"][index] == OTHER_SIZE]
        kept += [(key, seed + index) for index, key in enumerate(keys) if got["results"][index] == OTHER_SIZE]
        if any(put):
            time.sleep(0.2)
    return kept


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_engine_that_was_stopped_during_a_put(cluster):
    """The place of its objects is others' when it goes on."""
    if cluster.stock:
        pytest.skip("Mooncake itself overwrites the objects of others")
    cluster.start_master(
        f"-put_start_discard_timeout_sec={DISCARD_S}",
        f"-put_start_release_timeout_sec={RELEASE_S}",
        "-default_kv_lease_ttl=600000",
    )
    cluster.store(segment_bytes=SEGMENT)
    # All submits are over after some 20 looks; each later one copies 256 KiB of the 48 MiB at most.
    environment = preload_environment(cluster, STOPPED, STOP_AT="60")
    engine, other = cluster.engine(environment=environment), cluster.engine("other", {})
    cluster.warm(engine)
    open(cluster.path, "w").close()
    keys = [f"late{index}" for index in range(PUT_COUNT)]
    pending = engine.start(actions.write_keys, keys=keys, sizes=[PUT_SIZE] * PUT_COUNT, seed=5)
    await_stopped(engine)
    stopped = time.monotonic()
    # More than there is beside the stopped put's 48 MiB; the rest may be lost to what is cut in pieces.
    kept = fill(other, SEGMENT - 8 * MIB)
    time.sleep(max(0, stopped + STOPPED_S - time.monotonic()))
    engine.signal(signal.SIGCONT)
    results = pending.result()
    wrong = []
    for key, seed in kept:
        got = other.call(actions.read_keys, keys=[key], sizes=[OTHER_SIZE], seed=seed)
        wrong += [key] * (got != {"results": [OTHER_SIZE], "wrong": []})
    assert not wrong, f"{len(wrong)} of {len(kept)} objects of the other engine were overwritten"
    assert 0 not in results, f"reported as put: {results}"
    assert cluster.counters(engine)["late_writes"] > 0
