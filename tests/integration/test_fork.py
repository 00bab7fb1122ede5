"""Processes that fork: the child holds nothing of its parent's, and the parent goes on."""

import os

import pytest
from harness import actions_process as process_actions
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB


def works(cluster, engine, key):
    before = cluster.counters(engine)
    assert engine.call(actions.write_keys, keys=[key], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.read_keys, keys=[key], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
    cluster.assert_local(engine, before, written=MIB, read=MIB)


def test_before_the_first_use(cluster):
    cluster.store()
    engine = cluster.process("engine", cluster.engine_environment())
    assert engine.call(process_actions.fork_and_exit) == 7
    assert engine.call(process_actions.multiprocessing_fork) == [1, 2, 3]
    cluster.set_up(engine, segment_bytes=0, local_bytes=64 * MIB)
    cluster.warm(engine)
    works(cluster, engine, "k")


def test_while_in_use(shared):
    engine, store = shared.engine_process, shared.store_process
    for process in (engine, store):
        assert process.call(process_actions.fork_and_exit) == 7
        assert process.call(process_actions.multiprocessing_fork) == [1, 2, 3]
        assert process.call(process_actions.run_subprocess) == "42"
        child = process.call(process_actions.fork_and_look)
        assert child["code"] == 0 and child["threads"] == 1
        if not shared.stock:
            assert child["tidepool_sockets"] == 0
    works(shared, engine, "after-forks")


@pytest.mark.parametrize("role", ["store", "engine"])
def test_a_child_does_not_keep_its_dead_parents_lease(cluster, role):
    if cluster.stock:
        pytest.skip("there is no lease")
    store = cluster.store()
    engine = cluster.engine()
    cluster.warm(engine)
    parent, other = (store, engine) if role == "store" else (engine, store)
    child = parent.call(process_actions.fork_and_stay)
    try:
        parent.kill()
        attached = (lambda: cluster.counters(other).peers) if role == "store" else (lambda: cluster.counters(other).clients)
        status.until(lambda: not attached(), f"the {role}'s lease ends with the {role}, not with its child", 1.5)
    finally:
        os.kill(child, 9)
