"""mooncake_client as a store: a program that exports none of Mooncake's symbols."""

import pytest
from harness import actions_store as actions
from harness.cluster import MIB

pytestmark = pytest.mark.stores

SIZES = [1, 4096, 65537, 3 * MIB, 17 * MIB]
KEYS = [f"key{index}" for index in range(len(SIZES))]


@pytest.mark.wheels
def test_bytes_go_the_short_way(cluster):
    store = cluster.client()
    engine = cluster.engine()
    cluster.warm(engine)
    before = cluster.counters(engine)
    assert engine.call(actions.write_keys, keys=KEYS, sizes=SIZES, seed=1) == [0] * len(KEYS)
    assert engine.call(actions.read_keys, keys=KEYS, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
    print(store.log)
