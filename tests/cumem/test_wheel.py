# SPDX-License-Identifier: Apache-2.0
"""Claim: a stock CUDA wheel's store serves segments of CUDA host memory, an engine moves its bytes through them, and both
end as they would without. On the double of the CUDA libraries.

Run with the CUDA wheel's Python, TIDEPOOL_BUILD=<build>.
"""

import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TIDEPOOL_BUILD", ROOT / "build")).resolve()
DOUBLE = BUILD / "tests" / "fakecuda"
LIBRARY = BUILD / "libtidepool.so"
sys.path[:0] = [str(ROOT / "tests" / "fakecuda"), str(ROOT / "tests" / "integration" / "harness")]
import fakecuda  # noqa: E402
from ports import free_port  # noqa: E402

STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
print("close", store.close(), flush=True)
"""

ENGINE = """
import ctypes, os, sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
size, keys = 1 << 20, 64
data = os.urandom(size * keys)
source, target = ctypes.create_string_buffer(data, len(data)), ctypes.create_string_buffer(len(data))
at, to = ctypes.addressof(source), ctypes.addressof(target)
assert store.register_buffer(at, len(data)) == 0 and store.register_buffer(to, len(data)) == 0
# The first request that misses a piece is what makes the engine import: that one goes by TCP.
assert store.put_from("first", at, size) == 0
time.sleep(1)
names = [f"k{i}" for i in range(keys)]
assert store.batch_put_from(names, [at + i * size for i in range(keys)], [size] * keys) == [0] * keys
assert store.batch_get_into(names, [to + i * size for i in range(keys)], [size] * keys) == [size] * keys
assert target.raw == data
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


class Host:
    """A master, and processes of the wheel with the library."""

    def __init__(self, folder):
        self.folder = folder
        self.directory = folder / "sockets"
        self.directory.mkdir(mode=0o700)
        self.processes = []
        mooncake = pathlib.Path(importlib.util.find_spec("mooncake").submodule_search_locations[0])
        port = free_port()
        self.master = f"127.0.0.1:{port}"
        arguments = [mooncake / "mooncake_master", "-port", str(port), "-metrics_port", str(free_port())]
        self.start(arguments, "master", dict(os.environ))
        for _ in range(100):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)

    def start(self, command, role, env):
        with open(self.folder / f"{role}.log", "w") as log:
            process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes.append(process)
        return process

    def python(self, role, program, preload=LIBRARY, fail=None, **settings):
        base = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TIDEPOOL_", "FAKECUDA_", "LD_"))}
        env = fakecuda.environment(DOUBLE, self.folder / f"{role}.jsonl", base, **({"fail": fail} if fail else {}))
        env.update(settings, LD_PRELOAD=str(preload), TIDEPOOL_LOG="info")
        return self.start([sys.executable, "-c", program, self.master], role, env)

    def store(self, **settings):
        return self.python("store", STORE, MC_STORE_CUMEM_SOCKET_DIR=str(self.directory), MC_STORE_CUMEM_PIECE_BYTES="64M",
                           **settings)

    def engine(self, program=ENGINE):
        # The double runs no copy kernel of ours.
        shm = {"enable": True, "cumem_socket_dir": str(self.directory), "copy_engine": "dma"}
        conf = {"transports": {"shm": shm}}
        return self.python("engine", program, MC_TENT_CONF=json.dumps(conf), PYTHONPATH=str(ROOT / "tests" / "fakecuda"))

    def log(self, role):
        return (self.folder / f"{role}.log").read_text()

    def calls(self, role):
        return {line["call"] for line in fakecuda.read_log(self.folder / f"{role}.jsonl")}

    def broken_rules(self, role):
        return fakecuda.broken_rules(self.folder / f"{role}.jsonl")

    def status(self):
        done = subprocess.run([BUILD / "tidepool", "status", "--json", str(self.directory)], capture_output=True, text=True)
        return json.loads(done.stdout)


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def counters(status):
    """The counters of all processes, summed."""
    total = {}

    def walk(node):
        if isinstance(node, dict):
            for name, value in node.items():
                if name == "counters":
                    for counter, number in value.items():
                        total[counter] = total.get(counter, 0) + number
                else:
                    walk(value)
        elif isinstance(node, list):
            for part in node:
                walk(part)

    walk(status)
    return total


def test_bytes_go_the_short_way_and_both_end_well(host):
    store = host.store()
    assert store.stdout.readline().strip() == "0", host.log("store")
    engine = host.engine()
    assert engine.stdout.readline().strip() == "ready", host.log("engine")
    seen = counters(host.status())
    # The first put of 1 MiB is local as well, if it does not have to wait too long for the store.
    assert seen["local_write_bytes"] in (64 << 20, 65 << 20) and seen["local_read_bytes"] == 64 << 20
    assert seen["local_write_bytes"] + seen["forward_bytes"] <= 65 << 20 and seen["copy_failed"] == 0 and seen["import_failures"] == 0
    engine.stdin.close()
    assert engine.wait(30) == 0, host.log("engine")
    store.stdin.close()
    assert store.stdout.readline().strip() == "close 0"
    assert store.wait(30) == 0, host.log("store")
    assert not host.broken_rules("store") and not host.broken_rules("engine")
    made = {call for call in host.calls("store") if call.startswith(("cuCtx", "cuDevicePrimaryCtxRetain", "cuStream"))}
    assert not made
    assert "cuMemCreate" in host.calls("store") and "cuMemUnmap" in host.calls("store")
    assert "cuMemImportFromShareableHandle" in host.calls("engine")
    assert os.listdir(host.directory) == ["addresses"]


GPU_ENGINE = """
import os, sys, time
import fakecuda
from mooncake.store import MooncakeDistributedStore
cuda = fakecuda.Cuda()
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
size, keys = 256 << 10, 32
for device in (0, 1):
    data = os.urandom(size * keys)
    source, target = cuda.alloc(len(data), device), cuda.alloc(len(data), device)
    cuda.poke(source, data)
    assert store.register_buffer(source, len(data)) == 0 and store.register_buffer(target, len(data)) == 0
    # The first request of a GPU makes the engine open the memory to it: that one goes by TCP.
    assert store.put_from(f"first{device}", source, size) == 0
    time.sleep(1)
    names = [f"d{device}k{i}" for i in range(keys)]
    assert store.batch_put_from(names, [source + i * size for i in range(keys)], [size] * keys) == [0] * keys
    assert store.batch_get_into(names, [target + i * size for i in range(keys)], [size] * keys) == [size] * keys
    assert cuda.peek(target, len(data)) == data, device
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


def test_gpu_buffers_go_the_short_way(host):
    store = host.store()
    assert store.stdout.readline().strip() == "0", host.log("store")
    engine = host.engine(GPU_ENGINE)
    assert engine.stdout.readline().strip() == "ready", host.log("engine")
    seen = counters(host.status())
    assert seen["local_write_bytes"] >= 16 << 20 and seen["local_read_bytes"] >= 16 << 20
    assert seen["forward_bytes"] <= 512 << 10 and seen["copy_failed"] == 0 and seen["import_failures"] == 0
    engine.stdin.close()
    assert engine.wait(30) == 0, host.log("engine")
    assert not host.broken_rules("engine")


def test_an_engine_lets_go_of_a_killed_store(host):
    store = host.store()
    assert store.stdout.readline().strip() == "0", host.log("store")
    engine = host.engine()
    assert engine.stdout.readline().strip() == "ready", host.log("engine")
    maps = pathlib.Path(f"/proc/{engine.pid}/maps")
    assert "fakecuda-host" in maps.read_text()
    store.send_signal(signal.SIGKILL)
    store.wait()
    deadline = time.monotonic() + 10
    while "fakecuda-host" in maps.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine.stdin.close()
    assert engine.wait(30) == 0, host.log("engine")
    assert not host.broken_rules("engine")


def test_no_node_that_gives_memory_fails_the_setup_with_the_reason(host):
    store = host.store(fail="cuMemCreate:*=801")
    assert store.stdout.readline().strip() != "0"
    assert "--cap-add SYS_NICE" in host.log("store")
    store.stdin.close()
    assert store.wait(30) == 0


def test_an_allocator_before_the_library_is_refused(host):
    source = host.folder / "allocator.c"
    source.write_text("extern void __libc_free(void *); void free(void *p) { __libc_free(p); }\n")
    allocator = host.folder / "allocator.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", source, "-o", allocator], check=True)
    store = host.store(preload=f"{allocator}:{LIBRARY}")
    assert store.stdout.readline().strip() != "0"
    assert "allocator.so" in host.log("store") and "LD_PRELOAD" in host.log("store")
    store.kill()


def test_an_allocator_after_the_library_gets_its_own_memory_only(host):
    """Its free dies of any pointer that it has not made: a header before the block says whose it is."""
    source = host.folder / "allocator.c"
    source.write_text(r"""
#include <stdlib.h>
#include <string.h>
extern void *__libc_memalign(size_t, size_t); extern void __libc_free(void *);
struct head { size_t mark, bytes, align, pad; };
#define MARK 0x7465737465643231ul
void *memalign(size_t align, size_t bytes) {
    if (align < sizeof(struct head)) align = sizeof(struct head);
    char *block = __libc_memalign(align, align + bytes);
    if (!block) return NULL;
    ((struct head *)(block + align))[-1] = (struct head){MARK, bytes, align, 0};
    return block + align;
}
void *aligned_alloc(size_t align, size_t bytes) { return memalign(align, bytes); }
int posix_memalign(void **to, size_t align, size_t bytes) { *to = memalign(align, bytes); return *to ? 0 : 12; }
void *malloc(size_t bytes) { return memalign(16, bytes); }
void *calloc(size_t n, size_t each) { void *to = malloc(n * each); return to ? memset(to, 0, n * each) : NULL; }
void free(void *block) {
    struct head *head = (struct head *)block - 1;
    if (!block) return;
    if (head->mark != MARK) abort();
    head->mark = 0;
    __libc_free((char *)block - head->align);
}
void *realloc(void *block, size_t bytes) {
    void *to = malloc(bytes);
    size_t old = block ? ((struct head *)block)[-1].bytes : 0;
    if (!to) return NULL;
    memcpy(to, block, old < bytes ? old : bytes);
    free(block);
    return to;
}
""")
    allocator = host.folder / "allocator.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-fno-builtin", "-w", source, "-o", allocator], check=True)
    store = host.store(preload=f"{LIBRARY}:{allocator}")
    assert store.stdout.readline().strip() == "0", host.log("store")
    store.stdin.close()
    assert store.stdout.readline().strip() == "close 0"
    assert store.wait(30) == 0, host.log("store")
