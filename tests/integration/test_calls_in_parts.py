"""Large batched calls are carried out in parts by several threads, and do what the stock wheel does with the same calls."""

import itertools
import threading

import pytest
from harness import actions_parts as parts
from harness import actions_process

pytestmark = pytest.mark.wheels

COUNT = 64
SIZE = 288 << 10  # 18 MiB a call: two parts
SIZES = [SIZE] * COUNT
BATCHED = {"MC_STORE_BATCHED_GET": "1", "MC_STORE_BATCHED_PUT": "1"}
serial = itertools.count()
# All fields of ReplicateConfig that 0.3.13 and 0.3.14 have. What concerns several keys at once is in NOT_ALONE.
KNOWN_FIELDS = {
    "replica_num", "nof_replica_num", "dfs_replica_num", "soft_pin_action", "soft_pin_ttl_ms", "with_hard_pin", "data_type",
    "preferred_segment", "preferred_segments", "preferred_nof_segments", "preferred_hca_names",
}  # fmt: skip
OF_KEYS = [f"of-{index % 5}" for index in range(COUNT)]
NOT_ALONE = {
    "group_ids": OF_KEYS,
    "session_ids": OF_KEYS,
    "residency_affinity_ids": OF_KEYS,
    "per_key_preferred_hca_names": [[name] for name in OF_KEYS],
    "prefer_alloc_in_same_node": True,
}


@pytest.fixture(scope="module")
def engines(wheel, shared):
    """One that divides its calls, and one of the stock wheel, on the same store."""
    if shared.stock:
        pytest.skip("stock divides nothing")
    divided = shared.engine("divided", environment=shared.engine_environment(TIDEPOOL_CALL_THREADS="4", **BATCHED))
    shared.warm(divided)
    return divided, shared.engine("stock", environment={})


def names(prefix):
    number = next(serial)
    return [f"{prefix}-{number}-{index}" for index in range(COUNT)]


def calls_divided(cluster, engine):
    return cluster.counters(engine)["calls_divided"]


def threads_of(engine):
    return engine.call(actions_process.threads).count("tp-call")


def batch(engine, way, keys, sizes=SIZES, **more):
    return engine.call(parts.batch, way=way, keys=keys, sizes=sizes, room=SIZE, **more)


@pytest.mark.parametrize("put, get", list(zip(parts.PUTS, parts.GETS)))
def test_bytes_and_results(shared, engines, put, get):
    divided, stock = engines
    keys = names("bytes")
    before = shared.counters(divided)
    wrote = batch(divided, put, keys, seed=3)
    assert wrote["results"] == [0] * COUNT
    for engine in engines:
        got = batch(engine, get, keys)
        assert got["results"] == SIZES and got["sums"] == wrote["sums"], engine.name
    shared.assert_local(divided, before, written=COUNT * SIZE, read=COUNT * SIZE)
    assert calls_divided(shared, divided) == before["calls_divided"] + 2
    assert 1 <= threads_of(divided) <= 3
    # Again: they are there already.
    assert batch(divided, put, keys, seed=3)["results"] == batch(stock, put, keys, seed=3)["results"]


@pytest.mark.parametrize("get", parts.GETS)
def test_keys_with_results_of_their_own(shared, engines, get):
    """Missing keys, buffers too small and sizes of 0, on both sides of where calls are divided."""
    divided, stock = engines
    keys = names("odd")
    wrote = batch(stock, "batch_put_from", keys, seed=5)["results"]
    assert wrote == [0] * COUNT
    asked, sizes = list(keys), list(SIZES)
    for index in (0, 7, 8, 31, 63):
        asked[index] += "-missing"
    for index in (1, 20, 32, 62):
        sizes[index] -= 1
    for index in (2, 33):
        sizes[index] = 0
    before = calls_divided(shared, divided)
    mine, theirs = (batch(engine, get, asked, sizes) for engine in engines)
    assert mine == theirs
    assert sorted({result for result in mine["results"] if result < 0}) != []
    assert mine["results"].count(SIZE) == COUNT - 11
    assert calls_divided(shared, divided) == before + 1


@pytest.mark.parametrize("put", parts.PUTS)
def test_puts_of_nothing(shared, engines, put):
    sizes = list(SIZES)
    sizes[5] = sizes[40] = 0
    before = calls_divided(shared, engines[0])
    mine, theirs = (batch(engine, put, names("nothing"), sizes, seed=6)["results"] for engine in engines)
    assert mine == theirs and mine.count(0) >= COUNT - 2
    assert calls_divided(shared, engines[0]) == before + 1


def test_what_concerns_several_keys_stays_whole(shared, engines):
    divided = engines[0]
    before = calls_divided(shared, divided)
    known = set(divided.call(parts.config_fields)[0])
    for field, put in zip(sorted(known & set(NOT_ALONE)), itertools.cycle(parts.PUTS)):
        fields = {field: NOT_ALONE[field]}
        mine, theirs = (batch(engine, put, names(field), seed=8, fields=fields)["results"] for engine in engines)
        assert mine == theirs, field
    assert calls_divided(shared, divided) == before
    batch(divided, "batch_put_from", names("alone"), seed=8, fields={"preferred_segment": "none", "with_hard_pin": False})
    assert calls_divided(shared, divided) == before + 1


def test_a_key_twice_stays_whole(shared, engines):
    """The later of the two is what a put stores."""
    divided, stock = engines
    before = calls_divided(shared, divided)
    got = []
    for engine in engines:
        keys = names("twice")
        keys[50] = keys[3]
        put = batch(engine, "batch_put_from", keys, seed=9)
        stored = batch(stock, "batch_get_into", keys)["sums"][50]
        got.append((put["results"], stored == put["sums"][50]))
    assert got[0] == got[1]
    assert calls_divided(shared, divided) == before


@pytest.mark.parametrize("uneven", [0, COUNT // 2, COUNT - 1])
def test_arguments_that_fail_a_whole_call(shared, engines, uneven):
    """One key with a buffer more than sizes, and Mooncake stores none of them."""
    divided, stock = engines
    before = calls_divided(shared, divided)
    put = parts.PUTS[1]
    mine, theirs = (batch(engine, put, names("uneven"), seed=12, uneven=uneven)["results"] for engine in engines)
    assert mine == theirs and 0 not in mine
    assert calls_divided(shared, divided) == before


def test_no_field_that_is_not_known(shared, engines):
    """A field that a new Mooncake adds may concern several keys: see keys_are_alone in shim/hooks_batch.c."""
    fields, room = engines[1].call(parts.config_fields)
    assert set(fields) <= KNOWN_FIELDS | set(NOT_ALONE)
    size = 336 if "session_ids" in fields else 208
    assert size <= room <= size + 24


def test_several_callers(shared, engines):
    before = shared.counters(engines[0])
    assert engines[0].call(parts.at_once, prefix="callers", threads=4, rounds=2, count=COUNT, size=SIZE) == []
    shared.assert_local(engines[0], before, written=8 * COUNT * SIZE, read=8 * COUNT * SIZE)
    assert calls_divided(shared, engines[0]) > before["calls_divided"]


def test_only_when_asked_for(shared, engines):
    one = shared.engine("one", environment=shared.engine_environment(TIDEPOOL_CALL_THREADS="1", **BATCHED))
    for engine in (one, shared.engine_process):
        keys = names(engine.name)
        wrote = batch(engine, "batch_put_from", keys, seed=10)
        assert batch(engine, "batch_get_into", keys)["sums"] == wrote["sums"]
        assert calls_divided(shared, engine) == 0 and threads_of(engine) == 0


def test_a_store_that_dies(newest):
    """Every key of the call that it dies in has a result, and so have those after it."""
    if newest.stock:
        pytest.skip("stock divides nothing")
    store = newest.store(segment_bytes=512 << 20)
    engine = newest.engine("divided", environment=newest.engine_environment(TIDEPOOL_CALL_THREADS="4", **BATCHED))
    newest.warm(engine)
    threading.Timer(0.5, store.kill).start()
    results, calls = engine.call(parts.put_until_failure, prefix="dying", count=COUNT, size=SIZE, limit=10000)
    assert store.ended() and len(results) == COUNT and all(result <= 0 for result in results), calls
    after = batch(engine, "batch_put_from", names("after"), seed=11)["results"]
    assert len(after) == COUNT and all(result < 0 for result in after)
    assert calls_divided(newest, engine) == calls + 1
