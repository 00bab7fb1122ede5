"""Processes that are killed, stopped or restarted: nobody else crashes or hangs, nothing is reported that is not so,
and what comes back is used again.
"""

import signal
import time

import pytest
from harness import actions_store as actions
from harness import machine, status
from harness.cluster import FORGETTING, FORGOTTEN_S, MIB, free_port
from harness.process import CallTooLong

# Its own retries to a dead store take up to a second a call.
STOCK_RETRY_S = 2.5


@pytest.fixture
def pair(cluster):
    cluster.start_master(*FORGETTING)
    cluster.store_process = cluster.store()
    cluster.engine_process = cluster.engine()
    cluster.warm(cluster.engine_process)
    return cluster


def gone(cluster, pid):
    return pid not in status.read(cluster.directory)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4096, 8 * MIB])
def test_a_store_killed_while_transfers_run(pair, size):
    engine = pair.engine_process
    running = engine.start(actions.hammer, key_prefix="a", size=size, seconds=10, seed=1)
    time.sleep(1.0)
    pair.store_process.kill()
    time.sleep(0.5)
    fresh = pair.store("fresh")
    result = running.result(40)
    assert result["lies"] == 0
    assert result["good"] > 10
    assert machine.longest_s(result) < STOCK_RETRY_S
    # The engine was not restarted, and uses the new store through shared memory.
    pair.warm(engine)
    before = pair.counters(engine)
    assert engine.call(actions.write_keys, keys=["after"], sizes=[MIB], seed=2) == [0]
    assert engine.call(actions.read_keys, keys=["after"], sizes=[MIB], seed=2) == {"results": [MIB], "wrong": []}
    pair.assert_local(engine, before, written=MIB, read=MIB)
    if not pair.stock:
        assert pair.counters(fresh)["clients_accepted"] >= 1
        assert len(pair.counters(engine).peers) == 1


def test_requests_to_a_dead_store_fail_as_mooncakes_do(pair):
    engine = pair.engine_process
    assert engine.call(actions.write_keys, keys=["old"], sizes=[MIB], seed=1) == [0]
    pair.store_process.kill()
    if not pair.stock:
        # Until then its memory is still there, with the right bytes.
        status.until(lambda: not pair.counters(engine).peers, "the engine lets go of the dead store", 2)
    start = time.monotonic()
    got = engine.call(actions.read_keys, keys=["old"], sizes=[MIB], seed=1)
    assert got["results"][0] < 0, "a read from a dead store was reported as a success"
    assert machine.ran_s(start) < STOCK_RETRY_S


def test_a_store_that_stands_still_does_not_stop_shared_memory(pair):
    if pair.stock:
        pytest.skip("stock transfers need the store's threads")
    engine = pair.engine_process
    assert engine.call(actions.write_keys, keys=["kept"], sizes=[MIB], seed=1) == [0]
    before = pair.counters(engine)
    pair.store_process.signal(signal.SIGSTOP)
    try:
        got = engine.call(actions.read_keys, keys=["kept"], sizes=[MIB], seed=1, limit_s=5)
    except CallTooLong:
        pytest.fail("a get through shared memory waits for the store's threads")
    finally:
        pair.store_process.signal(signal.SIGCONT)
    assert got == {"results": [MIB], "wrong": []}
    pair.assert_local(engine, before, read=MIB)


def test_an_engine_killed_while_transfers_run(pair):
    store, victim = pair.store_process, pair.engine_process
    other = pair.engine("other")
    pair.warm(other)
    victim.start(actions.hammer, key_prefix="v", size=8 * MIB, seconds=30, seed=1)
    running = other.start(actions.hammer, key_prefix="o", size=MIB, seconds=3, seed=2)
    time.sleep(1)
    if not pair.stock:
        assert len(pair.counters(store).clients) == 2
    victim.kill()
    if not pair.stock:
        status.until(lambda: len(pair.counters(store).clients) == 1, "the store drops its dead client", 1.0)
    result = running.result(30)
    assert result["lies"] == 0 and result["good"] == result["count"] > 0
    fresh = pair.engine("fresh")
    pair.warm(fresh)
    assert fresh.call(actions.write_keys, keys=["f"], sizes=[MIB], seed=3) == [0]
    if not pair.stock:
        left = [entry for entry in status.sockets(pair.directory)]
        assert len(left) <= 4, left


def test_an_engine_that_stands_still_costs_the_store_nothing(pair):
    other = pair.engine("other")
    pair.warm(other)
    pair.engine_process.signal(signal.SIGSTOP)
    try:
        pair.warm(pair.engine("late"))
        result = other.call(actions.hammer, key_prefix="o", size=MIB, seconds=1, seed=2)
        assert result["lies"] == 0 and result["good"] == result["count"] > 0
    finally:
        pair.engine_process.signal(signal.SIGCONT)
    assert pair.engine_process.call(actions.write_keys, keys=["x"], sizes=[MIB], seed=1) == [0]


@pytest.mark.wheels
def test_close_and_exit_are_clean(pair):
    store, engine = pair.store_process, pair.engine_process
    assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.close) == 0
    assert store.call(actions.close) == 0
    assert (engine.finish(), store.finish()) == (0, 0)
    if not pair.stock:
        import os

        assert status.names(pair.directory) == []


@pytest.mark.wheels
def test_exit_without_close_is_clean(pair):
    store, engine = pair.store_process, pair.engine_process
    assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
    assert (engine.finish(), store.finish()) == (0, 0)


@pytest.mark.slow
def test_a_store_restarted_in_the_same_directory(pair):
    """kill -9, then a new store: the dead one's entries are swept and the engine moves over."""
    engine = pair.engine_process
    for round_ in range(3):
        pair.store_process.kill()
        pair.store_process = pair.store(f"store{round_}")
        machine.sleep(FORGOTTEN_S)
        pair.warm(engine)
        before = pair.counters(engine)
        key = f"round{round_}"
        assert engine.call(actions.write_keys, keys=[key], sizes=[MIB], seed=round_) == [0]
        got = engine.call(actions.read_keys, keys=[key], sizes=[MIB], seed=round_)
        assert got == {"results": [MIB], "wrong": []}
        pair.assert_local(engine, before, written=MIB, read=MIB)
    if not pair.stock:
        stores = [path for path in status.sockets(pair.directory) if "/s-" in path]
        assert len(stores) == 1, stores


@pytest.mark.slow
def test_a_store_that_comes_back_under_its_old_name(cluster):
    """With http metadata a restarted store has the name of the old one: its memory must be the new one's."""
    http = free_port()
    cluster.start_master(
        *FORGETTING, "-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1",
        f"-http_metadata_server_port={http}",
    )
    where = {"metadata": f"http://127.0.0.1:{http}/metadata"}
    store_name, engine_name = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    environment = cluster.engine_environment(MC_DISABLE_METACACHE="1") or {"MC_DISABLE_METACACHE": "1"}
    store = cluster.store(host=store_name, **where)
    engine = cluster.engine(environment=environment, host=engine_name, **where)
    cluster.warm(engine)
    assert store.call(actions.close) == 0
    assert store.finish() == 0
    fresh = cluster.store("fresh", host=store_name, **where)
    results = [-1]
    for attempt in range(20):
        results = engine.call(actions.write_keys, keys=[f"again{attempt}"], sizes=[MIB], seed=7)
        if results == [0]:
            break
        time.sleep(0.5)
    assert results == [0]
    # What was reported as written can be read by somebody who has never known the old store.
    stock = cluster.engine("stock", environment={}, host=f"127.0.0.1:{free_port()}", **where)
    key = f"again{attempt}"
    assert stock.call(actions.read_keys, keys=[key], sizes=[MIB], seed=7) == {"results": [MIB], "wrong": []}
    cluster.warm(engine)
    if not cluster.stock:
        assert len(cluster.counters(fresh).clients) == 1
