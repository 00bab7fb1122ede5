# SPDX-License-Identifier: Apache-2.0
"""Claim: between a stock CUDA wheel's engine with GPU buffers and a store on ordinary shared memory, bytes go by chunks that are
registered with CUDA, within the limit, or are staged, and all is given back when the store goes. On the double of the CUDA libraries.

Run with the CUDA wheel's Python, TIDEPOOL_BUILD=<build>.
"""

import json
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile
import time

import pytest
from test_wheel import BUILD, ROOT, STORE, counters, fakecuda, host  # noqa: F401 (host is a fixture)

ENGINE = """
import os, sys, time
import fakecuda
from mooncake.store import MooncakeDistributedStore
cuda = fakecuda.Cuda()
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
def check(name, keys, blocks, block, device):
    size = keys * blocks * block
    data = os.urandom(size)
    source, target = cuda.alloc(size, device), cuda.alloc(size, device)
    cuda.poke(source, data)
    assert store.register_buffer(source, size) == 0 and store.register_buffer(target, size) == 0
    names = [f"{name}-{i}" for i in range(keys)]
    places = lambda base: [[base + (i * blocks + j) * block for j in range(blocks)] for i in range(keys)]
    sizes = [[block] * blocks] * keys
    assert store.batch_put_from_multi_buffers(names, places(source), sizes) == [0] * keys
    for _ in range(2):
        cuda.poke(target, bytes(size))
        assert store.batch_get_into_multi_buffers(names, places(target), sizes) == [blocks * block] * keys
        assert cuda.peek(target, size) == data, name
    store.unregister_buffer(source), store.unregister_buffer(target)
    cuda.free(source, device), cuda.free(target, device)
# The first transfers go by TCP until the store is attached and the GPU is ready.
small = cuda.alloc(4096)
assert store.register_buffer(small, 4096) == 0 and store.put_from("first", small, 4096) == 0
time.sleep(1)
check("large", 6, 1, 9 << 20, 0)
check("blocks", 12, 128, 16384, 0)
check("other", 4, 3, 100000, 1)
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


def engine(host, **settings):  # noqa: F811
    shm = {"enable": True, "socket_dir": str(host.directory), "register_peer_memory": True, "kernel_max_bytes": 65536, **settings}
    return host.python("engine", ENGINE, MC_TENT_CONF=json.dumps({"transports": {"shm": shm}}), MC_STORE_BATCHED_GET="1",
                       PYTHONPATH=str(ROOT / "tests" / "fakecuda"))


def engine_without_settings(host):  # noqa: F811
    shm = {"enable": True, "socket_dir": str(host.directory)}
    return host.python("engine", ENGINE, MC_TENT_CONF=json.dumps({"transports": {"shm": shm}}),
                       PYTHONPATH=str(ROOT / "tests" / "fakecuda"))


def run(host, segments, limit=None, start=engine, **settings):  # noqa: F811
    """The counters of the engine when all bytes are compared, its process and the store's."""
    store = host.python("store", STORE, MC_STORE_SHM_SEGMENT_DIR=segments, TIDEPOOL_SOCKET_DIR=str(host.directory))
    assert store.stdout.readline().strip() == "0", host.log("store")
    process = start(host, **settings)
    while not select.select([process.stdout], [], [], 0.02)[0]:
        seen = counters(host.status())
        assert limit is None or seen.get("registered_bytes", 0) + seen.get("staging_bytes", 0) <= limit
    assert process.stdout.readline().strip() == "ready", host.log("engine")
    seen = counters(host.status())
    assert seen["copy_failed"] == 0 and seen["register_failures"] == 0
    assert seen["local_write_bytes"] >= 78 << 20 and seen["local_read_bytes"] >= 156 << 20
    return seen, process, store


def end_well(host, process, store):  # noqa: F811
    """All is given back when the store is killed, and both processes end as they would."""
    store.send_signal(signal.SIGKILL)
    store.wait()
    deadline = time.monotonic() + 10
    while counters(host.status())["registered_bytes"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdin.close()
    assert process.wait(30) == 0, host.log("engine")
    assert not host.broken_rules("engine")
    lines = fakecuda.read_log(host.folder / "engine.jsonl")
    made = [line for line in lines if line["call"] == "cuMemHostRegister_v2"]
    ended = [line for line in lines if line["call"] == "cuMemHostUnregister"]
    assert made and len(made) == len(ended)


def test_a_store_on_memfd_without_a_limit(host):  # noqa: F811
    seen, process, store = run(host, "memfd")
    assert seen["kernel_bytes"] > 0 and seen["register_hits"] > 0
    assert seen["register_evictions"] == 0
    assert seen["registered_bytes"] >= 78 << 20
    assert seen["register_hits"] > seen["register_misses"]
    text = subprocess.run([BUILD / "tidepool", "status", str(host.directory)], capture_output=True, text=True).stdout
    assert f": {seen['register_hits']} copies found it so, {seen['register_misses']} not;" in text, text
    end_well(host, process, store)


@pytest.fixture
def tmpfs():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tidepool-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_store_on_tmpfs_within_a_limit(host, tmpfs):  # noqa: F811
    limit = 16 << 20
    seen, process, store = run(host, str(tmpfs), limit, register_max_bytes="16M", register_ahead_chunks=1)
    assert seen["registrations"] > 0
    assert seen["staged_bytes"] > 100 << 20
    text = subprocess.run([BUILD / "tidepool", "status", str(host.directory)], capture_output=True, text=True).stdout
    assert "MiB, what was not registered, by way of" in text, text
    end_well(host, process, store)


def test_without_any_setting_the_bytes_go_by_bounce_buffers(host):  # noqa: F811
    seen, process, store = run(host, "memfd", start=engine_without_settings)
    assert seen["staged_bytes"] >= seen["local_read_bytes"] + seen["local_write_bytes"] - (1 << 20)
    assert 0 < seen["staging_bytes"] <= 2 * (54 << 20)
    assert seen["registrations"] == 0 and seen["register_hits"] == 0 and seen["register_misses"] == 0
    store.send_signal(signal.SIGKILL)
    store.wait()
    process.stdin.close()
    assert process.wait(30) == 0, host.log("engine")
    assert not host.broken_rules("engine")


def test_hosts_with_hmm_register_nothing(host):  # noqa: F811
    host_python = host.python
    host.python = lambda *args, **settings: host_python(*args, FAKECUDA_HMM="1", **settings)
    store = host.python("store", STORE, MC_STORE_SHM_SEGMENT_DIR="memfd", TIDEPOOL_SOCKET_DIR=str(host.directory))
    assert store.stdout.readline().strip() == "0", host.log("store")
    process = engine(host)
    assert process.stdout.readline().strip() == "ready", host.log("engine")
    seen = counters(host.status())
    assert seen["registrations"] == 0 and seen["register_hits"] == 0 and seen["register_misses"] > 0
    process.stdin.close()
    assert process.wait(30) == 0, host.log("engine")
    assert not host.broken_rules("engine")
