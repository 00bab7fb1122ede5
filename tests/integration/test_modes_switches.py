"""The engine's switches: device_copy=false leaves exactly GPU memory to Mooncake, enable=false leaves everything, and the
process as it was."""

import pytest
from harness import actions_double, actions_process, status
from harness import actions_store as actions
from harness.cluster import MIB
from harness.wheels import ROOT

pytestmark = pytest.mark.stores

COUNT, SIZE = 8, 256 << 10
BYTES = COUNT * SIZE


def keys(name):
    return [f"{name}{index}" for index in range(COUNT)]


@pytest.mark.parametrize("where", ["memfd", "cumem"])
def test_device_copy_false(newest, where):
    newest.double = True
    newest.use_segments(where)
    newest.store(segment_bytes=128 * MIB)
    shm = {"enable": True, "socket_dir": newest.directory, "device_copy": False}
    environment = {**newest.engine_environment({"transports": {"shm": shm}}), "PYTHONPATH": str(ROOT / "tests" / "fakecuda")}
    engine = newest.engine(environment=environment)
    newest.warm(engine)

    before = newest.counters(engine)
    assert engine.call(actions_double.device_round, keys=keys("gpu"), size=SIZE, seed=1)
    after = newest.counters(engine)
    if not newest.stock:
        assert after["forward_bytes"] - before["forward_bytes"] == 2 * BYTES
        assert after["fallback_device_memory"] - before["fallback_device_memory"] == 2 * COUNT
        assert after["local_requests"] == before["local_requests"]
        assert after["dma_bytes"] == after["kernel_bytes"] == 0

    before = after
    assert engine.call(actions.write_keys, keys=keys("host"), sizes=[SIZE] * COUNT, seed=2) == [0] * COUNT
    got = engine.call(actions.read_keys, keys=keys("host"), sizes=[SIZE] * COUNT, seed=2)
    assert got == {"results": [SIZE] * COUNT, "wrong": []}
    newest.assert_local(engine, before, written=BYTES, read=BYTES)

    before = newest.counters(engine)
    assert engine.call(actions_double.mixed_round, keys=keys("both"), size=SIZE, seed=3)
    after = newest.counters(engine)
    if not newest.stock:
        assert after["local_write_bytes"] - before["local_write_bytes"] == BYTES
        assert after["local_read_bytes"] - before["local_read_bytes"] == BYTES
        assert after["forward_bytes"] - before["forward_bytes"] == 2 * BYTES
        assert after["mixed_batches"] - before["mixed_batches"] == 2 * COUNT
        assert after["copy_failed"] == 0
    newest.assert_no_rule_broken()


@pytest.mark.wheels
def test_enable_false(cluster):
    """Beside a store that could serve it: no socket, no thread, no page of counters, nobody who asks the store."""
    store = cluster.store()
    shm = {"enable": False, "socket_dir": cluster.directory}
    engine = cluster.engine(environment=cluster.engine_environment({"transports": {"shm": shm}}))
    plain = cluster.engine("plain", environment={})
    for process in (engine, plain):
        name = process.name
        assert process.call(actions.write_keys, keys=keys(name), sizes=[SIZE] * COUNT, seed=4) == [0] * COUNT
        got = process.call(actions.read_keys, keys=keys(name), sizes=[SIZE] * COUNT, seed=4)
        assert got == {"results": [SIZE] * COUNT, "wrong": []}
    assert engine.call(actions_process.tidepool_sockets) == 0
    assert not [link for link in engine.call(actions_process.fds).values() if "memfd" in link]
    assert not [name for name in engine.call(actions_process.threads) if name.startswith("tp-")]
    assert engine.tidepool_lines == []
    if not cluster.stock:
        assert list(status.read(cluster.directory)) == [store.pid]
        assert cluster.counters(store)["clients_accepted"] == 0
    mapped = [set(process.call(actions_process.mapped_files)) for process in (engine, plain)]
    assert not [name for name in mapped[0] - mapped[1] if "memfd" in name]
