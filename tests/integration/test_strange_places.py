"""Directories and mounts that nobody expects: shared memory works there, or one line says why not."""

import ctypes
import os

import pytest
from harness import actions_store as actions
from harness import process, status
from harness.cluster import MIB

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 1, 32, 0x4000, 0x40000, 2

NAMES = {
    "odd": "a b\n\"q\"\\%s%n 'кэш'/",
    "longer-than-a-socket-address": "x" * 200 + "/" + "y" * 200,
}


def round_trip(cluster, engine, key):
    assert engine.call(actions.write_keys, keys=[key], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.read_keys, keys=[key], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}


def test_names_of_directories(cluster):
    if cluster.stock:
        pytest.skip("there is no directory")
    cluster.start_master("-client_ttl", "1")
    for case, name in NAMES.items():
        cluster.directory = os.path.join(cluster.folder, name)
        os.makedirs(cluster.directory, 0o700)
        os.chmod(cluster.directory, 0o700)
        store, engine = cluster.store(f"store-{case}"), cluster.engine(f"engine-{case}")
        status.until_attached(cluster.directory, engine)
        before = cluster.counters(engine)
        status.until(
            lambda: engine.call(actions.write_keys, keys=[case], sizes=[MIB], seed=1) == [0], "the store before is forgotten"
        )
        round_trip(cluster, engine, f"{case}-2")
        after = cluster.counters(engine)
        assert after["local_read_bytes"] - before["local_read_bytes"] == MIB, case
        assert after["local_write_bytes"] - before["local_write_bytes"] >= 2 * MIB, case
        assert (engine.finish(), store.finish()) == (0, 0)
        assert status.names(cluster.directory) == [], case


@pytest.fixture
def in_own_mounts(monkeypatch):
    """Processes that are started under `with_mounts(change)` see the file systems that `change` has left them."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    libc = ctypes.CDLL(None, use_errno=True)
    before = process.die_with_parent

    def with_mounts(change):
        def prepare():
            before()
            if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) or change(libc):
                os._exit(98)

        monkeypatch.setattr(process, "die_with_parent", prepare)

    return with_mounts


def without_proc(libc):
    return libc.umount2(b"/proc", MNT_DETACH)


def refused_store(cluster):
    store = cluster.process("refused", cluster.store_environment())
    assert store.call(actions.setup, master=cluster.master_address, segment_bytes=64 * MIB, limit_s=50) != 0
    return [line for line in store.tidepool_lines if " error: " in line]


def test_no_proc(cluster, in_own_mounts):
    if cluster.stock:
        pytest.skip("Tidepool's need of /proc")
    cluster.store()
    in_own_mounts(without_proc)
    engine = cluster.engine()
    round_trip(cluster, engine, "no-proc")
    lines = [line for line in engine.tidepool_lines if " info: " not in line]
    assert sorted("/proc is not mounted" in line for line in lines) == [False, True]
    assert all("/proc" in line for line in lines)  # the other: of its network namespace
    assert engine.finish() == 0
    (line,) = refused_store(cluster)
    assert "/proc is not mounted" in line


def test_a_directory_that_engines_may_only_read(cluster, in_own_mounts):
    """A read-only bind mount: shared memory works; only that it cannot be asked for its counters is said."""
    if cluster.stock:
        pytest.skip("there is no directory")
    store = cluster.store()
    directory = cluster.directory.encode()

    def read_only(libc):
        return libc.mount(directory, directory, None, 0x1000, None) or libc.mount(
            None, directory, None, MS_REMOUNT | 0x1000 | MS_RDONLY, None
        )

    in_own_mounts(read_only)
    engine = cluster.engine()
    status.until(lambda: "attached to store" in engine.log, "it attaches")
    round_trip(cluster, engine, "read-only")
    (line,) = [line for line in engine.tidepool_lines if " info: " not in line]
    assert " warn: " in line and "transfers work" in line
    assert len(cluster.counters(store).clients) == 1
    assert engine.finish() == 0
