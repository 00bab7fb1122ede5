"""mooncake.engine, the transfer engine alone: its transfers with a Tidepool store's memory are shared memory, and
those with memory that is not a store's are Mooncake's.
"""

import pytest
from harness import actions_engine as actions
from harness import actions_store as store_actions
from harness import status
from harness.cluster import MIB

pytestmark = pytest.mark.wheels

SIZE = 3 * MIB + 5
WRITES = ["sync", "submit", "batch_sync", "batch_async", "notify"]
READS = ["sync", "batch_sync", "batch_async"]


@pytest.fixture(scope="module")
def target(shared):
    """An object of the store, as a place to write to: its endpoint and address."""
    client = shared.engine_process
    assert client.call(store_actions.write_keys, keys=["target"], sizes=[SIZE], seed=1) == [0]
    (place,) = client.call(store_actions.replicas, key="target")
    engine, _ = shared.transfer_engine("transfer-engine")
    engine.call(actions.register, name="buffer", size=SIZE, seed=2)
    endpoint, address = place["transport_endpoint"], place["buffer_address"]
    assert engine.call(actions.transfer, way="sync", target=endpoint, name="buffer", address=address, size=16) == 0
    if not shared.stock:
        status.until_attached(shared.directory, engine)
    return engine, endpoint, address


def object_is(shared, seed):
    got = shared.engine_process.call(store_actions.read_keys, keys=["target"], sizes=[SIZE], seed=seed)
    return got == {"results": [SIZE], "wrong": []}


@pytest.mark.parametrize("way", WRITES)
def test_write_to_a_store(shared, target, way):
    engine, endpoint, address = target
    seed = 100 + WRITES.index(way)
    engine.call(actions.register, name=way, size=SIZE, seed=seed)
    before = shared.counters(engine)
    assert engine.call(actions.transfer, way=way, target=endpoint, name=way, address=address, size=SIZE) == 0
    shared.assert_local(engine, before, written=SIZE)
    assert object_is(shared, seed)


@pytest.mark.parametrize("way", READS)
def test_read_from_a_store(shared, target, way):
    engine, endpoint, address = target
    seed = 200 + READS.index(way)
    engine.call(actions.register, name="source", size=SIZE, seed=seed)
    assert engine.call(actions.transfer, way="sync", target=endpoint, name="source", address=address, size=SIZE) == 0
    engine.call(actions.register, name="sink", size=SIZE)
    before = shared.counters(engine)
    result = engine.call(actions.transfer, way=way, target=endpoint, name="sink", address=address, size=SIZE, write=False)
    assert result == 0
    shared.assert_local(engine, before, read=SIZE)
    assert engine.call(actions.holds, name="sink", seed=seed)


@pytest.mark.parametrize("way", ["sync", "batch_sync"])
def test_memory_that_is_no_stores_goes_to_mooncake(shared, way):
    one, _ = shared.transfer_engine(f"one-{way}")
    other, name = shared.transfer_engine(f"other-{way}", environment=shared.both_environment())
    address = other.call(actions.register, name="there", size=SIZE)
    one.call(actions.register, name="here", size=SIZE, seed=9)
    before = shared.counters(one)
    assert one.call(actions.transfer, way=way, target=name, name="here", address=address, size=SIZE) == 0
    assert other.call(actions.holds, name="there", seed=9)
    one.call(actions.register, name="back", size=SIZE)
    assert one.call(actions.transfer, way=way, target=name, name="back", address=address, size=SIZE, write=False) == 0
    assert one.call(actions.holds, name="back", seed=9)
    if not shared.stock:
        after = shared.counters(one)
        assert after["forward_bytes"] - before["forward_bytes"] == 2 * SIZE
        assert after["local_requests"] == before["local_requests"]
