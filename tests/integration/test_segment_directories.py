"""MC_STORE_SHM_SEGMENT_DIR on file systems that cannot hold segments, or not these: the store's setup fails with one line that
says what to do, before anything is shared; and what a store was given it keeps, whatever becomes of the directory.
"""

import os
import signal
import subprocess
import time

import pytest
from harness import real_client, status
from harness.cluster import MIB
from harness.mounts import mounted
from harness.program import Program
from harness.wheels import SCARCE

pytestmark = [pytest.mark.stores, pytest.mark.timeout(90)]

SEGMENT = 32 * MIB


@pytest.fixture
def start(cluster, tmp_path):
    if cluster.stock:
        pytest.skip("there is no directory")
    return real_client.starter(cluster, tmp_path)


def store_in(cluster, start, where, name="store", **extra):
    extra = {"MC_STORE_SHM_SEGMENT_DIR": where, "MC_STORE_SHM_SEGMENT_WAIT_S": "0", **extra}
    return start(name, cluster.store_environment(**extra), SEGMENT)


def refusal(cluster, start, where, **extra):
    """The one line of a store that cannot be; its setup failed, and it ended by itself."""
    with pytest.raises(real_client.SetupFailed):
        store_in(cluster, start, where, "refused", **extra)
    refused = cluster.processes[-1]
    assert refused.popen.wait(10) == 1
    (line,) = refused.warnings
    assert " error: " in line and str(where) in line, line
    assert status.names(cluster.directory) == []
    return line


def file_system(path):
    return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()


def test_disks(cluster, start, tmp_path):
    where = tmp_path / "segments"
    where.mkdir(mode=0o700)
    if file_system(where) in ("tmpfs", "hugetlbfs"):
        pytest.skip("the tests' own folder is memory")
    assert "is not hugetlbfs or tmpfs" in refusal(cluster, start, where)
    assert os.listdir(where) == []


def test_overlayfs(cluster, start):
    with mounted("tmpfs", "mode=0700") as base:
        for name in ("lower", "upper", "work"):
            os.mkdir(f"{base}/{name}", 0o700)
        with mounted("overlay", f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work") as where:
            assert "is not hugetlbfs or tmpfs" in refusal(cluster, start, where)


def test_read_only(cluster, start):
    with mounted("tmpfs", "mode=0700,ro") as where:
        assert "Read-only file system" in refusal(cluster, start, where)


def test_too_small(cluster, start):
    with mounted("tmpfs", "mode=0700,size=16m") as where:
        assert "larger size=" in refusal(cluster, start, where)


def test_no_inodes(cluster, start):
    """A mount that takes no more files."""
    with mounted("tmpfs", "mode=0700,nr_inodes=2") as where:
        open(f"{where}/one", "w").close()
        assert "No space left" in refusal(cluster, start, where)


def test_filled_by_others(cluster, start):
    with mounted("tmpfs", "mode=0700,size=64m") as where:
        with open(f"{where}/other", "wb") as other:
            os.posix_fallocate(other.fileno(), 0, 48 * MIB)
        assert "others still hold" in refusal(cluster, start, where)


SCRIPT = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
signal.signal(signal.SIGTERM, lambda *_: sys.exit(43))
signal.signal(signal.SIGCHLD, lambda *_: None)
store = MooncakeDistributedStore()
try:
    result = store.setup("127.0.0.1", "P2PHANDSHAKE", {size}, 16 << 20, "tcp", "", "{master}")
    sys.exit(0 if result == 0 else 42)
except KeyboardInterrupt:
    sys.exit(44)
"""


def waiting(cluster, where):
    """A python store that waits for pages which another file of the mount holds."""
    if cluster.stock:
        pytest.skip("there is no directory")
    cluster.start_master()
    environment = cluster.store_environment(MC_STORE_SHM_SEGMENT_DIR=where, MC_STORE_SHM_SEGMENT_WAIT_S="80")
    script = SCRIPT.format(size=SEGMENT, master=cluster.master_address)
    store = Program("waiting", [cluster.wheel.python, "-c", script], environment, os.path.join(cluster.folder, "waiting.log"))
    cluster.processes.append(store)
    status.until(lambda: "waiting for others" in store.log, lambda: f"it waits\n{store.log[-2000:]}", 30)
    return store


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 43), (signal.SIGINT, 44)])
def test_signals_end_the_wait_for_pages(cluster, number, code):
    """Python runs handlers between its own instructions, so also after setup has come back."""
    with mounted("tmpfs", "mode=0700,size=64m") as where:
        with open(f"{where}/other", "wb") as other:
            os.posix_fallocate(other.fileno(), 0, 48 * MIB)
        store = waiting(cluster, where)
        store.signal(number)
        assert store.popen.wait(30) == code, store.log[-2000:]
        assert sum("a signal asks this process to end" in line for line in store.warnings) == 1


def test_other_signals_do_not_end_the_wait_for_pages(cluster):
    with mounted("tmpfs", "mode=0700,size=64m") as where:
        with open(f"{where}/other", "wb") as other:
            os.posix_fallocate(other.fileno(), 0, 48 * MIB)
        store = waiting(cluster, where)
        for _ in range(10):
            store.signal(signal.SIGCHLD)
            time.sleep(0.05)
        os.unlink(f"{where}/other")
        assert store.popen.wait(30) == 0, store.log[-2000:]


def test_filled_between_the_look_and_the_taking(cluster, start):
    with mounted("tmpfs", "mode=0700,size=64m") as where:
        line = refusal(cluster, start, where, LD_PRELOAD=f"{SCARCE}:{cluster.preload}", SCARCE="reserve:1:1")
        assert "No space left" in line


def test_what_was_given_stays(cluster, start):
    """The mount is filled, the directory removed, the mount itself taken away: the store has its pages, and engines new and
    old move bytes through them."""
    with mounted("tmpfs", "mode=0755,size=64m") as base:
        where = f"{base}/segments"
        store = store_in(cluster, start, where)
        first = start("first", cluster.engine_environment())
        assert first.put(["warm"], [8], seed=1) == ["0"]
        status.until_attached(cluster.directory, first)
        with open(f"{base}/other", "wb") as other, pytest.raises(OSError):
            for _ in range(64):
                other.write(bytes(MIB))
        os.rmdir(where)
        subprocess.run(["umount", "-l", base], check=True)
        try:
            late = start("late", cluster.engine_environment())
            assert late.put(["warm-late"], [8], seed=1) == ["0"]
            status.until_attached(cluster.directory, late)
            for number, engine in enumerate((first, late)):
                before = cluster.counters(engine)
                keys = [f"{engine.name}-{index}" for index in range(6)]
                assert engine.put(keys, [2 * MIB] * 6, seed=number) == ["0"] * 6
                assert engine.get(keys, [2 * MIB] * 6, seed=number) == [f"{2 * MIB} equal"] * 6
                cluster.assert_local(engine, before, written=12 * MIB, read=12 * MIB)
            assert [process.close() for process in (first, late, store)] == [0, 0, 0]
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "none", base], check=True)
