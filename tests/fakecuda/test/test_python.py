# SPDX-License-Identifier: Apache-2.0
"""Claims: the helper reads and writes device memory and the log; the runtime's double keeps the runtime's habits; the library in
driver-12.4 is an old driver; without GPUs everything says so.

FAKECUDA_DIR=<build>/tests/fakecuda
"""
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import fakecuda  # noqa: E402

FOLDER = os.environ.get("FAKECUDA_DIR", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="FAKECUDA_DIR is not set")


def run(code, tmp_path, folder=FOLDER, **settings):
    """Run code on the double; its log."""
    log = tmp_path / "log.jsonl"
    env = fakecuda.environment(folder, log, **settings)
    env["PYTHONPATH"] = str(HERE.parent)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return fakecuda.read_log(log)


def test_device_memory_and_log(tmp_path):
    log = run("""
import fakecuda
cuda = fakecuda.Cuda()
address = cuda.alloc(1000, device=1)
cuda.poke(address + 10, b"some bytes")
assert cuda.peek(address + 8, 13) == bytes(2) + b"some bytes" + bytes(1)
assert cuda.contexts() == 1 and cuda.violations() == 0
cuda.note("now it breaks")
try:
    cuda.free(address + 8, device=1)
except fakecuda.CudaError as error:
    assert error.result == 1
assert cuda.violations() == 1 and "inside an allocation" in cuda.last_violation()
""", tmp_path)
    assert [line["call"] for line in log if line["violation"]] == ["cuMemFree_v2"]
    assert fakecuda.broken_rules(tmp_path / "log.jsonl") == [log[-2]]
    assert log[-3]["call"] == "cuCtxPushCurrent_v2" and log[-4]["args"] == "now it breaks"


RUNTIME = """
import ctypes as C
rt, cu = C.CDLL("libcudart.so.13"), C.CDLL("libcuda.so.1")
class Attributes(C.Structure):
    _fields_ = [("type", C.c_int), ("device", C.c_int), ("on_device", C.c_void_p), ("on_host", C.c_void_p),
                ("reserved", C.c_long * 8)]
a, host, count = Attributes(), C.create_string_buffer(b"0123456789" * 10, 100), C.c_int()
def ask(address):
    result = rt.cudaPointerGetAttributes(C.byref(a), C.c_void_p(address))
    return result, a.type, a.device, a.on_device, a.on_host
def malloc(size):
    address = C.c_void_p()
    assert rt.cudaMalloc(C.byref(address), C.c_size_t(size)) == 0
    return address
"""


def test_runtime(tmp_path):
    log = run(RUNTIME + """
assert ask(C.addressof(host)) == (0, 0, -2, None, C.addressof(host))
assert rt.cudaGetDeviceCount(C.byref(count)) == 0 and count.value == 2
assert cu.fakecuda_contexts() == 0, "asking makes no context"
assert rt.cudaSetDevice(1) == 0
device = malloc(100)
assert cu.fakecuda_contexts() == 1 and ask(device.value) == (0, 2, 1, device.value, None)
assert rt.cudaMemcpy(device, host, C.c_size_t(100), 1) == 0
back = C.create_string_buffer(100)
assert rt.cudaMemcpy(back, device, C.c_size_t(100), 4) == 0 and back.raw == host.raw
assert cu.fakecuda_violations() == 0
assert rt.cudaFree(device) == 0 and rt.cudaFree(device) == 1
assert rt.cudaGetLastError() == 1 and rt.cudaGetLastError() == 0
""", tmp_path)
    assert len([line for line in log if line["violation"]]) == 1
    assert {"cudaMalloc", "cuMemAlloc_v2"} <= {line["call"] for line in log}


def test_old_driver(tmp_path):
    run(RUNTIME + """
assert not hasattr(cu, "cuMemcpyBatchAsync") and cu.cuDriverGetVersion(C.byref(count)) == 0 and count.value == 12040
stream = C.c_void_p()
assert rt.cudaStreamCreateWithFlags(C.byref(stream), 1) == 0
assert rt.cudaMemcpyBatchAsync(None, None, None, C.c_size_t(0), None, None, C.c_size_t(0), stream) == 36
""", tmp_path, folder=f"{FOLDER}/driver-12.4:{FOLDER}")


def test_no_gpu(tmp_path):
    log = run(RUNTIME + """
assert rt.cudaGetDeviceCount(C.byref(count)) == 100 and count.value == 0
assert ask(C.addressof(host))[0] == 100
""", tmp_path, devices=0)
    assert not [line for line in log if line["violation"]]


def test_injection_into_the_runtime(tmp_path):
    log = run(RUNTIME + """
address = C.c_void_p()
assert rt.cudaMalloc(C.byref(address), C.c_size_t(8)) == 0
assert rt.cudaMalloc(C.byref(address), C.c_size_t(8)) == 2
""", tmp_path, fail="cudaMalloc:2=2")
    assert [line["result"] for line in log if line["call"] == "cudaMalloc"] == [0, 2]
