"""Many of everything: blocks in a batch, keys, clients."""

import os

import pytest
from harness import status
from harness import actions_store as actions
from harness.cluster import MIB


@pytest.mark.wheels
@pytest.mark.timeout(120)
@pytest.mark.parametrize("keys, blocks, block_bytes", [(4096, 1, 64 << 10), (512, 160, 4096), (64, 61, 65536 + 64)])
def test_every_key_of_a_large_batch_succeeds(shared, keys, blocks, block_bytes):
    if shared.stock:
        pytest.skip("stock Mooncake fails keys of such batches")
    engine = shared.engine_process
    before = shared.counters(engine)
    got = engine.call(
        actions.many_blocks, limit_s=90, prefix=f"many-{keys}-", keys=keys, blocks=blocks, block_bytes=block_bytes, seed=keys
    )
    assert got == {"put_failed": 0, "get_failed": 0, "equal": True}
    total = keys * blocks * block_bytes
    shared.assert_local(engine, before, written=total, read=total)
    engine.call(actions.remove_all)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_100000_keys_leave_fds_and_sockets_as_they_were(cluster):
    store = cluster.store(segment_bytes=512 * MIB)
    engine = cluster.engine()
    cluster.warm(engine)
    assert engine.call(actions.small_objects, prefix="first-", count=2000, size=1024, seed=1) == 0
    before = {process: len(os.listdir(f"/proc/{process.pid}/fd")) for process in (store, engine)}
    threads = {process: len(os.listdir(f"/proc/{process.pid}/task")) for process in (store, engine)}
    wrong = engine.call(actions.small_objects, limit_s=150, prefix="key-", count=100_000, size=1024, seed=2)
    assert wrong == 0
    after = {process: len(os.listdir(f"/proc/{process.pid}/fd")) for process in (store, engine)}
    for process in (store, engine):
        assert abs(after[process] - before[process]) <= 4, f"{process.name}: {before[process]} fds became {after[process]}"
        assert len(os.listdir(f"/proc/{process.pid}/task")) <= threads[process] + 4


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_16_clients_started_at_once(cluster):
    store = cluster.store(segment_bytes=768 * MIB)
    engines = [cluster.process(f"engine{index}", cluster.engine_environment()) for index in range(16)]
    pending = [
        engine.start(actions.setup, master=cluster.master_address, local_bytes=16 * MIB) for engine in engines
    ]
    assert [call.result(90) for call in pending] == [0] * 16
    sizes = [MIB + 7, 65536, 5]
    pending = [
        engine.start(actions.write_keys, keys=[f"{n}-{i}" for i in range(3)], sizes=sizes, seed=10 * n)
        for n, engine in enumerate(engines)
    ]
    assert [call.result(60) for call in pending] == [[0, 0, 0]] * 16
    # Each reads what another wrote.
    pending = [
        engine.start(actions.read_keys, keys=[f"{(n + 5) % 16}-{i}" for i in range(3)], sizes=sizes, seed=10 * ((n + 5) % 16))
        for n, engine in enumerate(engines)
    ]
    assert [call.result(60) for call in pending] == [{"results": sizes, "wrong": []}] * 16
    if not cluster.stock:
        for engine in engines:
            status.until_attached(cluster.directory, engine)
        assert len(cluster.counters(store).clients) == 16
        before = [cluster.counters(engine) for engine in engines]
        pending = [
            engine.start(actions.read_keys, keys=[f"{n}-0"], sizes=sizes[:1], seed=10 * n)
            for n, engine in enumerate(engines)
        ]
        assert [call.result(60)["wrong"] for call in pending] == [[]] * 16
        for engine, then in zip(engines, before):
            cluster.assert_local(engine, then, read=sizes[0])
