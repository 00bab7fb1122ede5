"""Every call of the store that moves data moves the right bytes, and all of them through shared memory."""

import itertools

import pytest
from harness import actions_store as actions
from harness import status

pytestmark = pytest.mark.wheels

SIZES = [1, 7, 4095, 4096, 4097, 65537, 1 << 20, (1 << 20) + 3]
serial = itertools.count()


def round_trip(cluster, put, get, sizes, offset=0):
    engine, number = cluster.engine_process, next(serial)
    if cluster.wheel.any_version:
        missing = engine.call(actions.missing, ways=[put, get])
        if missing:
            pytest.skip(f"this version has no {', '.join(missing)}")
    seed = 1000 * number
    keys = [f"{put}-{get}-{number}-{index}" for index in range(len(sizes))]
    before = cluster.counters(engine)
    results = engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=seed, way=put, offset=offset)
    assert results == [0] * len(keys)
    got = engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=seed, way=get, offset=offset)
    assert got == {"results": sizes, "wrong": []}
    cluster.assert_local(engine, before, written=sum(sizes), read=sum(sizes))
    engine.call(actions.remove_all)


@pytest.mark.parametrize("put", sorted(actions.PUTS))
def test_put(shared, put):
    round_trip(shared, put, "batch_get_into", SIZES)


@pytest.mark.parametrize("get", sorted(actions.GETS))
def test_get(shared, get):
    round_trip(shared, "batch_put_from", get, SIZES)


@pytest.mark.parametrize("offset", [1, 63])
def test_any_alignment(shared, offset):
    round_trip(shared, "batch_put_from", "batch_get_into", SIZES, offset)


@pytest.mark.parametrize("size", [17 << 20, 40 << 20])
@pytest.mark.parametrize("get", ["get", "batch_get_into", "get_into_ranges"])
def test_objects_that_mooncake_splits(shared, size, get):
    round_trip(shared, "put_from", get, [size])


def test_other_engines_read_what_one_wrote(shared):
    """The bytes really lie in the store: a stock engine reads them over TCP."""
    engine = shared.engine_process
    sizes = [4097, 1 << 20]
    keys = ["shared-a", "shared-b"]
    assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=5) == [0, 0]
    stock = shared.engine("stock", environment={})
    got = stock.call(actions.read_keys, keys=keys, sizes=sizes, seed=5)
    assert got == {"results": sizes, "wrong": []}
    back = ["shared-c", "shared-d"]
    assert stock.call(actions.write_keys, keys=back, sizes=sizes, seed=6) == [0, 0]
    assert engine.call(actions.read_keys, keys=back, sizes=sizes, seed=6) == {"results": sizes, "wrong": []}
    assert stock.pid not in status.read(shared.directory)
