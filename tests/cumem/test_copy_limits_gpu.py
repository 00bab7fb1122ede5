# SPDX-License-Identifier: Apache-2.0
"""Claim: tests/bench/copy_limits measures GPUs and stores by the library's own copies, keeps the driver's rules, and writes nothing to
a store. On the double of the CUDA libraries, whose rates mean nothing but that bytes were moved.

Run with the CUDA wheel's Python, TIDEPOOL_BUILD=<build>.
"""

import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from test_wheel import BUILD, DOUBLE, fakecuda, host  # noqa: F401 (host is a fixture)

BLOCKS = [4096 << i for i in range(9)]
STORE_BLOCKS = [4096 << 2 * i for i in range(5)]

# Fills most of the store, so that what the bench reads is objects.
ENGINE = """
import ctypes, random, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
size, keys = 1 << 20, 200
buffer = ctypes.create_string_buffer(size)
assert store.register_buffer(ctypes.addressof(buffer), size) == 0
for key in range(keys):
    ctypes.memmove(buffer, random.Random(key).randbytes(size), size)
    assert store.put_from(f"k{key}", ctypes.addressof(buffer), size) == 0
print("ready", flush=True)
sys.stdin.readline()
for key in range(keys):
    assert store.get_into(f"k{key}", ctypes.addressof(buffer), size) == size
    assert buffer.raw == random.Random(key).randbytes(size), key
print("same", flush=True)
sys.stdin.read()
store.close()
"""


class Log(threading.Thread):
    """The double's log as it comes: the calls and the broken rules. Polling makes it too long for a file."""

    def __init__(self, path):
        super().__init__()
        self.path, self.calls, self.broken = path, set(), []
        os.mkfifo(path)
        self.start()

    def run(self):
        with open(self.path) as lines:
            for line in lines:
                if '"violation":null' not in line:
                    self.broken.append(line)
                self.calls.update(re.findall(r'"call":"(\w+)"', line))


def bench(folder, *arguments, double=DOUBLE, **settings):
    """(exit status, report or None, standard error, calls)"""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TIDEPOOL_", "FAKECUDA_", "LD_", "MOONCAKE_"))}
    log = Log(folder / "bench.jsonl")
    hold = os.open(log.path, os.O_WRONLY)  # a tool that never opens it must not leave the reader waiting
    settings = {"delay_us": 0, "devices": 1, **settings}
    try:
        done = subprocess.run(
            [BUILD / "tests" / "bench" / "copy_limits", "--json", "--seconds", "0.1", *map(str, arguments)],
            env=fakecuda.environment(double, log.path, base, **settings),
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(hold)
        log.join(60)
    assert not log.broken
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr, log.calls


def assert_measured(gpu, kernel=True):
    assert gpu["problem"] is None and gpu["limit_gbs"]["to"] > 0 and gpu["limit_gbs"]["from"] > 0
    assert [block["block_bytes"] for block in gpu["blocks"]] == BLOCKS
    for block in gpu["blocks"]:
        for way in (block["to"], block["from"]):
            assert way["engine_gbs"] > 0 and (way["kernel_gbs"] > 0 if kernel else way["kernel_gbs"] is None)
            assert way["chosen"] in ("engine", "kernel")


def assert_row(row, gpu, registered=False):
    assert (row["gpu"], row["registered"], row["problem"]) == (gpu, registered, None)
    assert [block["block_bytes"] for block in row["blocks"]] == STORE_BLOCKS
    assert all(block["get_gbs"] > 0 and block["put_gbs"] > 0 for block in row["blocks"])


def test_a_store_on_cuda_memory_is_read_and_not_written(host, tmp_path):
    host.store()
    assert host.processes[-1].stdout.readline() == "0\n"
    engine = host.engine(ENGINE)
    assert engine.stdout.readline() == "ready\n", host.log("engine")
    status, report, errors, calls = bench(tmp_path, host.directory, "--gpu", 1, devices=2)
    assert (status, errors) == (0, "")
    (gpu,), (store,) = report["gpus"], report["stores"]
    assert gpu["gpu"] == 1 and gpu["memory"] == "CUDA host memory" and report["no_gpu"] is None
    assert_measured(gpu)
    (row,) = store["rows"]
    assert_row(row, 1)
    assert store["put_memory"] == "CUDA host memory" and store["problem"] is None
    assert store["bytes"] == 256 << 20 and store["sample_bytes"] == 64 << 20 and store["pid"] == host.processes[1].pid
    assert {"cuMemImportFromShareableHandle", "cuMemcpyBatchAsync", "cuLaunchKernel"} <= calls
    print("", file=engine.stdin, flush=True)
    assert engine.stdout.readline() == "same\n", host.log("engine")
    assert not host.broken_rules("store") and not host.broken_rules("engine")


@pytest.fixture
def memfd_store(tmp_path):
    directory = tmp_path / "stores"
    directory.mkdir(mode=0o700)
    env = {**os.environ, "MC_STORE_SHM_SEGMENT_DIR": "memfd", "TIDEPOOL_SOCKET_DIR": str(directory)}
    program = BUILD / "tests" / "tools" / "tool-test-process"
    with subprocess.Popen([program, "store"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout.readline() == "ready\n"
        yield directory
        store.stdin.close()


def all_keys(value):
    if isinstance(value, dict):
        return set(value).union(*map(all_keys, value.values()))
    return set().union(*map(all_keys, value)) if isinstance(value, list) else set()


def test_a_store_on_memfd_as_it_is_and_registered(memfd_store, tmp_path):
    status, report, errors, calls = bench(tmp_path, memfd_store)
    assert (status, errors) == (0, "")
    assert_measured(report["gpus"][0])
    plain, registered = report["stores"][0]["rows"]
    assert_row(plain, 0)
    assert_row(registered, 0, registered=True)
    assert report["stores"][0]["put_memory"] == "memfd" and report["stores"][0]["sample_bytes"] == 8 << 20
    assert {"cuMemHostRegister_v2", "cuMemHostUnregister"} <= calls
    manual = (Path(__file__).parents[1] / "bench" / "limits" / "README.md").read_text()
    assert [key for key in sorted(all_keys(report)) if not re.search(rf"\b{key}\b", manual)] == []


def test_memory_that_cuda_does_not_register_costs_that_row(memfd_store, tmp_path):
    status, report, _, _ = bench(tmp_path, memfd_store, fail="cuMemHostRegister:3=801")
    plain, registered = report["stores"][0]["rows"]
    assert_row(plain, 0)
    assert "ulimit -l" in registered["problem"]
    assert status == 1


def test_a_driver_without_the_batch_call(tmp_path):
    status, report, _, calls = bench(tmp_path, double=f"{DOUBLE / 'driver-12.4'}:{DOUBLE}")
    assert status == 0 and "cuMemcpyBatchAsync" not in calls
    assert_measured(report["gpus"][0])
    assert report["stores"] == [] and report["directory"] is None


def test_a_driver_that_refuses_host_memory(tmp_path):
    status, report, errors, _ = bench(tmp_path, fail="cuMemCreate:*=801")
    assert status == 0 and "SYS_NICE" in errors
    assert report["gpus"][0]["memory"] == "pinned memory"
    assert_measured(report["gpus"][0])


def test_a_gpu_that_gives_no_context(tmp_path):
    status, report, _, _ = bench(tmp_path, devices=2, fail="cuDevicePrimaryCtxRetain:1=2")
    first, second = report["gpus"]
    assert status == 1 and "OUT_OF_MEMORY" in first["problem"] and first["blocks"] == []
    assert_measured(second)


def test_a_kernel_that_cannot_be_loaded(tmp_path):
    status, report, errors, _ = bench(tmp_path, fail="cuModuleLoadData:*=200")
    assert status == 0 and "copy kernel" in errors
    assert_measured(report["gpus"][0], kernel=False)
    assert {block[way]["chosen"] for block in report["gpus"][0]["blocks"] for way in ("to", "from")} == {"engine"}


def test_a_gpu_that_is_not_there(tmp_path):
    status, report, errors, _ = bench(tmp_path, "--gpu", 2, devices=2)
    assert (status, report) == (1, None) and "there is no GPU 2" in errors


def test_a_store_on_cuda_memory_needs_a_gpu(host, tmp_path):
    host.store()
    assert host.processes[-1].stdout.readline() == "0\n"
    status, report, _, _ = bench(tmp_path, host.directory, devices=0)
    assert status == 1 and "without a GPU" in report["stores"][0]["problem"] and "NO_DEVICE" in report["no_gpu"]
