"""Engines that learn late that a store has taken memory back, or has died: what they report as put is what others read."""

import os
import signal
import subprocess

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


@pytest.fixture
def late(cluster):
    """A store, an engine whose thread is late while the file `late.path` is there, and a stock engine."""
    source, library, cluster.path = (os.path.join(cluster.folder, name) for name in ("late.c", "late.so", "late"))
    with open(source, "w") as file:
        file.write(LATE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    environment = cluster.engine_environment()
    if not cluster.stock:
        environment.update(LD_PRELOAD=f"{cluster.preload}:{library}", LATE_FILE=cluster.path)
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
