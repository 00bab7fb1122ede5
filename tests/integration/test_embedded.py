"""Engines that lend their own memory: each process is store and engine at once."""

from harness import actions_store as actions
from harness import status
from harness.cluster import MIB

SIZES = [64 * 1024 + 3 * index for index in range(64)]


def embedded(cluster, name):
    made = cluster.process(name, cluster.both_environment())
    cluster.set_up(made, segment_bytes=256 * MIB, local_bytes=64 * MIB)
    return made


def test_two_processes_that_are_both(cluster):
    cluster.start_master()
    one, two = embedded(cluster, "one"), embedded(cluster, "two")
    for process in (one, two):
        keys = [f"warm-{process.name}-{index}" for index in range(16)]
        assert process.call(actions.write_keys, keys=keys, sizes=[4096] * 16, seed=1) == [0] * 16
    if not cluster.stock:
        status.until_attached(cluster.directory, one)
        status.until_attached(cluster.directory, two)
    before = {process: cluster.counters(process) for process in (one, two)}
    for seed, writer, reader in ((10, one, two), (20, two, one)):
        keys = [f"{writer.name}-{index}" for index in range(len(SIZES))]
        assert writer.call(actions.write_keys, keys=keys, sizes=SIZES, seed=seed) == [0] * len(SIZES)
        for process in (reader, writer):
            got = process.call(actions.read_keys, keys=keys, sizes=SIZES, seed=seed)
            assert got == {"results": SIZES, "wrong": []}
    if not cluster.stock:
        for process in (one, two):
            after = cluster.counters(process)
            assert after.roles == 3
            # Mooncake copies what lies in a process's own segment by itself, without a transfer.
            assert after["local_write_bytes"] > before[process]["local_write_bytes"]
            assert after["local_read_bytes"] > before[process]["local_read_bytes"]
            assert after["forward_bytes"] == before[process]["forward_bytes"]
    for process in (one, two):
        assert process.call(actions.close) == 0
    assert [process.finish() for process in (one, two)] == [0, 0]
