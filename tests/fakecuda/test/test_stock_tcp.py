# SPDX-License-Identifier: Apache-2.0
"""Claim: a stock Mooncake CUDA wheel runs on the double and moves bytes between "GPU" buffers and its store by TCP.

Run with the wheel's Python, FAKECUDA_DIR=<build>/tests/fakecuda.
"""
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

TESTS = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(TESTS / "fakecuda"), str(TESTS / "integration" / "harness")]
import fakecuda  # noqa: E402
from ports import free_port  # noqa: E402

FOLDER = os.environ.get("FAKECUDA_DIR", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="FAKECUDA_DIR is not set")

STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
store.close()
"""

ENGINE = """
import json, os, sys
import fakecuda
from mooncake.store import MooncakeDistributedStore
cuda = fakecuda.Cuda()
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
report, keys, size = {}, 24, 300000
for device in (0, 1):
    data = os.urandom(keys * size)
    source, target = cuda.alloc(keys * size, device), cuda.alloc(keys * size, device)
    cuda.poke(source, data)
    assert store.register_buffer(source, keys * size) == 0 and store.register_buffer(target, keys * size) == 0
    names = [f"d{device}k{i}" for i in range(keys)]
    put = store.batch_put_from(names, [source + i * size for i in range(keys)], [size] * keys)
    got = store.batch_get_into(names, [target + i * size for i in range(keys)], [size] * keys)
    report[device] = {"put": sorted(set(put)), "got": sorted(set(got)), "equal": cuda.peek(target, keys * size) == data}
    names = [name + "m" for name in names]
    parts = [[source + i * size + j * 100000 for j in range(3)] for i in range(keys)]
    backs = [[target + i * size + j * 100000 for j in range(3)] for i in range(keys)]
    cuda.poke(target, bytes(keys * size))
    put = store.batch_put_from_multi_buffers(names, parts, [[100000] * 3] * keys)
    got = store.batch_get_into_multi_buffers(names, backs, [[100000] * 3] * keys)
    report[f"{device} parts"] = {"put": sorted(set(put)), "got": sorted(set(got)),
                                 "equal": cuda.peek(target, keys * size) == data}
    store.unregister_buffer(source), store.unregister_buffer(target)
    cuda.free(source, device), cuda.free(target, device)
print(json.dumps(report), flush=True)
store.close()
"""


@pytest.fixture
def master(tmp_path):
    mooncake = importlib.util.find_spec("mooncake")
    if not mooncake:
        pytest.skip("no Mooncake in this Python")
    if not list(pathlib.Path(mooncake.submodule_search_locations[0]).glob("nvlink_allocator.so")):
        pytest.skip("this Mooncake is not built for CUDA")
    port = free_port()
    program = pathlib.Path(mooncake.submodule_search_locations[0]) / "mooncake_master"
    with open(tmp_path / "master.log", "w") as log:
        process = subprocess.Popen([program, "-port", str(port), "-metrics_port", str(free_port()),
                                    "-default_kv_lease_ttl", "10000"], stdout=log, stderr=log)
    for _ in range(100):
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_store_and_engine_with_gpu_buffers(master, tmp_path):
    logs = {role: tmp_path / f"{role}.jsonl" for role in ("store", "engine")}
    with open(tmp_path / "store.log", "w") as errors:
        store = subprocess.Popen([sys.executable, "-c", STORE, master], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=errors, text=True, env=fakecuda.environment(FOLDER, logs["store"]))
    try:
        assert store.stdout.readline().strip() == "0"
        env = fakecuda.environment(FOLDER, logs["engine"])
        env["PYTHONPATH"] = str(pathlib.Path(fakecuda.__file__).parent)
        engine = subprocess.run([sys.executable, "-c", ENGINE, master], env=env, capture_output=True, text=True, timeout=120)
    finally:
        store.stdin.close()
        store.wait(30)
    assert engine.returncode == 0, engine.stderr[-3000:]
    report = json.loads(engine.stdout.strip().splitlines()[-1])
    assert len(report) == 4
    for name, part in report.items():
        assert part == {"put": [0], "got": [300000], "equal": True}, name
    calls = {role: {line["call"] for line in fakecuda.read_log(log)} for role, log in logs.items()}
    assert "cudaPointerGetAttributes" in calls["engine"] and "cudaMemcpy" in calls["engine"]
    assert not fakecuda.broken_rules(logs["engine"]) and not fakecuda.broken_rules(logs["store"])
