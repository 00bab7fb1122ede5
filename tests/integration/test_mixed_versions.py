"""A store of one version of Mooncake and an engine of another, as while a cluster is upgraded: Mooncake lets them talk, and
Tidepool measures each side by itself."""

import pytest
from conftest import usable
from harness import actions_store as actions
from harness import wheels
from harness.cluster import MIB, Cluster

pytestmark = [pytest.mark.stores, pytest.mark.timeout(60)]

SIZES = [8, 65536, 3 * MIB, 20 * MIB]
WAYS = {
    "batch_put_from": "batch_get_into",
    "put": "get",
    "batch_put_from_multi_buffers": "batch_get_into_multi_buffers",
    "put_from": "get_into_ranges",
}


@pytest.mark.parametrize("older", ["store", "engine"])
def test_versions_that_differ(tmp_path, request, older):
    old, new = usable(wheels.CPU), usable(wheels.CUDA13)
    with Cluster(old, tmp_path, stock=request.config.getoption("--stock")) as cluster:
        cluster.start_master()
        cluster.wheel = old if older == "store" else new
        store = cluster.store()
        cluster.wheel = new if older == "store" else old
        engine = cluster.engine()
        cluster.warm(engine)
        before = cluster.counters(engine)
        for put, get in WAYS.items():
            keys = [f"{put}-{index}" for index in range(len(SIZES))]
            assert set(engine.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1, way=put)) == {0}
            got = engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1, way=get)
            assert got == {"results": SIZES, "wrong": []}, put
        cluster.assert_local(engine, before, written=len(WAYS) * sum(SIZES), read=len(WAYS) * sum(SIZES))
        assert engine.warnings == store.warnings == []
        assert (engine.finish(), store.finish()) == (0, 0)
