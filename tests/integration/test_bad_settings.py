"""A wrong setting is one clear line that names it. A store then fails its setup; an engine runs as stock."""

import ctypes
import json
import os
import tempfile

import pytest
from harness import actions_process, status
from harness import actions_store as actions
from harness.cluster import MIB

NOBODY = 65534


def errors(process):
    return [line for line in process.tidepool_lines if " error: " in line.lower()]


def one_error(process, *words):
    """Exactly one error, with these words in it."""
    lines = errors(process)
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0], lines[0]


def refused(cluster, environment, user=None):
    """A store that cannot be set up: its setup fails, and the process lives on."""
    store = cluster.process("store", environment, user)
    result = store.call(actions.setup, master=cluster.master_address, segment_bytes=64 * MIB, limit_s=50)
    assert result != 0, "a store with a wrong setting has started"
    return store


@pytest.fixture
def master(cluster):
    if cluster.stock:
        pytest.skip("Tidepool's settings")
    cluster.start_master()
    return cluster


STORE = {
    "directory-missing": ({"MC_STORE_SHM_SEGMENT_DIR": "/nonexistent/segments"}, "MC_STORE_SHM_SEGMENT_DIR"),
    "directory-relative": ({"MC_STORE_SHM_SEGMENT_DIR": "segments"}, "MC_STORE_SHM_SEGMENT_DIR"),
    "no-socket-directory": ({"TIDEPOOL_SOCKET_DIR": None}, "TIDEPOOL_SOCKET_DIR"),
    "socket-directory-missing": ({"TIDEPOOL_SOCKET_DIR": "/nonexistent/below"}, "/nonexistent/below"),
    "two-kinds": ({"MC_STORE_CUMEM_SOCKET_DIR": "/tmp"}, "MC_STORE_CUMEM_SOCKET_DIR"),
    "piece-word": ({"MC_STORE_CUMEM_PIECE_BYTES": "many"}, "MC_STORE_CUMEM_PIECE_BYTES"),
    "piece-zero": ({"MC_STORE_CUMEM_PIECE_BYTES": "0"}, "MC_STORE_CUMEM_PIECE_BYTES"),
    "piece-negative": ({"MC_STORE_CUMEM_PIECE_BYTES": "-1"}, "MC_STORE_CUMEM_PIECE_BYTES"),
    "piece-too-many-digits": ({"MC_STORE_CUMEM_PIECE_BYTES": "99999999999999999999999"}, "MC_STORE_CUMEM_PIECE_BYTES"),
    "nodes-out-of-range": ({"MC_STORE_CUMEM_NUMA_NODES": "0,9"}, "MC_STORE_CUMEM_NUMA_NODES"),
    "nodes-word": ({"MC_STORE_CUMEM_NUMA_NODES": "all"}, "MC_STORE_CUMEM_NUMA_NODES"),
    "wait-word": ({"MC_STORE_SHM_SEGMENT_WAIT_S": "soon"}, "MC_STORE_SHM_SEGMENT_WAIT_S"),
    "piece-beyond-every-machine": ({"MC_STORE_CUMEM_PIECE_BYTES": str(1 << 50)}, "MC_STORE_CUMEM_PIECE_BYTES"),
    "uids": ({"TIDEPOOL_ALLOW_UIDS": "nobody"}, "TIDEPOOL_ALLOW_UIDS"),
    "hugepages": ({"TIDEPOOL_HUGEPAGES": "yes"}, "TIDEPOOL_HUGEPAGES"),
    "overcommit": ({"TIDEPOOL_OVERCOMMIT": "yes"}, "TIDEPOOL_OVERCOMMIT"),
}


@pytest.mark.parametrize("case", sorted(STORE))
def test_store(master, case):
    change, word = STORE[case]
    store = refused(master, master.store_environment(**change))
    one_error(store, word)
    # It may have begun to listen before its memory was refused; nothing of that outlives it.
    store.finish()
    assert status.names(master.directory) == []


def test_store_on_cuda_memory_without_a_driver(master):
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        environment = master.store_environment(MC_STORE_CUMEM_SOCKET_DIR=master.directory)
        del environment["MC_STORE_SHM_SEGMENT_DIR"]
        one_error(refused(master, environment), "libcuda.so.1", "MC_STORE_CUMEM_SOCKET_DIR")
    else:
        pytest.skip("this machine has a CUDA driver")


def test_store_in_a_directory_that_others_may_write_to(master):
    os.chmod(master.directory, 0o777)
    one_error(refused(master, master.store_environment()), master.directory)


def test_store_in_a_directory_of_somebody_else(master):
    os.chown(master.directory, NOBODY, NOBODY)
    one_error(refused(master, master.store_environment()), master.directory, str(NOBODY))


def test_store_in_a_directory_that_it_may_not_write_to(master):
    with tempfile.TemporaryDirectory(prefix="tidepool-test-") as folder:
        os.chmod(folder, 0o755)
        environment = master.store_environment(TIDEPOOL_SOCKET_DIR=folder)
        one_error(refused(master, environment, user=NOBODY), folder)


def memory_bytes(field):
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def test_store_larger_than_what_is_free(master):
    """A size that malloc still grants (the kernel overcommits up to what the machine has) but no memory is there for."""
    size = (memory_bytes("MemTotal") + memory_bytes("SwapTotal") - 128 * MIB) // MIB * MIB
    assert size > memory_bytes("MemAvailable")
    store = master.process("store", master.store_environment())
    result = store.call(actions.setup, master=master.master_address, segment_bytes=size, limit_s=50)
    assert result != 0
    one_error(store, "TIDEPOOL_OVERCOMMIT=1")
    assert master.process("other").call(actions_process.threads), "the machine has survived"


def test_store_larger_than_any_machine(master):
    store = master.process("store", master.store_environment())
    assert store.call(actions.setup, master=master.master_address, segment_bytes=1 << 44, limit_s=50) != 0
    one_error(store, f"{1 << 24} MiB", "ulimit -n")


@pytest.mark.parametrize("piece", [4096 * 5 + 1, 1, 10**6, 1 << 45])
def test_pieces_of_any_size_work(master, piece):
    """Odd sizes are rounded up, huge ones make one piece, small ones many."""
    if piece == 1:
        segment = 16 * MIB
    else:
        segment = 64 * MIB
    store = master.store(segment_bytes=segment, environment=master.store_environment(MC_STORE_CUMEM_PIECE_BYTES=str(piece)))
    engine = master.engine()
    master.warm(engine)
    sizes = [1, 65537, 5 * MIB]
    keys = ["a", "b", "c"]
    before = master.counters(engine)
    assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=1) == [0, 0, 0]
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=1) == {"results": sizes, "wrong": []}
    master.assert_local(engine, before, written=sum(sizes), read=sum(sizes))
    assert errors(store) == []


def conf(**shm):
    return json.dumps({"transports": {"shm": shm}})


ENGINE = {
    "not-json": "{",
    "not-an-object": "[1, 2]",
    "no-such-file": "/nonexistent/tent.json",
    "enable-word": conf(enable="yes", socket_dir="/tmp"),
    "enable-without-directory": conf(enable=True),
    "directory-number": conf(enable=True, socket_dir=7),
    "directory-relative": conf(enable=True, socket_dir="here"),
    "two-directories": conf(enable=True, socket_dir="/run/a", cumem_socket_dir="/run/b"),
    "register-negative": conf(enable=True, socket_dir="/run/a", register_max_bytes=-1),
    "duplicate-key": '{"transports": {"shm": {"enable": true, "enable": false}}}',
    "copy-engine": conf(enable=True, socket_dir="/run/a", copy_engine="magic"),
}


def works_as_stock(cluster, engine):
    sizes = [1, 65537, MIB]
    keys = [f"{engine.name}-{index}" for index in range(3)]
    assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=1) == [0, 0, 0]
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=1) == {"results": sizes, "wrong": []}


@pytest.fixture(scope="module")
def one_store(shared):
    if shared.stock:
        pytest.skip("Tidepool's settings")
    return shared


NOTICES = {"transports-number": '{"transports": 5}', "shm-list": '{"transports": {"shm": []}}'}


@pytest.mark.parametrize("case", sorted(NOTICES))
def test_engine_whose_json_has_no_place_for_tidepool(one_store, case):
    """That may be Mooncake's own business: it is said, but not an error."""
    engine = one_store.engine(f"engine-{case}", environment=one_store.engine_environment(conf=NOTICES[case]))
    works_as_stock(one_store, engine)
    (line,) = engine.tidepool_lines
    assert "transports.shm" in line and "not an object" in line


def test_a_machine_id_of_another_kind_is_said(master):
    """It is Mooncake's setting too, so an unknown value is no error."""
    store = master.store(environment=master.store_environment(MC_TENT_MACHINE_ID="hostname"))
    assert [line for line in store.tidepool_lines if "MC_TENT_MACHINE_ID" in line and "hostname" in line]


@pytest.mark.parametrize("case", sorted(ENGINE))
def test_engine(one_store, case):
    engine = one_store.engine(f"engine-{case}", environment=one_store.engine_environment(conf=ENGINE[case]))
    works_as_stock(one_store, engine)
    one_error(engine)
    assert "MC_TENT_CONF" in errors(engine)[0] or "transports" in errors(engine)[0]
    assert engine.call(actions.close) == 0
    assert engine.finish() == 0


def test_engine_with_a_directory_that_is_not_there(one_store, tmp_path):
    """The store may be started later: nothing is wrong yet, and transfers work."""
    engine = one_store.engine("later", environment=one_store.engine_environment(conf(enable=True, socket_dir=str(tmp_path / "later"))))
    works_as_stock(one_store, engine)
    assert len(engine.tidepool_lines) <= 3, engine.tidepool_lines


def test_engine_with_a_directory_that_others_may_write_to(one_store, tmp_path):
    os.chmod(tmp_path, 0o777)
    engine = one_store.engine("open", environment=one_store.engine_environment(conf(enable=True, socket_dir=str(tmp_path))))
    works_as_stock(one_store, engine)
    assert any(str(tmp_path) in line for line in engine.tidepool_lines), engine.tidepool_lines


def test_a_path_too_long_for_a_socket_works(cluster, tmp_path):
    """sun_path has 108 bytes; sockets are reached through the directory's fd."""
    deep = tmp_path
    while len(str(deep)) < 300:
        deep = deep / ("d" * 50)
    deep.mkdir(parents=True, mode=0o700)
    cluster.directory = str(deep)
    os.chmod(deep, 0o700)
    cluster.store()
    engine = cluster.engine()
    cluster.warm(engine)
    before = cluster.counters(engine)
    assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
    cluster.assert_local(engine, before, written=MIB)
