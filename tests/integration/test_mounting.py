"""Segments that a store mounts while it runs: memory that it allocates for them is shared as any other, for as long as it is
mounted; a file that it is told to mount stays the file.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import urllib.request

import pytest
from harness import actions_process, mounts, status
from harness import actions_store as actions
from harness.cluster import MIB, await_port, free_port
from harness.memory import random_bytes
from harness.preloads import ALLOCATOR, compiled
from harness.process import CallFailed
from harness.program import Program
from harness.wheels import TOOL

pytestmark = pytest.mark.stores

SEGMENT, COUNT, SIZE = 64 * MIB, 6, 4 * MIB


def move(cluster, engine, name, local=True):
    keys = [f"{name}{index}" for index in range(COUNT)]
    before = cluster.counters(engine)
    assert engine.call(actions.write_keys, keys=keys, sizes=[SIZE] * COUNT, seed=1) == [0] * COUNT
    got = engine.call(actions.read_keys, keys=keys, sizes=[SIZE] * COUNT, seed=1)
    assert got == {"results": [SIZE] * COUNT, "wrong": []}
    if local:
        cluster.assert_local(engine, before, written=COUNT * SIZE, read=COUNT * SIZE)
    elif not cluster.stock:
        assert cluster.counters(engine)["forward_bytes"] - before["forward_bytes"] == 2 * COUNT * SIZE


@pytest.mark.parametrize("mode", ["memfd", "hugetlbfs", "cumem"])
def test_memory_of_its_own(cluster, mode):
    """Twice: what was given back is taken anew."""
    with mounts.segment_folder(mode, SEGMENT // MIB) as where:
        cluster.use_segments(where)
        free = mounts.number(mounts.FREE)
        store = cluster.store(segment_bytes=0)
        for round_ in range(2):
            mounted = store.call(actions.mount, size=SEGMENT)
            engine = cluster.engine(f"engine{round_}")
            cluster.warm(engine)
            move(cluster, engine, f"round{round_}-")
            assert store.call(actions.unmount, segments=mounted) == 0
            if not cluster.stock:
                assert cluster.counters(store).segments == []
            if mode == "hugetlbfs":
                status.until(lambda: mounts.number(mounts.FREE) == free, "the pages are free", 1.0)
        assert store.warnings == []
        assert (store.call(actions.close), store.finish()) == (0, 0)
        cluster.assert_no_rule_broken()


@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_a_file_that_others_see(cluster, mode):
    """What engines put is in the file, and what others write into it is what engines get."""
    cluster.use_segments(mode)
    with mounts.mounted("tmpfs", "mode=0700") as folder:
        path = f"{folder}/lent"
        with open(path, "wb") as file:
            file.truncate(SEGMENT)
        store = cluster.store(segment_bytes=0)
        mounted = store.call(actions.mount, size=SEGMENT, path=path)
        engine = cluster.engine()
        move(cluster, engine, "key", local=False)
        with open(path, "rb") as file:
            inside = file.read()
        for index in range(COUNT):
            assert random_bytes(SIZE, 1 + index).tobytes() in inside, f"key{index} is not in the file"
        if not cluster.stock:
            (line,) = store.warnings
            assert "told to mount with mount_segment): falls back to Mooncake's transport" in line
        assert path in store.call(actions_process.mapped_files)
        assert store.call(actions.unmount, segments=mounted, path=path) == 0
        assert path not in store.call(actions_process.mapped_files)
        assert (store.call(actions.close), store.finish()) == (0, 0)
        cluster.assert_no_rule_broken()


SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    ssize_t (*real)(int, struct msghdr *, int) = dlsym(RTLD_NEXT, "recvmsg");
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    if (strcmp(name, "tidepool-peer") == 0 && access(getenv("SLOW_FILE"), F_OK) == 0)
        usleep(700000);
    return real(fd, message, flags);
}
"""


def store_of(cluster, mode):
    """In the mode in-place an allocator comes before Tidepool, which leaves segments where that one has put them."""
    cluster.use_segments("cumem" if mode == "cumem" else "memfd")
    environment = cluster.store_environment()
    if mode == "in-place" and not cluster.stock:
        environment["LD_PRELOAD"] = f"{compiled(cluster, 'allocator', ALLOCATOR)}:{environment['LD_PRELOAD']}"
    return cluster.store(segment_bytes=0, environment=environment)


def bases_of(cluster, store):
    return [segment["base"] for segment in ([] if cluster.stock else cluster.counters(store).segments)]


def assert_moved(cluster, mode, bases):
    if not cluster.stock:
        apart = all(abs(one - other) >= SEGMENT for one, other in itertools.combinations(bases, 2))
        assert apart if mode != "in-place" else len(set(bases)) == 1, bases


@pytest.mark.parametrize("mode", ["memfd", "cumem", "in-place"])
def test_a_slow_engine(cluster, mode):
    """One that is slow to hear that a segment has gone does not take what comes after it for it: that lies elsewhere, or
    comes to the same addresses once the engine has heard."""
    store = store_of(cluster, mode)
    slow = os.path.join(cluster.folder, "slow")
    environment = cluster.engine_environment()
    if not cluster.stock:
        environment.update(LD_PRELOAD=f"{cluster.preload}:{compiled(cluster, 'slow', SLOW)}", SLOW_FILE=slow)
    engine, stock = cluster.engine(environment=environment), cluster.engine("stock", {})
    mounted = store.call(actions.mount, size=SEGMENT)
    cluster.warm(engine)
    bases = []
    for round_ in range(2):
        keys = [f"round{round_}-{index}" for index in range(COUNT)]
        bases += bases_of(cluster, store)
        open(slow, "w").close()
        assert store.call(actions.unmount, segments=mounted) == 0
        mounted = store.call(actions.mount, size=SEGMENT)
        assert engine.call(actions.write_keys, keys=keys, sizes=[65536] * COUNT, seed=round_) == [0] * COUNT
        got = stock.call(actions.read_keys, keys=keys, sizes=[65536] * COUNT, seed=round_)
        os.unlink(slow)
        assert got == {"results": [65536] * COUNT, "wrong": []}, "they lie in the memory that has gone"
    assert_moved(cluster, mode, bases + bases_of(cluster, store))
    assert store.warnings == []


@pytest.mark.parametrize("mode", ["memfd", "cumem", "in-place"])
def test_a_stopped_engine(cluster, mode):
    """It copies into memory that has gone once it goes on. Other memory comes to other addresses; where it cannot, it is not
    mounted until the engine has heard."""
    store = store_of(cluster, mode)
    engine, stock = cluster.engine(), cluster.engine("stock", {})
    mounted = store.call(actions.mount, size=SEGMENT)
    cluster.warm(engine)
    bases = bases_of(cluster, store)
    engine.signal(signal.SIGSTOP)
    try:
        assert store.call(actions.unmount, segments=mounted) == 0
        refused = mode == "in-place" and not cluster.stock
        if refused:
            with pytest.raises(CallFailed, match="'ret': -"):
                store.call(actions.mount, size=SEGMENT)
            (line,) = [line for line in store.tidepool_lines if "error:" in line]
            assert "an engine has not let go of it for 5 s" in line
        else:
            mounted = store.call(actions.mount, size=SEGMENT)
    finally:
        engine.signal(signal.SIGCONT)
    if refused:
        mounted = store.call(actions.mount, size=SEGMENT)
    keys = [f"key{index}" for index in range(COUNT)]
    assert engine.call(actions.write_keys, keys=keys, sizes=[65536] * COUNT, seed=1) == [0] * COUNT
    got = stock.call(actions.read_keys, keys=keys, sizes=[65536] * COUNT, seed=1)
    assert got == {"results": [65536] * COUNT, "wrong": []}, "they lie in the memory that has gone"
    assert_moved(cluster, mode, bases + bases_of(cluster, store))


@contextlib.contextmanager
def without_randomness():
    """For processes that start meanwhile: each new one gets the same addresses from the kernel (setarch -R)."""
    libc = ctypes.CDLL(None)
    before = libc.personality(0xFFFFFFFF)
    libc.personality(before | 0x0040000)  # ADDR_NO_RANDOMIZE
    try:
        yield
    finally:
        libc.personality(before)


@pytest.mark.parametrize("mode", ["memfd", "tmpfs", "cumem"])
def test_a_store_that_comes_back(cluster, mode):
    """Never where one before it was: engines may still look there for what that one had."""
    if cluster.stock:
        pytest.skip("where Mooncake's own segments lie is not known")
    bases = []
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(mounts.mounted("tmpfs", "mode=0700")) if mode == "tmpfs" else mode
        cluster.use_segments(where)
        stack.enter_context(without_randomness())
        for round_ in range(4):
            store = cluster.store(f"store{round_}", segment_bytes=SEGMENT)
            bases += bases_of(cluster, store)
            store.kill()
    assert len(bases) == 4
    assert_moved(cluster, mode, bases)


def test_the_wheels_own_service(cluster):
    """mooncake_store_service, with what it is told to mount over HTTP."""
    cluster.start_master()
    port = free_port()
    config = os.path.join(cluster.folder, "config.json")
    with open(config, "w") as file:
        json.dump(
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": SEGMENT,
                "local_buffer_size": 16 * MIB,
                "protocol": "tcp",
                "device_name": "",
                "master_server_address": cluster.master_address,
            },
            file,
        )
    run = [] if cluster.stock else [str(TOOL), "run", "--store", cluster.directory, "--"]
    words = [*run, cluster.wheel.python, "-m", "mooncake.mooncake_store_service", f"--config={config}", f"--port={port}"]
    service = Program("service", words, cluster.whole_environment("service", {}), os.path.join(cluster.folder, "service.log"))
    cluster.processes.append(service)
    await_port(port, service.popen, 30.0)
    engine = cluster.engine()
    cluster.warm(engine)
    move(cluster, engine, "first")
    body = json.dumps({"size": SEGMENT}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/mount", body, 20) as answer:
        assert json.load(answer)["status"] == "success"
    if not cluster.stock:
        mapped = lambda: [peer["pieces_mapped"] for peer in cluster.counters(engine).peers]  # noqa: E731
        status.until(lambda: mapped() == [2], lambda: f"the engine maps what was mounted: {mapped()}")
    for round_ in range(2):
        move(cluster, engine, f"more{round_}-")
    if not cluster.stock:
        assert [segment["bytes"] for segment in cluster.counters(service).segments] == [SEGMENT, SEGMENT]
        assert service.warnings == []
    assert service.terminate(20) == 0
    if not cluster.stock:
        assert not [path for path in status.sockets(cluster.directory) if "/s-" in path]
