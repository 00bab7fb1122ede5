"""Threads, memory, addresses and fds that run out, for Tidepool alone (tests/scarce/scarce.c) or by the kernel's limits:
nobody ends, hangs or gets other bytes. What is short once is tried again, what is short for good leaves transfers to
Mooncake, and one line says it.
"""

import itertools
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import actions_double, real_client, status
from harness.cluster import MIB
from harness.wheels import ROOT, SCARCE

pytestmark = [pytest.mark.stores, pytest.mark.timeout(120)]

SIZES = [8, 65536, MIB]
AT_ONCE = 3

# What an engine cannot start without: it runs as stock and says so.
ENGINE_STOCK = ["thread:1:1", "thread:1:0", "epoll:1:1", "event:1:1", "open:1:0"]
# What it comes to have later, or does without.
ENGINE_LATER = [
    *("thread:2:2", "thread:2:0", "thread:3:3", "thread:3:0"),
    *(f"allocate:{number}:{number}" for number in range(1, 13)),
    *("map:1:1", "map:2:2", "map:3:3", "memfd:1:1", "memfd:1:0", "socket:1:1", "socket:2:2", "epoll:2:2", "event:2:2"),
    *(f"open:{number}:{number}" for number in range(4, 9)),
]
ENGINE_NEVER = ["allocate:1:0", "map:2:0", "map:3:0"]
# A store that cannot share its memory fails its setup; with less than it asks for it works.
STORE_FAILS = [
    *("thread:1:1", "thread:1:0", "allocate:2:2", "map:2:2", "memfd:2:2", "socket:1:1", "epoll:1:1", "event:1:1"),
    *("open=tidepool:1:1", "open=.lock:1:1"),
]
STORE_WORKS = [
    *("thread:2:2", "thread:2:0", "thread:3:0", "allocate:1:1", "memfd:1:1"),
    *("open=boot_id:1:1", "open=machine-id:1:1", "open=has_memory:1:1", "open=meminfo:1:1"),
]


@pytest.fixture
def start(cluster, tmp_path):
    if cluster.stock:
        pytest.skip("what runs out runs out for Tidepool")
    return real_client.starter(cluster, tmp_path)


def environment(cluster, role, case):
    make = cluster.store_environment if role == "store" else cluster.engine_environment
    return make(LD_PRELOAD=f"{SCARCE}:{cluster.preload}", SCARCE=case, TIDEPOOL_LOG="warn")


def moves(engine, number):
    keys = [f"{engine.name}-{number}-{index}" for index in range(len(SIZES))]
    assert engine.put(keys, SIZES, seed=number) == ["0"] * len(SIZES), engine.log[-2000:]
    assert engine.get(keys, SIZES, seed=number) == [f"{size} equal" for size in SIZES]


def said_well(process):
    """Little was said, nothing twice."""
    lines = [line.split("] ", 1)[1] for line in process.warnings]
    assert len(lines) <= 2 and len(set(lines)) == len(lines), lines
    return lines


def engine_with(cluster, start, store, case, attaches):
    engine = start(f"engine-{case.replace(':', '-')}", environment(cluster, "engine", case))
    moves(engine, 0)
    if attaches:

        def attached():
            return any(client["pid"] == engine.pid and client["pieces"] for client in cluster.counters(store).clients)

        status.until(attached, lambda: f"{case}: it attaches\n{engine.log[-2000:]}", 8)

        def goes_short(numbers=itertools.count(10)):
            before = cluster.counters(engine)["forward_bytes"]
            moves(engine, next(numbers))
            return cluster.counters(engine)["forward_bytes"] == before

        if case.startswith("allocate"):  # what else is short may be what its counters are asked by
            status.until(goes_short, lambda: f"{case}: it goes the short way\n{engine.log[-2000:]}", 20)
    moves(engine, 1)
    lines = said_well(engine)
    assert attaches or lines, f"{case}: nothing was said"
    assert engine.close() == 0, f"{case}\n{engine.log[-2000:]}"


def store_with(cluster, start, case, works):
    name = f"store-{case.replace(':', '-')}"
    try:
        store = start(name, environment(cluster, "store", case), 16 * MIB)
    except real_client.SetupFailed:
        store = next(process for process in cluster.processes if process.name == name)
        assert not works, f"{case}\n{store.log[-2000:]}"
        assert store.popen.wait(10) == 1, f"{case}\n{store.log[-2000:]}"
        (line,) = said_well(store)
        assert line.startswith("error: ")
        return
    assert works, case
    said_well(store)
    assert store.close() == 0


def all_of(cases, drive):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(drive, cases))


@pytest.mark.parametrize("kind", ["stock", "later", "never"])
def test_engines(cluster, start, kind):
    store = start("store", cluster.store_environment(), 512 * MIB)
    cases = {"stock": ENGINE_STOCK, "later": ENGINE_LATER, "never": ENGINE_NEVER}[kind]
    all_of(cases, lambda case: engine_with(cluster, start, store, case, kind == "later"))
    assert store.close() == 0


@pytest.mark.parametrize("works", [False, True], ids=["fails", "works"])
def test_stores(cluster, start, works):
    all_of(STORE_WORKS if works else STORE_FAILS, lambda case: store_with(cluster, start, case, works))


GPU_LATER = ["thread:3:4", "thread:5:5", *(f"allocate:{number}:{number}" for number in range(4, 17))]
GPU_NEVER = ["thread:3:0", "allocate:8:0"]


def gpu_engine_with(cluster, case, later):
    name = f"gpu-{case.replace(':', '-')}"
    more = dict(PYTHONPATH=str(ROOT / "tests" / "fakecuda"), MC_STORE_BATCHED_GET="1", MC_STORE_BATCHED_PUT="1")
    engine = cluster.process(name, {**environment(cluster, "engine", case), **more})
    cluster.set_up(engine, local_bytes=16 * MIB)

    def forwarded(number):
        """GPU memory put and got back: how much of it Mooncake's transport has moved."""
        before = cluster.counters(engine)["forward_bytes"]
        keys = [f"{name}-{number}-{index}" for index in range(4)]
        assert engine.call(actions_double.device_round, keys=keys, size=300000, seed=number), engine.log[-2000:]
        return cluster.counters(engine)["forward_bytes"] - before

    rounds = itertools.count()
    if later:
        status.until(lambda: forwarded(next(rounds)) == 0, f"{case}: GPU memory goes the short way", 30)
    else:
        assert forwarded(next(rounds)) > 0
        assert forwarded(next(rounds)) > 0 and said_well(engine), case
    assert engine.call(actions_double.mixed_round, keys=[f"{name}-a", f"{name}-b"], size=100000, seed=7)
    said_well(engine)
    assert engine.finish() == 0


@pytest.mark.parametrize("later", [True, False], ids=["later", "never"])
def test_engines_with_gpus(newest, later):
    if newest.stock:
        pytest.skip("what runs out runs out for Tidepool")
    newest.use_segments("cumem")
    newest.start_master()
    newest.store()
    all_of(GPU_LATER if later else GPU_NEVER, lambda case: gpu_engine_with(newest, case, later))
    newest.assert_no_rule_broken()


def test_a_limit_of_file_sizes(cluster, start):
    """The kernel sends SIGXFSZ where a memfd would grow beyond it."""
    with pytest.raises(real_client.SetupFailed):
        start("store", cluster.store_environment(), 64 * MIB, {resource.RLIMIT_FSIZE: 8 * MIB})
    store = cluster.processes[-1]
    assert store.popen.wait(10) == 1, store.log[-2000:]
    (line,) = store.warnings
    assert "ulimit -f" in line


def address_space(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_a_limit_of_addresses(cluster, start):
    """ulimit -v: an engine that has none for the store's memory runs as stock, and maps it when it may."""
    store = start("store", cluster.store_environment(), 768 * MIB)
    # glibc would give threads that meet each other arenas of their own, of 64 MiB and more of addresses.
    arenas = {"MALLOC_ARENA_MAX": "1"}
    plain = start("plain", arenas)
    moves(plain, 0)
    limits = {resource.RLIMIT_AS: address_space(plain.pid) + 512 * MIB}
    engine = start("engine", cluster.engine_environment(TIDEPOOL_LOG="warn", **arenas), 0, limits)
    moves(engine, 1)
    status.until(lambda: engine.warnings, "it says so", 5)
    (line,) = engine.warnings
    assert "ulimit -v" in line and "tried again" in line
    moves(engine, 2)
    before = cluster.counters(engine)
    assert before["local_write_bytes"] == before["local_read_bytes"] == 0
    resource.prlimit(engine.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    status.until_attached(cluster.directory, engine)
    before = cluster.counters(engine)
    moves(engine, 3)
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
    assert [process.close() for process in (engine, plain, store)] == [0, 0, 0]
