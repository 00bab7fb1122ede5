"""Stores that die and come back on hugetlbfs: engines let go of a dead store's pages within a second, a new store waits for
them and says so, and what a dead store left in its directory is swept, a live one's never.
"""

import contextlib
import mmap
import os
import re
import signal
import threading
import time

import pytest
from harness import actions_store as actions
from harness import machine, mounts, status
from harness.cluster import FORGETTING, FORGOTTEN_S, MIB

pytestmark = [pytest.mark.stores, pytest.mark.hugepages]

PAGES = 32
MAP_HUGETLB = 0x40000  # linux/mman.h
SEGMENT = PAGES * 2 * MIB
MISSING = re.compile(r"needs (\d+) pages of 2 MiB, the kernel has (\d+) pages of 2 MiB free, (\d+) pages of 2 MiB are missing")


@contextlib.contextmanager
def all_of_it_in(cluster, where):
    """Segments and sockets. Processes end before the mount does: they would put their sockets back into what lies under it."""
    cluster.directory = where
    cluster.use_segments(where)
    cluster.start_master(*FORGETTING)
    try:
        yield
    finally:
        for process in cluster.processes:
            process.kill()


@pytest.fixture
def pool(cluster):
    """A mount, which holds the sockets too, and at least the pages for one store. How many are free."""
    if cluster.stock:
        pytest.skip("nothing of Mooncake's own lies on hugetlbfs")
    with mounts.segment_folder("hugetlbfs", SEGMENT // MIB) as where, all_of_it_in(cluster, where):
        yield mounts.number(mounts.FREE)


def free():
    return mounts.number(mounts.FREE)


def pair_on(cluster, pages):
    store, engine = cluster.store(segment_bytes=pages * 2 * MIB), cluster.engine()
    cluster.warm(engine)
    return store, engine


def start_store(cluster, name, pages, wait_s):
    """Begins to set up; whether it can is not known yet."""
    store = cluster.process(name, cluster.store_environment(MC_STORE_SHM_SEGMENT_WAIT_S=str(wait_s), TIDEPOOL_SOCKET_DIR=None))
    arguments = dict(master=cluster.master_address, segment_bytes=pages * 2 * MIB, local_bytes=16 * MIB)
    return store, store.start(actions.setup, **arguments)


def said(store, word):
    return [line for line in store.tidepool_lines if word in line]


@pytest.mark.parametrize("size", [4096, 8 * MIB])
def test_engines_let_go_within_a_second_while_a_transfer_is_under_way(cluster, pool, size):
    store, engine = pair_on(cluster, PAGES)
    running = engine.start(actions.hammer, key_prefix="a", size=size, seconds=3, seed=1)
    status.until(lambda: cluster.counters(engine)["local_write_bytes"] > 64 * size, "it runs")
    assert free() == pool - PAGES
    store.popen.kill()
    killed = time.monotonic()
    status.until(lambda: free() == pool, lambda: f"all pages are free, {free()} of {pool}", 1.0)
    print(f"free after {time.monotonic() - killed:.3f} s")
    result = running.result(30)
    assert result["lies"] == 0 and result["good"] > 4
    store.popen.wait(10)


def test_a_store_waits_for_pages_and_starts_as_soon_as_they_are_free(cluster, pool):
    store, engine = pair_on(cluster, pool)
    engine.signal(signal.SIGSTOP)
    store.kill()
    assert free() == 0
    fresh, result = start_store(cluster, "fresh", pool, wait_s=60)
    status.until(lambda: len(said(fresh, "are missing: waiting")) == 2, lambda: fresh.log[-2000:], 15)
    assert all(MISSING.search(line).groups() == (str(pool), "0", str(pool)) for line in said(fresh, "are missing"))
    engine.signal(signal.SIGCONT)
    freed = time.monotonic()
    assert result.result(20) == 0
    assert machine.ran_s(freed) < 3.0
    assert len(said(fresh, "there is room now")) == 1
    # The dead store's socket and lock are swept; the engine uses the new store.
    assert len([path for path in status.sockets(cluster.directory) if "/s-" in path]) == 1
    machine.sleep(FORGOTTEN_S)  # the master forgets the dead store
    cluster.warm(engine)
    assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]


def go_on_when_awaited(engine, log):
    """Its pages are let go once another store has said that it waits for them."""

    def waits():
        with contextlib.suppress(FileNotFoundError), open(log, errors="replace") as file:
            return "are missing: waiting" in file.read()

    try:
        status.until(waits, "the next store waits", 20)
    finally:
        engine.signal(signal.SIGCONT)


@pytest.mark.parametrize("kind", ["python", "mooncake_client"])
def test_one_with_a_disk_waits_for_its_buffer_too(cluster, tmp_path, kind):
    """Segment and buffer take the whole pool. Both kinds of stores wait where memory is allocated."""
    if cluster.stock:
        pytest.skip("nothing of Mooncake's own lies on hugetlbfs")
    (tmp_path / "ssd").mkdir()
    buffer = 8 * 2 * MIB
    disk = {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(tmp_path / "ssd"),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(buffer),
    }
    with mounts.segment_folder("hugetlbfs", SEGMENT // MIB) as where:
        pages = free()
        segment = pages * 2 * MIB - buffer
        cluster.use_segments(where)
        cluster.start_master("-enable_offload=true", *FORGETTING)
        environment = cluster.store_environment(**disk)

        def start(name):
            if kind == "mooncake_client":
                return cluster.client(name, segment=str(segment), environment=environment, enable_offload="true")
            return cluster.store(name, segment_bytes=segment, environment=environment, enable_ssd_offload=True)

        store, engine = start("store"), cluster.engine()
        cluster.warm(engine)
        assert free() == 0
        engine.signal(signal.SIGSTOP)
        store.kill()
        going_on = threading.Thread(target=go_on_when_awaited, args=(engine, os.path.join(cluster.folder, "fresh.log")))
        going_on.start()
        fresh = start("fresh")
        going_on.join()
        assert free() == 0
        line = said(fresh, "are missing: waiting")[0]
        needed = pages - buffer // (2 * MIB)
        assert MISSING.search(line).groups() == (str(needed), "0", str(needed))
        assert len(said(fresh, "there is room now")) == 1
        machine.sleep(FORGOTTEN_S)  # the master forgets the dead store
        cluster.warm(engine)


def test_a_store_whose_pages_are_never_let_go_fails_in_time(cluster, pool):
    store, engine = pair_on(cluster, pool)
    engine.signal(signal.SIGSTOP)
    store.kill()
    start = time.monotonic()
    fresh, result = start_store(cluster, "fresh", pool, wait_s=2)
    assert result.result(20) != 0
    assert time.monotonic() - start >= 2.0 and machine.ran_s(start) < 8.0
    lines = said(fresh, "error")
    assert len(lines) == 1 and "others still hold them after 2 s" in lines[0], lines
    assert MISSING.search(lines[0]).groups() == (str(pool), "0", str(pool))
    at_once, result = start_store(cluster, "at-once", pool, wait_s=0)
    assert result.result(20) != 0
    assert not said(at_once, "waiting") and len(said(at_once, "error")) == 1


def test_too_few_pages_at_all_fail_at_once(cluster, pool):
    nr = mounts.number(mounts.POOL)
    store, result = start_store(cluster, "store", nr + 8, wait_s=300)
    assert result.result(20) != 0
    lines = said(store, "error")
    assert len(lines) == 1 and "raise vm.nr_hugepages or make the segment smaller" in lines[0], lines
    assert MISSING.search(lines[0]).groups() == (str(nr + 8), str(pool), str(nr + 8 - pool))


def test_a_dead_stores_names_are_swept_and_a_live_ones_never(cluster, pool):
    half = PAGES // 2 * 2 * MIB
    live = cluster.store("live", segment_bytes=half)
    live_names = set(os.listdir(cluster.directory))
    dead = cluster.store("dead", segment_bytes=half)
    dead_names = set(os.listdir(cluster.directory)) - live_names
    assert len(live_names) == len(dead_names) == 2, "a socket and a lock; segments have no names"
    # As an old kernel leaves it when a store is killed between two calls.
    open(os.path.join(cluster.directory, ".tidepool-" + "0" * 32), "w").close()
    dead.kill()
    cluster.store("fresh", segment_bytes=half)
    names = set(os.listdir(cluster.directory))
    assert live_names < names and not dead_names & names
    assert not [name for name in names if name.startswith(".tidepool-")]
    machine.sleep(FORGOTTEN_S)  # the master forgets the dead store
    engine = cluster.engine()
    cluster.warm(engine, stores=2, size=65536)
    assert live.call(actions.close) == 0


def test_pieces_lie_on_the_chosen_node(cluster, pool):
    environment = cluster.store_environment(MC_STORE_CUMEM_NUMA_NODES="0", MC_STORE_CUMEM_PIECE_BYTES="16M")
    store = cluster.store(segment_bytes=SEGMENT, environment=environment)
    with open(f"/proc/{store.pid}/numa_maps") as file:
        lines = [line for line in file if cluster.directory in line]
    assert len(lines) == 4 and all(" bind:0 " in line and "N0=8" in line and "huge" in line for line in lines), lines


def test_a_mount_with_a_size(cluster, pool):
    with mounts.mounted("hugetlbfs", "pagesize=2M,mode=0700,size=16M") as small:
        store = cluster.process("store", cluster.store_environment(MC_STORE_SHM_SEGMENT_DIR=small))
        arguments = dict(master=cluster.master_address, segment_bytes=SEGMENT, local_bytes=16 * MIB)
        assert store.call(actions.setup, **arguments) != 0
        lines = said(store, "error")
        assert len(lines) == 1 and "the mount has 8 pages of 2 MiB free" in lines[0] and "size=" in lines[0], lines


@pytest.mark.parametrize("options", ["min_size={own}M", "min_size={own}M,size={more}M"], ids=["min_size", "both"])
def test_a_mount_with_pages_of_its_own(cluster, options):
    """The kernel counts them as promised: they are this mount's, after a restart too, and no other's."""
    if cluster.stock:
        pytest.skip("nothing of Mooncake's own lies on hugetlbfs")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mounts.huge_pages(PAGES + 16))
        pages = free() - 16  # the pool may have been larger before: two stores of so many never fit
        options = options.format(own=2 * pages, more=2 * pages + 16)
        where = stack.enter_context(mounts.mounted("hugetlbfs", f"pagesize=2M,mode=0700,{options}"))
        other = stack.enter_context(mounts.mounted("hugetlbfs", "pagesize=2M,mode=0700"))
        stack.enter_context(all_of_it_in(cluster, where))
        assert mounts.number(mounts.PROMISED) >= pages
        store, engine = pair_on(cluster, pages)
        assert store.warnings == []
        engine.signal(signal.SIGSTOP)
        store.kill()
        fresh, result = start_store(cluster, "fresh", pages, wait_s=60)
        status.until(lambda: said(fresh, "are missing: waiting"), lambda: fresh.log[-2000:], 15)
        engine.signal(signal.SIGCONT)
        assert result.result(20) == 0
        fresh.kill()
        status.until(lambda: mounts.number(mounts.PROMISED) >= pages, "the mount has its pages again", 10)
        need = free() - pages + 1
        environment = cluster.store_environment(MC_STORE_SHM_SEGMENT_DIR=other, MC_STORE_SHM_SEGMENT_WAIT_S="0")
        refused = cluster.process("refused", environment)
        arguments = dict(master=cluster.master_address, segment_bytes=need * 2 * MIB, local_bytes=16 * MIB)
        assert refused.call(actions.setup, **arguments) != 0
        (line,) = said(refused, "error")
        assert MISSING.search(line).groups() == (str(need), str(need - 1), "1")


def test_these_tests_leave_the_pool_as_it_was():
    """Also when processes of the test before still hold pages of it, which are then more than the pool has."""
    with mounts.huge_pages(0):
        before = mounts.number(mounts.POOL) - mounts.number(mounts.SURPLUS)
    with mounts.huge_pages(4):
        held = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
        held[:: 2 * MIB] = b"\1" * 4
    with mounts.huge_pages(8):
        held.close()
    with mounts.huge_pages(0):
        assert mounts.number(mounts.POOL) - mounts.number(mounts.SURPLUS) == before
