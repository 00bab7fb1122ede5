"""mooncake_client as a store: a program that exports none of Mooncake's symbols. Its segments go the short way whatever they
are made of, and it lives and dies as it would without."""

import time

import pytest
from harness import actions_store as actions
from harness import machine, status
from harness.cluster import FORGETTING, FORGOTTEN_S, MIB
from harness.mounts import segment_folder

pytestmark = pytest.mark.stores

SIZES = [1, 4096, 65537, 3 * MIB, 17 * MIB]
KEYS = [f"key{index}" for index in range(len(SIZES))]


def move(cluster, engine, name="key", sizes=SIZES, seed=1):
    """Everything that this engine puts and gets goes through shared memory, and is what was put."""
    before = cluster.counters(engine)
    keys = [f"{name}{index}" for index in range(len(sizes))]
    assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=seed) == [0] * len(keys)
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=seed) == {"results": sizes, "wrong": []}
    cluster.assert_local(engine, before, written=sum(sizes), read=sum(sizes))


@pytest.mark.wheels
@pytest.mark.parametrize("mode", ["memfd", "tmpfs", "hugetlbfs", "cumem"])
def test_bytes_go_the_short_way(cluster, mode):
    with segment_folder(mode, 64) as where:
        cluster.use_segments(where)
        store = cluster.client(segment="64MB")
        engine = cluster.engine()
        cluster.warm(engine)
        move(cluster, engine)
        if not cluster.stock:
            found = cluster.counters(store)
            assert found.roles == 1
            assert [segment["bytes"] for segment in found.segments] == [64 * MIB]
        assert engine.call(actions.close) == 0
        assert engine.finish() == 0
        assert store.terminate() == 143
        cluster.assert_no_rule_broken()


def test_stock_engines_read_what_came_the_short_way(cluster):
    cluster.client()
    engine = cluster.engine()
    cluster.warm(engine)
    assert engine.call(actions.write_keys, keys=KEYS, sizes=SIZES, seed=3) == [0] * len(KEYS)
    stock = cluster.engine("stock", environment={})
    assert stock.call(actions.read_keys, keys=KEYS, sizes=SIZES, seed=3) == {"results": SIZES, "wrong": []}
    assert stock.call(actions.write_keys, keys=["theirs"], sizes=[MIB], seed=4) == [0]
    assert engine.call(actions.read_keys, keys=["theirs"], sizes=[MIB], seed=4) == {"results": [MIB], "wrong": []}


@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_sigterm_ends_it_and_the_next_one_is_found(cluster, mode):
    cluster.use_segments(mode)
    cluster.start_master(*FORGETTING)
    store = cluster.client()
    engine = cluster.engine()
    cluster.warm(engine)
    move(cluster, engine)
    left = [path for path in status.sockets(cluster.directory) if "/s-" in path]
    assert store.terminate() == 143
    if cluster.stock:
        return
    status.until(lambda: not cluster.counters(engine).peers, "the engine lets go of the dead store", 1.0)
    got = engine.call(actions.read_keys, keys=["key1"], sizes=[4096], seed=2)
    assert got["results"][0] < 0, "a read from a dead store was reported as a success"
    died = time.monotonic()
    cluster.client("fresh")
    now = [path for path in status.sockets(cluster.directory) if "/s-" in path]
    assert len(left) == len(now) == 1 and left != now, "the dead store's socket is swept by the next"
    machine.sleep(FORGOTTEN_S, died)
    cluster.warm(engine)
    move(cluster, engine, "fresh")


def test_killed_while_transfers_run(cluster):
    cluster.start_master(*FORGETTING)
    store = cluster.client()
    engine = cluster.engine()
    cluster.warm(engine)
    running = engine.start(actions.hammer, key_prefix="a", size=MIB, seconds=3, seed=1)
    status.until(lambda: cluster.stock or cluster.counters(engine)["local_write_bytes"] > 8 * MIB, "it runs")
    store.kill()
    result = running.result(20)
    assert result["lies"] == 0 and result["good"] > 4
    assert not result["last_good"]


def test_several_of_them(cluster):
    stores = [cluster.client(f"client{index}", segment="64MB") for index in range(3)]
    engine = cluster.engine()
    cluster.warm(engine, stores=3, size=65536)
    move(cluster, engine, sizes=[65537] * 96)
    if not cluster.stock:
        assert sorted(peer["name"] for peer in cluster.counters(engine).peers) == sorted(
            cluster.counters(store).name for store in stores
        )
        assert all(peer["write"] and peer["read"] for peer in cluster.counters(engine).peers)


def test_flags_of_its_own(cluster, tmp_path):
    """SSD offload with its RPC server, several service threads, a local buffer, a segment that is not a power of two."""
    folder = tmp_path / "ssd"
    folder.mkdir()
    ssd = {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder), "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(48 * MIB)}
    cluster.start_master("-enable_offload=true")
    store = cluster.client(
        environment=cluster.store_environment(**ssd) or ssd,
        segment="176MB",
        enable_offload="true",
        threads=3,
        local_buffer_size="32MB",
        protocol="tcp",
        device_names="",
    )
    engine = cluster.engine()
    cluster.warm(engine)
    move(cluster, engine)
    if not cluster.stock:
        found = sorted(segment["bytes"] for segment in cluster.counters(store).segments)
        # Not 32 MiB: Mooncake's scratch buffer of the SSD tier has that size and cannot be told from it.
        assert found == [48 * MIB, 176 * MIB], "the SSD tier's buffer, and the segment"
    assert store.terminate() == 143


def test_without_a_segment_it_serves_dummy_clients_only(cluster):
    client = cluster.client(segment="0")
    assert client.popen.poll() is None
    assert client.tidepool_lines == []
    assert status.names(cluster.directory) == []
