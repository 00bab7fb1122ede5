"""A process with several clients shares its memory under the right name, and says what it cannot share."""

import pytest
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB

SIZES = [1, 65537, 3 * MIB]


def read_from_outside(cluster, process, engine, key):
    """What `process` has put into its own store is read by another process through shared memory."""
    keys = [f"{key}-{size}" for size in SIZES]
    assert process.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1) == [0, 0, 0]
    before = cluster.counters(engine)
    assert engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}
    return before


@pytest.mark.parametrize("order", ["client-last", "client-first"])
def test_a_store_and_a_client_in_one_process(cluster, order):
    cluster.start_master()
    process = cluster.process("store", cluster.store_environment())
    if order == "client-first":
        cluster.set_up(process, local_bytes=16 * MIB)
        process.call(actions.set_aside)
    cluster.set_up(process, segment_bytes=128 * MIB, local_bytes=16 * MIB)
    if order == "client-last":
        process.call(actions.set_aside)
        cluster.set_up(process, local_bytes=16 * MIB)
    engine = cluster.engine()
    cluster.warm(engine)
    before = read_from_outside(cluster, process, engine, order)
    cluster.assert_local(engine, before, read=sum(SIZES))


def test_two_stores_in_one_process(cluster):
    """One of them has the name; when it closes, the other one gets it."""
    if cluster.stock:
        pytest.skip("Tidepool's names")
    cluster.start_master()
    process = cluster.process("store", cluster.store_environment())
    cluster.set_up(process, segment_bytes=64 * MIB, local_bytes=16 * MIB)
    first = cluster.counters(process).name
    process.call(actions.set_aside)
    cluster.set_up(process, segment_bytes=64 * MIB, local_bytes=16 * MIB)
    assert len([line for line in process.tidepool_lines if "several stores" in line]) == 1
    engine = cluster.engine()

    def known():
        return [peer["name"] for peer in cluster.counters(engine).peers]

    status.until(lambda: len(known()) == 1, known)
    assert known() != [first]
    assert process.call(actions.close) == 0
    status.until(lambda: known() == [first], known)
    process.call(actions.take_back)
    before = read_from_outside(cluster, process, engine, "left")
    cluster.assert_local(engine, before, read=sum(SIZES))
    assert (process.call(actions.close), engine.call(actions.close)) == (0, 0)
    assert (process.finish(), engine.finish()) == (0, 0)
