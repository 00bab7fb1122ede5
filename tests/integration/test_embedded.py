"""Engines that lend their own memory: each process is store and engine at once. What lies in another process goes the short
way, what lies in its own Mooncake copies by itself, and nobody depends on anybody else's life."""

import time

import pytest
from harness import actions_double, machine, mounts, status
from harness import actions_store as actions
from harness.cluster import FORGETTING, FORGOTTEN_S, MIB
from harness.wheels import ROOT

pytestmark = pytest.mark.stores

SIZES = [1, 4096, 65537] + [64 * 1024 + 3 * index for index in range(24)] + [3 * MIB, 17 * MIB]
# The master gives out a dead process's memory until it has forgotten it.
STOCK_RETRY_S = 2.5


def embedded(cluster, name, **extra):
    made = cluster.process(name, cluster.both_environment(**extra) if not cluster.stock else extra)
    cluster.set_up(made, segment_bytes=128 * MIB, local_bytes=64 * MIB)
    return made


def attach(cluster, process, others):
    keys = [f"warm-{process.name}-{index}" for index in range(16 * others)]
    assert process.call(actions.write_keys, keys=keys, sizes=[4096] * len(keys), seed=1) == [0] * len(keys)
    if not cluster.stock:
        status.until_attached(cluster.directory, process, others + 1)  # itself as well


def others_of(cluster, process):
    """The names of the processes whose memory this one has mapped, without itself."""
    found = cluster.counters(process)
    return sorted(peer["name"] for peer in found.peers if peer["name"] != found.name)


def away(cluster, process, keys, sizes):
    """How many of these bytes lie in another process's memory."""
    name = cluster.counters(process).name
    found = process.call(actions.endpoints, keys=keys)
    assert set(map(len, found)) == {1}
    return sum(size for size, where in zip(sizes, found) if where != [name])


def exchange(cluster, processes, seed, own_moves=False):
    """Each puts, all get everything. With `own_moves`, what lies in a process's own memory is a transfer like all others."""
    for number, writer in enumerate(processes):
        keys = [f"{seed}-{writer.name}-{index}" for index in range(len(SIZES))]
        before = {process: cluster.counters(process) for process in processes}
        assert writer.call(actions.write_keys, keys=keys, sizes=SIZES, seed=seed + number) == [0] * len(SIZES)
        for process in processes:
            got = process.call(actions.read_keys, keys=keys, sizes=SIZES, seed=seed + number)
            assert got == {"results": SIZES, "wrong": []}
        for process in [] if cluster.stock else processes:
            bytes_ = sum(SIZES) if own_moves else away(cluster, process, keys, SIZES)
            cluster.assert_local(process, before[process], written=bytes_ if process is writer else 0, read=bytes_)
            assert bytes_ > 0, "nothing lies elsewhere: the test shows nothing"


@pytest.mark.wheels
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_three_that_lend_to_each_other(cluster, mode):
    cluster.use_segments(mode)
    cluster.start_master()
    processes = [embedded(cluster, name) for name in ("one", "two", "three")]
    for process in processes:
        attach(cluster, process, 2)
    exchange(cluster, processes, seed=100)
    if not cluster.stock:
        assert [cluster.counters(process).roles for process in processes] == [3, 3, 3]
    assert [process.call(actions.close) for process in processes] == [0, 0, 0]
    assert [process.finish() for process in processes] == [0, 0, 0]
    cluster.assert_no_rule_broken()
    assert status.names(cluster.directory) == []


@pytest.mark.parametrize("mode", ["memfd", "tmpfs", "hugetlbfs"])
def test_without_mooncakes_own_copies(cluster, mode):
    """MC_STORE_MEMCPY=0: what lies in the process's own memory is a transfer too, to itself."""
    with mounts.segment_folder(mode, 256) as where:
        cluster.use_segments(where)
        cluster.start_master()
        processes = [embedded(cluster, name, MC_STORE_MEMCPY="0") for name in ("one", "two")]
        for process in processes:
            attach(cluster, process, 1)
        exchange(cluster, processes, seed=1, own_moves=True)
        assert [process.call(actions.close) for process in processes] == [0, 0]
        assert [process.finish() for process in processes] == [0, 0]


@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_what_gpus_put_into_their_own_process(newest, mode):
    """Mooncake copies that by itself, from and to addresses that a GPU has to reach; the rest is Tidepool's."""
    newest.double = True
    newest.use_segments(mode)
    newest.start_master()
    processes = [embedded(newest, name, PYTHONPATH=str(ROOT / "tests" / "fakecuda")) for name in ("one", "two")]
    for process in processes:
        attach(newest, process, 1)
    for process in processes:
        keys = [f"{process.name}{index}" for index in range(24)]
        # The first finds GPUs that nobody has used before.
        for name in ("first", "second"):
            assert process.call(actions_double.device_round, keys=[f"{name}-{key}" for key in keys], size=MIB, seed=1)
            found = process.call(actions.endpoints, keys=[f"{name}-{key}" for key in keys])
            assert len({where for (where,) in found}) == 2, "they all lie in one process: the test shows nothing"
        if not newest.stock:
            assert newest.counters(process)["dma_bytes"] > 0
            assert process.warnings == []
    assert [process.call(actions.close) for process in processes] == [0, 0]
    assert [process.finish() for process in processes] == [0, 0]
    newest.assert_no_rule_broken()


def test_a_gpu_whose_memory_was_never_registered(newest):
    """Mooncake copies such memory from and to its own process's segment; a GPU in use is noticed within a second or two."""
    newest.double = True
    newest.use_segments("cumem")
    newest.start_master()
    one = embedded(newest, "one", PYTHONPATH=str(ROOT / "tests" / "fakecuda"))
    number = iter(range(1000))

    def right():
        name = next(number)
        return one.call(actions_double.device_round, keys=[f"{name}-{i}" for i in range(3)], size=MIB, seed=name, register=False)

    status.until(right, "a put and a get of GPU memory", 5)
    assert all(right() for _ in range(3))
    assert (one.call(actions.close), one.finish()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_one_is_killed_while_the_others_work_and_comes_back(cluster, mode):
    cluster.use_segments(mode)
    cluster.start_master(*FORGETTING)
    one, two, three = processes = [embedded(cluster, name) for name in ("one", "two", "three")]
    for process in processes:
        attach(cluster, process, 2)
    running = {
        process: process.start(actions.hammer, key_prefix=process.name, size=MIB, seconds=9, seed=1) for process in (one, three)
    }
    two.start(actions.hammer, key_prefix="two", size=MIB, seconds=30, seed=1)
    time.sleep(1)
    two.kill()
    died = time.monotonic()
    if not cluster.stock:
        for process in (one, three):
            status.until(lambda: len(others_of(cluster, process)) == 1, f"{process.name} lets go of the dead one", 1.0)
    for process, call in running.items():
        result = call.result(30)
        assert result["lies"] == 0 and result["last_good"] and result["good"] > 10
        assert machine.longest_s(result) < STOCK_RETRY_S
    machine.sleep(FORGOTTEN_S, died)
    fresh = embedded(cluster, "fresh")
    for process in (one, fresh, three):
        attach(cluster, process, 2)
    exchange(cluster, [one, fresh, three], seed=500)
    if not cluster.stock:
        assert others_of(cluster, one) == sorted(cluster.counters(process).name for process in (fresh, three))
        assert len([path for path in status.sockets(cluster.directory) if "/s-" in path]) == 3
