"""Several stores and one engine: each byte goes the way of the store that it lies on, in one call as well, and a store that
dies takes nobody else's transfers with it."""

import shlex
import subprocess
import time

import pytest
from harness import actions_store as actions
from harness import mounts, status, wheels
from harness.cluster import FORGETTING, MIB

pytestmark = pytest.mark.stores

SIZE = 192 << 10


def keys_on(engine, count, each=6):
    """Objects of SIZE, `each` of them on each of `count` stores. Returns {endpoint: keys}; the seed of all is 5."""
    found = {}
    for index in range(300):
        key = f"k{index}"
        assert engine.call(actions.write_keys, keys=[key], sizes=[SIZE], seed=5) == [0]
        (place,) = engine.call(actions.replicas, key=key)
        keys = found.setdefault(place["transport_endpoint"], [])
        if len(keys) < each:
            keys.append(key)
        if len(found) == count and all(len(keys) == each for keys in found.values()):
            return found
    raise AssertionError(f"the master fills {found} only")


def interleaved(found):
    """The keys of all stores in turn."""
    return [key for group in zip(*found.values()) for key in group]


def read_all(engine, keys, way):
    return engine.call(actions.read_same, keys=keys, size=SIZE, seed=5, ranges=way == "ranges")


def read_in_turn(cluster, engine, stores, attached, way):
    """One call for keys of so many stores, once so many are attached. Returns the keys by store, those of the call, and the
    counters before."""
    found = keys_on(engine, stores)
    if not cluster.stock:
        status.until_attached(cluster.directory, engine, attached)
    before = cluster.counters(engine)
    keys = interleaved(found)
    assert read_all(engine, keys, way) == {"results": [SIZE] * len(keys), "wrong": []}
    return found, keys, before


@pytest.fixture
def elsewhere(tmp_path):
    """The interpreter of a store on another host: another boot_id, so far as it can see."""
    other = tmp_path / "boot_id"
    other.write_text("11111111-2222-3333-4444-555555555555\n")
    words = ["unshare", "-m", "sh", "-c", f'mount --bind {other} /proc/sys/kernel/random/boot_id && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace of its own for a store")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.join([*words, wheels.CPU.python])} "$@"\n')
    script.chmod(0o755)
    return str(script)


class Elsewhere(wheels.Wheel):
    script = ""

    @property
    def python(self):
        return self.script


@pytest.mark.parametrize("way", ["batch", "ranges"])
def test_one_call_over_stores_here_and_elsewhere(cluster, elsewhere, tmp_path, way):
    """A store here, a stock one, one in another directory, and one of another host in this directory."""
    engine_first = cluster.store("here")
    cluster.store("stock", environment={})
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    directory = {} if cluster.stock else {"TIDEPOOL_SOCKET_DIR": str(other)}
    cluster.store("directory", environment={**cluster.store_environment(), **directory})
    wheel, cluster.wheel = cluster.wheel, Elsewhere("elsewhere", wheels.CPU.venv)
    Elsewhere.script = elsewhere
    host = cluster.store("host")
    cluster.wheel = wheel

    engine = cluster.engine()
    found, keys, before = read_in_turn(cluster, engine, 4, 1, way)
    after = cluster.counters(engine)
    if cluster.stock:
        return
    local = len(found[cluster.counters(engine_first).name]) * SIZE
    moved = {name: after[name] - before[name] for name in after}
    assert len(after.peers) == 1
    assert moved["local_read_bytes"] + moved["forward_bytes"] == len(keys) * SIZE
    if way == "batch":
        assert moved["local_read_bytes"] == local
        assert moved["fallback_no_peer"] == 3 * len(keys) // 4
    else:
        # All ranges of a call are one batch, which Mooncake wants whole.
        assert moved["fallback_scatter_mixed"] == 2 * local // SIZE
    assert after["peers_refused"] >= 1
    assert cluster.counters(host)["clients_accepted"] == 0


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("way", ["batch", "ranges"])
def test_every_store_of_the_host_by_shared_memory(cluster, count, way):
    stores = [cluster.store(f"store{index}", segment_bytes=256 * MIB) for index in range(count)]
    engine = cluster.engine()
    found, keys, before = read_in_turn(cluster, engine, count, count, way)
    cluster.assert_local(engine, before, read=len(keys) * SIZE)
    if not cluster.stock:
        names = [cluster.counters(store).name for store in stores]
        assert sorted(names) == sorted(found)
        # Each store's share is known, in a batch over several as well.
        reads = {peer["name"]: peer["read"] for peer in cluster.counters(engine).peers}
        was = {peer["name"]: peer["read"] for peer in before.peers}
        assert {name: reads[name] - was[name] for name in names} == dict.fromkeys(names, 6 * SIZE)


@pytest.mark.parametrize("way", ["batch", "ranges"])
def test_stores_of_every_kind_in_one_call(newest, way):
    """Memory of three kinds, one of them in mooncake_client, and one directory of sockets."""
    newest.double = True
    with mounts.segment_folder("tmpfs", 256) as folder:
        stores = []
        for name, where in (("memfd", "memfd"), ("tmpfs", folder), ("cumem", "cumem")):
            newest.use_segments(where)
            stores.append(newest.client(name) if where == "memfd" else newest.store(name, segment_bytes=256 * MIB))
        engine = newest.engine()
        _, keys, before = read_in_turn(newest, engine, 3, 3, way)
        newest.assert_local(engine, before, read=len(keys) * SIZE)
        if not newest.stock:
            details = [newest.counters(store).segments[0]["detail"].split()[0].rstrip(",") for store in stores]
            assert details == ["memfd", "tmpfs", "CUDA"]
        newest.assert_no_rule_broken()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("way", ["batch", "ranges"])
def test_a_store_that_is_killed_fails_its_own_keys_only(cluster, count, way):
    cluster.start_master(*FORGETTING)
    stores = [cluster.store(f"store{index}", segment_bytes=256 * MIB) for index in range(count)]
    engine = cluster.engine()
    found = keys_on(engine, count)
    if not cluster.stock:
        status.until_attached(cluster.directory, engine, count)
    keys = interleaved(found)
    victim = None if cluster.stock else found[cluster.counters(stores[0]).name]
    running = engine.start(actions.read_on, keys=keys, size=SIZE, seed=5, seconds=4, ranges=way == "ranges")
    time.sleep(1.5)
    stores[0].kill()
    result = running.result(40)
    assert result["lies"] == 0 and result["calls"] > 5
    failed = {key for key, times in zip(keys, result["failed"]) if times}
    if cluster.stock:
        assert failed in map(set, found.values()), (failed, found)
    else:
        assert failed == set(victim), (failed, victim)
        assert len(cluster.counters(engine).peers) == count - 1
