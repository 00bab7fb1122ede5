"""The SSD tier: objects that were evicted from memory and that a store reads back from its disk. Engines pull them out of the
store's restore buffer, which is shared memory as segments are, whatever those are made of.
"""

import re

import pytest
from harness import actions_process as process_actions
from harness import actions_store as actions
from harness import mounts, status
from harness.cluster import MIB

pytestmark = pytest.mark.stores

MASTER = ("-enable_offload=true", "-default_kv_lease_ttl=200", "-eviction_high_watermark_ratio=0.5", "-eviction_ratio=0.3")
INVALID_PARAMS = -600
SEGMENT, BUFFER, SIZE, COUNT = 64 * MIB, 48 * MIB, MIB + 4097, 16
OLD = [f"old{index}" for index in range(COUNT)]
WAYS = ["get", "get_into", "batch_get_into", "batch_get_into_multi_buffers", "get_buffer"]


def settings(folder, buffer=BUFFER, **more):
    """What makes a store write to its disk soon."""
    return {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(buffer),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "4",
        **more,
    }


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "ssd"
    folder.mkdir()
    return folder


def store_with_disk(cluster, disk, name="store", buffer=BUFFER, **more):
    if cluster.master is None:
        cluster.start_master(*MASTER)
    environment = dict(cluster.store_environment(), **settings(disk, buffer, **more))
    return cluster.store(name, segment_bytes=SEGMENT, environment=environment, enable_ssd_offload=True)


def put(engine, keys, seed):
    """Memory may be full for a moment: eviction makes room in the background."""
    status.until(
        lambda: engine.call(actions.write_keys, keys=keys, sizes=[SIZE] * len(keys), seed=seed) == [0] * len(keys),
        "memory for more objects",
        20,
    )


def put_and_evict(engine):
    """Objects that are on disk and no longer in memory."""
    put(engine, OLD, seed=1)
    status.until(
        lambda: all("disk" in kinds for kinds in engine.call(actions.replica_kinds, keys=OLD)),
        lambda: f"all on disk: {engine.call(actions.replica_kinds, keys=OLD)}",
        15,
    )
    for round_ in range(60):
        put(engine, [f"new{round_}-{index}" for index in range(8)], seed=100 + round_)
        # Whoever asks for an object makes it a recent one, which is evicted last: on a busy machine it never was.
        if round_ % 3 == 2 and engine.call(actions.replica_kinds, keys=OLD) == [["disk"]] * COUNT:
            return
    pytest.fail(f"not evicted from memory: {engine.call(actions.replica_kinds, keys=OLD)}")


def read_back(cluster, engine, ways=("batch_get_into",)):
    """Every byte comes the short way and is what was put."""
    for way in ways:
        if engine.call(actions.missing, ways=[way]):
            continue
        before = cluster.counters(engine)
        got = engine.call(actions.read_keys, keys=OLD, sizes=[SIZE] * COUNT, seed=1, way=way)
        assert got == {"results": [SIZE] * COUNT, "wrong": []}, way
        cluster.assert_local(engine, before, read=SIZE * COUNT)


def sizes_of(cluster, store):
    return sorted(segment["bytes"] for segment in cluster.counters(store).segments)


@pytest.mark.wheels
@pytest.mark.parametrize("mode", ["memfd", "tmpfs", "hugetlbfs", "cumem"])
def test_what_was_evicted_comes_back_the_short_way(cluster, disk, mode):
    with mounts.segment_folder(mode, (SEGMENT + BUFFER) // MIB) as where:
        cluster.use_segments(where)
        store = store_with_disk(cluster, disk)
        engine = cluster.engine()
        put_and_evict(engine)
        if not cluster.stock:
            status.until_attached(cluster.directory, engine)
            assert sizes_of(cluster, store) == [BUFFER, SEGMENT]
        read_back(cluster, engine, WAYS + (["get_into_ranges"] if cluster.wheel.name == "cuda13" else []))
        if cluster.wheel.name == "cpu":
            # Up to 0.3.13 Mooncake refuses ranges of such objects by itself: the same with --stock.
            got = engine.call(actions.read_keys, keys=OLD, sizes=[SIZE] * COUNT, seed=1, way="get_into_ranges")
            assert got["results"] == [INVALID_PARAMS] * COUNT
        assert (engine.call(actions.close), store.call(actions.close)) == (0, 0)
        assert (engine.finish(), store.finish()) == (0, 0)
        cluster.assert_no_rule_broken()


@pytest.mark.parametrize("mode", ["memfd", "hugetlbfs"])
def test_nothing_is_left_when_it_is_closed(cluster, disk, mode):
    """The engine of a store with a disk outlives its memory, so each ends by itself; and the process can open another."""
    with mounts.segment_folder(mode, 2 * (SEGMENT + BUFFER) // MIB) as where:
        cluster.use_segments(where)
        free = mounts.number(mounts.FREE)
        store = store_with_disk(cluster, disk)
        for round_ in range(2):
            address = int(re.findall(r"AlignedClientBufferAllocator: allocated \d+ bytes at address (0x\w+)", store.log)[round_], 16)
            assert store.call(process_actions.is_mapped, address=address)
            assert store.call(actions.close) == 0
            assert not store.call(process_actions.is_mapped, address=address)
            if not cluster.stock:
                held = [name for name in store.call(process_actions.fds).values() if "tidepool-segment" in name or "/#" in name]
                assert not held
            if mode == "hugetlbfs":
                assert mounts.number(mounts.FREE) == free
            cluster.set_up(store, segment_bytes=SEGMENT, local_bytes=16 * MIB, enable_ssd_offload=True)


@pytest.mark.parametrize("mode", ["hugetlbfs", "cumem"])
def test_a_buffer_of_any_size_read_into_by_io_uring(cluster, disk, mode):
    """io_uring pins the buffer when it is made. In a CUDA store it is a memfd then."""
    with mounts.segment_folder(mode, (SEGMENT + BUFFER + 2 * MIB) // MIB) as where:
        cluster.use_segments(where)
        store = store_with_disk(cluster, disk, buffer=BUFFER + 1, MOONCAKE_OFFLOAD_USE_URING="true")
        if "register_global_buffer] registered" not in store.log:
            pytest.skip("no io_uring here")
        engine = cluster.engine()
        put_and_evict(engine)
        read_back(cluster, engine)
        if not cluster.stock:
            details = {segment["detail"].split()[0] for segment in cluster.counters(store).segments}
            assert details == {"hugetlbfs": {"hugetlbfs"}, "cumem": {"CUDA", "memfd,"}}[mode]


@pytest.mark.wheels
@pytest.mark.parametrize("mode", ["hugetlbfs", "cumem"])
def test_mooncake_client_with_a_disk(cluster, disk, mode):
    with mounts.segment_folder(mode, (SEGMENT + BUFFER) // MIB) as where:
        cluster.use_segments(where)
        cluster.start_master(*MASTER)
        environment = dict(cluster.store_environment(), **settings(disk))
        client = cluster.client(segment="64MB", environment=environment, enable_offload="true")
        engine = cluster.engine()
        put_and_evict(engine)
        if not cluster.stock:
            assert sizes_of(cluster, client) == [BUFFER, SEGMENT]
        read_back(cluster, engine)
        assert client.terminate() == 143
        cluster.assert_no_rule_broken()


def test_a_store_killed_while_an_engine_reads_back(cluster, disk):
    store = store_with_disk(cluster, disk)
    engine = cluster.engine()
    put_and_evict(engine)
    read_back(cluster, engine)
    running = engine.start(actions.read_for, keys=OLD, sizes=[SIZE] * COUNT, seed=1, seconds=4)
    status.until(lambda: cluster.stock or cluster.counters(engine)["local_read_bytes"] > 100 * MIB, "it runs")
    store.kill()
    result = running.result(60)
    assert result["lies"] == 0 and result["good"] > 4 and not result["last_good"]


@pytest.mark.hugepages
def test_pages_of_a_gibibyte(cluster, disk):
    """One for the segment and one for the buffer, small as they are."""
    with mounts.gigantic_pages(2), mounts.mounted("hugetlbfs", "pagesize=1G,mode=0700") as where:
        cluster.use_segments(where)
        store = store_with_disk(cluster, disk)
        engine = cluster.engine()
        put_and_evict(engine)
        if not cluster.stock:
            assert sizes_of(cluster, store) == [1 << 30, 1 << 30]
        read_back(cluster, engine)
        assert (engine.call(actions.close), store.call(actions.close)) == (0, 0)


@pytest.mark.hugepages
def test_too_few_huge_pages_for_the_buffer_end_the_setup(cluster, disk):
    if cluster.stock:
        pytest.skip("nothing of Mooncake's own is refused")
    with mounts.segment_folder("hugetlbfs", SEGMENT // MIB) as where:
        cluster.use_segments(where)
        cluster.start_master(*MASTER)
        free = mounts.number(mounts.FREE)
        need = free + 1 - SEGMENT // (2 * MIB)
        environment = dict(cluster.store_environment(), **settings(disk, buffer=need * 2 * MIB))
        store = cluster.process("store", environment)
        result = store.call(
            actions.setup, master=cluster.master_address, segment_bytes=SEGMENT, enable_ssd_offload=True, limit_s=30
        )
        assert result != 0
        said = [line for line in store.tidepool_lines if "error" in line]
        assert len(said) == 1, said
        assert f"needs {need} pages of 2 MiB, the kernel has {need - 1} pages of 2 MiB free, 1 pages of 2 MiB are missing" in said[0]
        assert store.call(actions.close) == 0
        assert store.finish() == 0
        assert status.names(where) == []
