"""A Tidepool store and a stock store under one master: each byte takes the path of the store that it lies on, and one
batch may need both.
"""

import pytest
from harness import actions_store as actions
from harness.cluster import MIB

KEYS = 48
SIZES = [64 * 1024 + index for index in range(KEYS)]


@pytest.fixture
def two(cluster):
    cluster.store_process = cluster.store("store")
    cluster.stock_process = cluster.store("stock-store", environment={})
    cluster.engine_process = cluster.engine()
    cluster.warm(cluster.engine_process, stores=1, size=4096)
    return cluster


def local_bytes(cluster, keys):
    """How many bytes of these keys lie on the Tidepool store, by what the master says."""
    engine = cluster.engine_process
    name = None if cluster.stock else cluster.counters(cluster.store_process).name
    total = 0
    for key in keys:
        for place in engine.call(actions.replicas, key=key):
            total += place["size"] if place["transport_endpoint"] == name else 0
    return total


def test_a_batch_over_both(two):
    engine = two.engine_process
    keys = [f"both-{index}" for index in range(KEYS)]
    before = two.counters(engine)
    assert engine.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1) == [0] * KEYS
    written = two.counters(engine)
    got = engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1)
    assert got == {"results": SIZES, "wrong": []}
    read = two.counters(engine)
    if not two.stock:
        local = local_bytes(two, keys)
        assert 0 < local < sum(SIZES), "the master has put all keys on one store"
        assert written["local_write_bytes"] - before["local_write_bytes"] == local
        assert written["forward_bytes"] - before["forward_bytes"] == sum(SIZES) - local
        assert read["local_read_bytes"] - written["local_read_bytes"] == local
        assert read["forward_bytes"] - written["forward_bytes"] == sum(SIZES) - local


def test_two_replicas_one_on_each(two):
    engine = two.engine_process
    keys = [f"twice-{index}" for index in range(8)]
    sizes = [MIB + index for index in range(8)]
    before = two.counters(engine)
    assert engine.call(actions.write_replicated, keys=keys, sizes=sizes, seed=3, replica_num=2) == [0] * 8
    after = two.counters(engine)
    if not two.stock:
        assert after["local_write_bytes"] - before["local_write_bytes"] == sum(sizes)
        assert after["forward_bytes"] - before["forward_bytes"] == sum(sizes)
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=3) == {"results": sizes, "wrong": []}
    stock = two.engine("stock-engine", environment={})
    assert stock.call(actions.read_keys, keys=keys, sizes=sizes, seed=3) == {"results": sizes, "wrong": []}


@pytest.mark.parametrize("way", ["get_into_ranges", "get_session"])
def test_scattered_reads_over_both(two, way):
    engine = two.engine_process
    keys = [f"scattered-{index}" for index in range(KEYS)]
    assert engine.call(actions.write_keys, keys=keys, sizes=SIZES, seed=4) == [0] * KEYS
    got = engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=4, way=way)
    assert got == {"results": SIZES, "wrong": []}


def test_two_replicas_on_two_tidepool_stores(cluster):
    cluster.store("one")
    cluster.store("two")
    engine = cluster.engine()
    cluster.warm(engine, stores=2)
    keys = [f"twice-{index}" for index in range(8)]
    sizes = [MIB + index for index in range(8)]
    before = cluster.counters(engine)
    assert engine.call(actions.write_replicated, keys=keys, sizes=sizes, seed=3, replica_num=2) == [0] * 8
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=3) == {"results": sizes, "wrong": []}
    cluster.assert_local(engine, before, written=2 * sum(sizes), read=sum(sizes))
