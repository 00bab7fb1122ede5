#!/usr/bin/env python3
"""Stock Mooncake, Tidepool, Tidepool without its copies, and the pinned-copy limit, by turns in one run on a GPU machine.

One wheel, one GPU. Each side has a master, a store and an engine process of its own, which live for the whole run. A
round of a shape is one put and one get of all its keys; every byte of a get is compared (random data, a poisoned
target). Stock Mooncake gets fewer keys of the same blocks, so that its rounds end within about three seconds, and is
compared by its rate. T_null is the time of the library that copies nothing: what Mooncake itself needs, its calls not
divided. E = max(T_null, bytes / limit) / T: about 1 is the best that this machine and Mooncake allow.

With --segments, further sides: Tidepool with its store on memfd or on files instead of CUDA VMM memory, and the engine
registering that memory (register_peer_memory), one side for each --engine-conf; compared with Tidepool by rate.
With --untuned, two more: `default`, both processes started by `tidepool run` with no settings, and `hand`, the store on memfd
and an engine that is told nothing but the directory. The tidepool side is the tuned one: CUDA VMM memory, batched calls.

It needs nothing but Python and the wheel; torch is used when the wheel's Python has it, else libcuda directly. The
limit of shapes in host memory is memcpy in several threads.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback

MIB = 1 << 20
POISON = 0xA5
BLOCK = 64 * MIB  # of the limit's copies
STOCK_ROUND_S = 1.2  # put, and get
STOCK_HANGS_S = 15  # stock waits a minute for some transfers that it has lost, then fails them
HUGE_PAGES_WAIT_S = 5  # for pages of --segments: nobody is about to give some back, as an earlier store's engines are
STOCK_BUFFERS_A_CALL = 2000  # with more at once, stock fails keys
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "integration", "harness"))
from ports import free_port  # noqa: E402
TIDEPOOL_BITS = {"MC_STORE_BATCHED_GET": "1", "MC_STORE_BATCHED_PUT": "1"}


class Shape:
    """`parts`: the bytes of the buffers of one key, in order. `calls`: a get is a session of that many range calls."""

    def __init__(self, name, what, keys, parts, host=False, readers=1, calls=0):
        self.name, self.what, self.keys, self.parts = name, what, keys, parts
        self.host, self.readers, self.calls = host, readers, calls
        self.key_bytes = sum(parts)
        self.total = keys * self.key_bytes

    def blocks(self):
        kinds = sorted(set(self.parts), reverse=True)
        return " + ".join(f"{self.parts.count(size)} x {size}" for size in kinds)

    def job(self):
        return {"name": self.name, "keys": self.keys, "parts": self.parts, "host": self.host,
                "readers": self.readers, "calls": self.calls}


SHAPES = [
    Shape("16M", "64 keys of 16 MiB", 64, [16 * MIB]),
    Shape("1M", "1024 keys of 1 MiB", 1024, [MIB]),
    Shape("61x64K", "61 buffers of 64 KiB a key", 134, [65536] * 61),
    Shape("128x16K", "128 buffers of 16 KiB a key", 256, [16384] * 128),
    Shape("160x4K", "160 buffers of 4 KiB a key", 512, [4096] * 160),
    Shape("v70", "vLLM Llama-3-70B TP8, block 16", 512, [4096] * 160),
    Shape("v32", "vLLM Qwen3-32B TP2, block 16", 512, [16384] * 128),
    Shape("vds", "vLLM DeepSeek-V3 MLA TP8, block 64, 8 readers", 128, [73728] * 61, readers=8),
    Shape("sdl", "SGLang direct linker 70B TP8, 80 range calls", 128, [16384] * 160, calls=80),
    Shape("mix", "MLA fp8 with indexer", 128, [41984, 8448] * 61),
    Shape("l16g", "LMCache, 80 chunks of 16 MiB, GPU", 80, [16 * MIB]),
    Shape("s32", "SGLang Qwen3-32B TP2, page 64, host", 256, [4 * MIB], host=True),
    Shape("sds", "SGLang DeepSeek-V3, page 64, host", 128, [73728] * 61, host=True),
    Shape("l8", "LMCache Llama-3.1-8B, chunk 256, host", 32, [32 * MIB], host=True),
    Shape("l16", "LMCache, 80 chunks of 16 MiB, host", 80, [16 * MIB], host=True),
]


# ---- in the engine: memory


class HostMemory:
    """Host memory of this process; compared and poisoned by libc."""

    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def __init__(self, size):
        self.size = size
        self.map = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def randomize(self, seed):
        try:
            import numpy
        except ImportError:
            for at in range(0, self.size, 16 * MIB):
                piece = os.urandom(min(16 * MIB, self.size - at))
                ctypes.memmove(self.address + at, piece, len(piece))
            return
        words = numpy.frombuffer(self.map, dtype=numpy.uint64, count=self.size // 8)
        words[:] = numpy.random.default_rng(seed).integers(0, 1 << 64, len(words), dtype=numpy.uint64)
        ctypes.memset(self.address + self.size // 8 * 8, seed & 0xFF, self.size % 8)

    def poison(self, size):
        ctypes.memset(self.address, POISON, size)

    def equals(self, other, size):
        return self.libc.memcmp(self.address, other.address, size) == 0

    def poisoned(self, size):
        # The first byte, and each byte equal to the one after it.
        first = ctypes.string_at(self.address, 1)[0]
        return first == POISON and self.libc.memcmp(self.address, self.address + 1, size - 1) == 0


class TorchMemory:
    """GPU memory of torch."""

    def __init__(self, size):
        import torch

        self.torch, self.size = torch, size
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.address = self.tensor.data_ptr()

    def randomize(self, seed):
        generator = self.torch.Generator(device="cuda").manual_seed(seed)
        self.tensor.random_(0, 256, generator=generator)
        self.torch.cuda.synchronize()

    def poison(self, size):
        self.tensor[:size].fill_(POISON)
        self.torch.cuda.synchronize()

    def equals(self, other, size):
        return bool(self.torch.equal(self.tensor[:size], other.tensor[:size]))

    def poisoned(self, size):
        return bool((self.tensor[:size] == POISON).all().item())


class Driver:
    """libcuda, and a device's primary context in the thread that asks."""

    def __init__(self, device=0):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)

    def call(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} gave {result}")

    def use(self):
        self.call("cuCtxSetCurrent", self.context)


class DriverMemory:
    """GPU memory of libcuda; compared in host memory."""

    def __init__(self, driver, size):
        self.driver, self.size = driver, size
        address = ctypes.c_uint64()
        driver.use()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value

    def __del__(self):
        self.driver.use()
        self.driver.cuda.cuMemFree_v2(ctypes.c_uint64(self.address))

    def randomize(self, seed):
        staging = HostMemory(self.size)
        staging.randomize(seed)
        self.driver.use()
        self.driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), ctypes.c_void_p(staging.address),
                         ctypes.c_size_t(self.size))

    def poison(self, size):
        self.driver.use()
        self.driver.call("cuMemsetD8_v2", ctypes.c_uint64(self.address), ctypes.c_ubyte(POISON), ctypes.c_size_t(size))
        self.driver.call("cuCtxSynchronize")

    def on_host(self, size):
        staging = HostMemory(size)
        self.driver.use()
        self.driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(staging.address), ctypes.c_uint64(self.address),
                         ctypes.c_size_t(size))
        return staging

    def equals(self, other, size):
        return self.on_host(size).equals(other.on_host(size), size)

    def poisoned(self, size):
        return self.on_host(size).poisoned(size)


# ---- in the engine: what it is told to do


class Worker:
    """One process of a side: a store, or an engine. Its methods are the commands."""

    def __init__(self):
        self.store = self.driver = self.torch = None
        self.shape = self.source = None
        self.targets = []
        self.device, self.owner = 0, ""

    def hello(self, gpu, device=0, owner=""):
        """What this process can use: torch, the driver alone, or host memory only. Keys begin with `owner`."""
        self.kind, self.device, self.owner = "host", device, owner
        if gpu:
            try:
                import torch

                if not torch.cuda.is_available():
                    raise RuntimeError("torch sees no GPU")
                torch.cuda.set_device(device)
                torch.zeros(1, device="cuda")
                torch.cuda.synchronize()
                self.torch, self.kind = torch, "torch " + torch.__version__
            except Exception as error:
                print(f"torch is not used: {error!r}", file=sys.stderr)
                self.driver, self.kind = Driver(device), "libcuda"
                self.driver.use()
        name = self.torch.cuda.get_device_name(device) if self.torch else self.kind
        return {"kind": self.kind, "device": name, "python": sys.version.split()[0]}

    def setup(self, master, segment_bytes, local_bytes):
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        return self.store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, local_bytes, "tcp", "", master)

    def warm(self):
        """Enough small keys that the engine opens its store."""
        memory = HostMemory(MIB)
        self.store.register_buffer(memory.address, MIB)
        keys = [f"warm-{random.random()}" for _ in range(8)]
        result = self.store.batch_put_from(keys, [memory.address + 4096 * i for i in range(8)], [4096] * 8)
        self.store.unregister_buffer(memory.address)
        return list(result)

    def memory(self, size, host):
        if host or self.kind == "host":
            return HostMemory(size)
        return TorchMemory(size) if self.torch else DriverMemory(self.driver, size)

    def prepare(self, shape, keys):
        """Buffers for `keys` keys, laid out as engines do: a region a layer, the keys' blocks in no order in each."""
        self.shape = shape = Shape(**{"what": "", **shape})
        size = keys * shape.key_bytes
        self.source = self.memory(size, shape.host)
        self.source.randomize(7)
        self.targets = [self.memory(size, shape.host) for _ in range(shape.readers)]
        for memory in [self.source, *self.targets]:
            result = self.store.register_buffer(memory.address, size)
            if result != 0:
                raise RuntimeError(f"register_buffer of {size} bytes gave {result}")
        slots = list(range(keys))
        random.Random(5).shuffle(slots)
        bases = [0]
        for part in shape.parts:
            bases.append(bases[-1] + part * keys)
        self.offsets = [[base + slot * part for base, part in zip(bases, shape.parts)] for slot in slots]

    def forget(self):
        for memory in [self.source, *self.targets]:
            if memory is not None:
                self.store.unregister_buffer(memory.address)
        self.source, self.targets = None, []
        if self.torch:
            self.torch.cuda.empty_cache()

    def calls(self, base, keys, keys_a_call):
        """The arguments of each call, made before the clock runs."""
        made = []
        for at in range(0, keys, keys_a_call):
            rows = range(at, min(keys, at + keys_a_call))
            made.append(([f"{self.owner}{self.shape.name}-{row}" for row in rows],
                         [[base + offset for offset in self.offsets[row]] for row in rows],
                         [self.shape.parts for _ in rows]))
        return made

    def put(self, keys, keys_a_call):
        """Seconds of putting all keys."""
        calls = self.calls(self.source.address, keys, keys_a_call)
        single = len(self.shape.parts) == 1
        if single:
            calls = [(names, [row[0] for row in rows], [row[0] for row in sizes]) for names, rows, sizes in calls]
        put = self.store.batch_put_from if single else self.store.batch_put_from_multi_buffers
        results = []
        start = time.perf_counter()
        for call in calls:
            results += put(*call)
        seconds = time.perf_counter() - start
        self.expect(results, [0] * keys, "put")
        return seconds

    def get_calls(self, base, keys, keys_a_call):
        """Closures, one a call to Mooncake; each returns (results, what they should be)."""
        store, shape = self.store, self.shape
        calls = self.calls(base, keys, keys_a_call)
        if shape.calls:
            each = len(shape.parts) // shape.calls
            starts = [sum(shape.parts[:at]) for at in range(len(shape.parts))]
            for names, rows, sizes in calls:
                yield lambda names=names: (store.batch_get_session_start(names), [0] * len(names))
                for at in range(0, len(shape.parts), each):
                    cut = slice(at, at + each)
                    arguments = (names, [row[cut] for row in rows], [row[cut] for row in sizes], [starts[cut]] * len(rows))
                    right = [sum(shape.parts[cut])] * len(rows)
                    yield lambda arguments=arguments, right=right: (
                        store.batch_get_into_multi_buffer_ranges(*arguments), right)
                yield lambda names=names: ([store.batch_get_session_end(names)], [0])
            return
        for names, rows, sizes in calls:
            right = [shape.key_bytes] * len(names)
            if len(shape.parts) == 1:
                arguments = (names, [row[0] for row in rows], [row[0] for row in sizes])
                yield lambda arguments=arguments, right=right: (store.batch_get_into(*arguments), right)
            else:
                arguments = (names, rows, sizes)
                yield lambda arguments=arguments, right=right: (store.batch_get_into_multi_buffers(*arguments), right)

    def get(self, keys, keys_a_call, verify="equal"):
        """Seconds until the last reader has all keys, and what lies in the targets: `verify` is equal, poison or none."""
        size = keys * self.shape.key_bytes
        plans = [list(self.get_calls(target.address, keys, keys_a_call)) for target in self.targets]
        if verify != "none":
            for target in self.targets:
                # Layers of fewer keys than were prepared lie apart: poison and compare the whole.
                target.poison(target.size)
        answers = [[] for _ in plans]
        barrier = threading.Barrier(len(plans) + 1)
        ends = [0.0] * len(plans)

        def read(index):
            if self.driver:
                self.driver.use()
            barrier.wait()
            for call in plans[index]:
                answers[index].append(call())
            ends[index] = time.perf_counter()

        threads = [threading.Thread(target=read, args=(index,)) for index in range(len(plans))]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        for reader in answers:
            for got, right in reader:
                self.expect(list(got), right, "get")
        if not all(ends):
            raise RuntimeError("a reader failed")
        state = "not compared"
        if verify == "equal":
            wrong = sum(not target.equals(self.source, size) for target in self.targets)
            state = "equal" if not wrong else f"{wrong} of {len(self.targets)} targets differ"
        elif verify == "poison":
            state = "poison" if all(target.poisoned(size) for target in self.targets) else "bytes moved"
        return {"seconds": max(ends) - start, "state": state}

    @staticmethod
    def expect(results, right, what):
        wrong = [(at, got) for at, (got, want) in enumerate(zip(results, right)) if got != want]
        if wrong or len(results) != len(right):
            raise RuntimeError(f"{what}: {len(wrong)} of {len(right)} results are wrong, the first (index, value): {wrong[:3]}")

    def remove(self):
        return self.store.remove_all(True)

    def repeat(self, way, keys, keys_a_call, seconds):
        """Begin and end (CLOCK_MONOTONIC, s) of each put or get within that time; the last one may end later."""
        spans, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.monotonic()
            took = self.put(keys, keys_a_call) if way == "put" else self.get(keys, keys_a_call, "none")["seconds"]
            spans.append((start, start + took))
            if way == "put":
                self.store.remove_by_regex(f"^{self.owner}{self.shape.name}-.*")
        return spans

    def limit(self, host, seconds=0.4):
        """GB/s of the plain copy: pinned blocks through the copy engine, or memcpy in threads."""
        if host or self.kind == "host":
            rate = self.memcpy_limit(seconds)
            return {"put": rate, "get": rate}
        driver = self.driver or Driver(self.device)
        driver.use()
        pinned, device, stream = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
        driver.call("cuMemAllocHost_v2", ctypes.byref(pinned), ctypes.c_size_t(BLOCK))
        driver.call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(BLOCK))
        driver.call("cuStreamCreate", ctypes.byref(stream), 1)
        rates = {}
        for way, name, order in (("put", "cuMemcpyDtoHAsync_v2", (pinned, device)),
                                 ("get", "cuMemcpyHtoDAsync_v2", (device, pinned))):
            copies = 0
            driver.call(name, *order, ctypes.c_size_t(BLOCK), stream)
            driver.call("cuStreamSynchronize", stream)
            start = time.perf_counter()
            while time.perf_counter() - start < seconds:
                for _ in range(16):
                    driver.call(name, *order, ctypes.c_size_t(BLOCK), stream)
                driver.call("cuStreamSynchronize", stream)
                copies += 16
            rates[way] = copies * BLOCK / (time.perf_counter() - start) / 1e9
        driver.call("cuStreamDestroy_v2", stream)
        driver.call("cuMemFree_v2", device)
        driver.call("cuMemFreeHost", pinned)
        return rates

    @staticmethod
    def memcpy_limit(seconds):
        threads = max(1, min(16, len(os.sched_getaffinity(0))))
        moved = [0] * threads
        pairs = [(HostMemory(BLOCK), HostMemory(BLOCK)) for _ in range(threads)]
        for pair in pairs:
            for memory in pair:
                memory.poison(BLOCK)
        end = time.perf_counter() + seconds

        def copy(index):
            to, source = pairs[index]
            while time.perf_counter() < end:
                ctypes.memmove(to.address, source.address, BLOCK)
                moved[index] += BLOCK

        start = time.perf_counter()
        running = [threading.Thread(target=copy, args=(index,)) for index in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sum(moved) / (time.perf_counter() - start) / 1e9

    def matmul(self, keys, keys_a_call, seconds=2.0):
        """TFLOP/s of a bf16 matmul loop alone, and while this process gets; and the gets' median GB/s meanwhile."""
        torch = self.torch
        if torch is None:
            raise RuntimeError("--matmul needs torch on a GPU")
        n = 8192
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = torch.empty_like(a)
        state = {"stop": False, "done": 0}

        def loop():
            events = []
            while not state["stop"]:
                torch.matmul(a, b, out=c)
                event = torch.cuda.Event()
                event.record()
                events.append(event)
                if len(events) == 4:
                    events.pop(0).synchronize()
                    state["done"] += 1
            torch.cuda.synchronize()

        def rate(work):
            done, start = state["done"], time.perf_counter()
            work(start + seconds)
            return (state["done"] - done) * 2 * n**3 / (time.perf_counter() - start) / 1e12

        times = []

        def gets(end):
            while time.perf_counter() < end:
                times.append(self.get(keys, keys_a_call, "none")["seconds"])

        thread = threading.Thread(target=loop)
        thread.start()
        time.sleep(0.5)
        alone = rate(lambda end: time.sleep(max(0, end - time.perf_counter())))
        during = rate(gets)
        state["stop"] = True
        thread.join()
        size = keys * self.shape.key_bytes * self.shape.readers
        return {"tflops_alone": alone, "tflops_during": during, "gets": len(times),
                "get_gbps": size / statistics.median(times) / 1e9}

    def close(self):
        return self.store.close() if self.store else 0


def work():
    """Commands as JSON lines on standard input; answers on what was standard output (libraries print to it)."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            value = getattr(worker, command["do"])(**command["with"])
            answers.write(json.dumps({"value": value}) + "\n")
        except Exception as error:
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


# ---- in the program that measures


class Failure(Exception):
    """Something of one side failed; the message says what, with the end of its log."""


class Ended(SystemExit):
    """A signal asks this program to end."""


def end_on_signals():
    """What `timeout`, Ctrl-C and a closed terminal send ends the processes of all sides too, and removes the folder."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def end(number, _):
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        Process.hurry = True
        print(f"gpu_bench: {signal.Signals(number).name}: ending", file=sys.stderr, flush=True)
        raise Ended(128 + number)

    for number in signals:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, end)


def with_parent(parent=os.getpid()):
    """In a child, before exec: it ends when the program does, however that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill(popen):
    popen.kill()
    try:
        popen.wait(20)  # gigabytes of pinned memory are given back first
    except subprocess.TimeoutExpired:
        print(f"gpu_bench: process {popen.pid} does not end", file=sys.stderr, flush=True)


class Process:
    """A worker, on the wheel's Python."""

    hurry = False  # nobody is asked to close

    def __init__(self, name, python, environment, folder, before=()):
        self.name, self.log = name, os.path.join(folder, name + ".log")
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen([*before, python, os.path.abspath(__file__), "--worker"], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=log, env=environment, preexec_fn=with_parent)

    def call(self, do, limit_s=60, **arguments):
        self.ask(do, **arguments)
        return self.answer(do, limit_s)

    def ask(self, do, **arguments):
        self.popen.stdin.write((json.dumps({"do": do, "with": arguments}) + "\n").encode())
        self.popen.stdin.flush()

    def answer(self, do, limit_s=60):
        if not select.select([self.popen.stdout], [], [], limit_s)[0]:
            self.popen.kill()
            raise Failure(f"{self.name}: {do} took longer than {limit_s} s\n{self.tail()}")
        line = self.popen.stdout.readline()
        if not line:
            raise Failure(f"{self.name}: ended with {self.popen.wait(10)} during {do}\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(f"{self.name}: {do}: {answer['error']}\n{self.tail()}")
        return answer["value"]

    def tail(self):
        with open(self.log, errors="replace") as file:
            return "".join("    | " + line for line in file.readlines()[-15:])

    def end(self):
        if self.popen.poll() is None and not Process.hurry:
            try:
                self.call("close", limit_s=10)
            except (Failure, OSError):
                pass
        kill(self.popen)


class Side:
    """stock, tidepool, null, registered-N, default or hand: a master, a store, an engine."""

    def __init__(self, name, options, folder, wheel_folder):
        self.name, self.options = name, options
        self.segments, self.conf = None, {}
        if name.startswith("registered"):
            self.segments, self.conf = options.segments, options.engine_conf[int(name.rpartition("-")[2]) - 1]
        elif name == "hand":
            self.segments = "memfd"
        elif options.store_memory != "cumem":
            self.segments = options.store_memory
        self.folder = os.path.join(folder, name)
        self.directory = os.path.join(self.folder, "sockets")
        os.makedirs(self.directory)
        os.chmod(self.directory, 0o700)
        self.processes, self.master = [], None
        self.rate = {}
        try:
            self.start(wheel_folder)
        except BaseException:
            self.end()
            raise

    def environment(self, store):
        made = {key: value for key, value in os.environ.items()
                if not key.startswith(("MC_", "TIDEPOOL_", "MOONCAKE_", "LD_PRELOAD"))}
        made.update(GLOG_logtostderr="1", PYTHONUNBUFFERED="1")
        if self.name == "stock":
            return made
        made.update(TIDEPOOL_LOG="info")
        if self.name == "default":
            return made
        made["LD_PRELOAD"] = os.path.abspath(self.options.null_lib if self.name == "null" and not store else self.options.lib)
        if store and not self.segments:
            made["MC_STORE_CUMEM_SOCKET_DIR"] = self.directory
        elif store:
            made.update(MC_STORE_SHM_SEGMENT_DIR=self.segments, TIDEPOOL_SOCKET_DIR=self.directory,
                        MC_STORE_SHM_SEGMENT_WAIT_S=str(HUGE_PAGES_WAIT_S))
        else:
            key = "socket_dir" if self.segments else "cumem_socket_dir"
            shm = {"enable": True, key: self.directory, **self.conf}
            made["MC_TENT_CONF"] = json.dumps({"transports": {"shm": shm}})
            made.update(TIDEPOOL_BITS if self.name != "hand" else {})
            if self.name == "null":  # what Mooncake's calls take as they are
                made.update(TIDEPOOL_CALL_THREADS="1")
        return made

    def before(self, half):
        """The words before a process's command."""
        if self.name != "default":
            return []
        return [self.options.tool, "run", half, self.directory, "--lib", os.path.abspath(self.options.lib), "--"]

    def start(self, wheel_folder):
        memory = self.segments or ("cumem" if self.name != "stock" else "its own memory")
        print(f"gpu_bench: starting {self.name}: a store of {self.options.store_gib:g} GiB in {memory}", file=sys.stderr, flush=True)
        port = free_port()
        with open(os.path.join(self.folder, "master.log"), "ab") as log:
            self.master = subprocess.Popen(
                [os.path.join(wheel_folder, "mooncake_master"), "-port", str(port), "-metrics_port", str(free_port()),
                 "-default_kv_lease_ttl", "10000"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(True) if self.name == "stock" else {
                    key: value for key, value in self.environment(True).items() if key != "LD_PRELOAD"},
                preexec_fn=with_parent)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or self.master.poll() is not None:
                    raise Failure(f"{self.name}: the master does not listen") from None
                time.sleep(0.05)
        address = self.master_address = f"127.0.0.1:{port}"
        python = self.options.wheel_python
        store = Process(f"{self.name}-store", python, self.environment(True), self.folder, self.before("--store"))
        self.processes.append(store)
        result = store.call("setup", limit_s=120, master=address, segment_bytes=int(self.options.store_gib * 1024) * MIB,
                            local_bytes=16 * MIB)
        if result != 0:
            raise Failure(f"{store.name}: setup gave {result}\n{store.tail()}")
        if self.name == "default":
            with open(store.log, errors="replace") as log:
                self.segments = next((line.strip() for line in log if "store memory" in line), "tidepool run")
        self.engine = Process(f"{self.name}-engine", python, self.environment(False), self.folder, self.before("--engine"))
        self.processes.append(self.engine)
        self.hello = self.engine.call("hello", limit_s=120, gpu=not self.options.host)
        result = self.engine.call("setup", limit_s=60, master=address, segment_bytes=0, local_bytes=64 * MIB)
        if result != 0:
            raise Failure(f"{self.engine.name}: setup gave {result}\n{self.engine.tail()}")
        self.attach()

    def attach(self):
        deadline = time.monotonic() + 60
        while True:
            self.engine.call("warm")
            if self.name == "stock":
                return
            peers = self.status().get("peers", [])
            if peers and all(peer["pieces_mapped"] == peer["pieces"] > 0 for peer in peers):
                break
            if time.monotonic() > deadline:
                raise Failure(f"{self.name}: the engine has not mapped its store after 60 s\n{self.engine.tail()}")
            time.sleep(0.2)
        self.engine.call("remove")

    def status(self):
        """What `tidepool status` says about the engine."""
        done = subprocess.run([self.options.tool, "status", self.directory, "--json"], capture_output=True, text=True,
                              timeout=30)
        try:
            processes = json.loads(done.stdout)["processes"]
        except (ValueError, KeyError):
            return {}
        return next((process for process in processes if process.get("pid") == self.engine.popen.pid), {})

    def counters(self):
        return {} if self.name == "stock" else self.status().get("counters", {})

    def keys_for(self, shape):
        """As many keys as this side moves in the time that a round may take."""
        return shape.keys if self.name != "stock" else self.stock_keys

    def a_call(self, shape):
        if self.name != "stock":
            return shape.keys
        at_once = STOCK_BUFFERS_A_CALL if shape.readers == 1 else STOCK_BUFFERS_A_CALL // (4 * shape.readers)
        return max(1, at_once // len(shape.parts))

    def prepare(self, shape):
        if self.name == "stock":
            self.find_stock_keys(shape)
        self.engine.call("prepare", limit_s=120, shape=shape.job(), keys=self.keys_for(shape))

    def find_stock_keys(self, shape):
        """A small round tells how many keys fit into a round's time."""
        few = max(1, min(600 // len(shape.parts), 16 * MIB // shape.key_bytes) // shape.readers)
        few = min(shape.keys, few)
        self.engine.call("prepare", limit_s=120, shape=shape.job(), keys=few)
        try:
            put = self.engine.call("put", limit_s=STOCK_HANGS_S, keys=few, keys_a_call=self.a_call(shape))
            get = self.engine.call("get", limit_s=STOCK_HANGS_S, keys=few, keys_a_call=self.a_call(shape))["seconds"]
            self.engine.call("remove")
        finally:
            self.engine.call("forget")
        self.stock_keys = max(1, min(shape.keys, int(few * STOCK_ROUND_S / max(put, get))))

    def round(self, shape, verify):
        keys, at_once = self.keys_for(shape), self.a_call(shape)
        limit_s = STOCK_HANGS_S if self.name == "stock" else 60
        put = self.engine.call("put", limit_s=limit_s, keys=keys, keys_a_call=at_once)
        got = self.engine.call("get", limit_s=limit_s, keys=keys, keys_a_call=at_once, verify=verify)
        self.engine.call("remove")
        return {"put": put, "get": got["seconds"], "state": got["state"]}

    def end(self):
        for process in reversed(self.processes):
            process.end()
        if self.master is not None:
            kill(self.master)


def state_after_get(name):
    return "poison" if name == "null" else "equal"


def is_ours(name):
    """Does this side copy through shared memory?"""
    return name in ("tidepool", "default", "hand") or name.startswith("registered")


def measure(shape, sides, options):
    """The row of one shape: medians in seconds and GB/s, limits, E, and what proves the path."""
    row = {"shape": shape.name, "what": shape.what, "keys": shape.keys, "blocks": shape.blocks(), "host": shape.host,
           "readers": shape.readers, "bytes": shape.total, "sides": {}, "problems": []}
    taking_part, times = dict(sides), {}

    def round_of(side):
        """One round that is compared, or None: what stock fails at is a result too, and the others go on."""
        try:
            if side.name not in times:
                side.prepare(shape)
            done = side.round(shape, state_after_get(side.name))
        except Failure as error:
            if side.name != "stock":
                raise
            del taking_part["stock"]
            times.pop("stock", None)
            row["stock_failure"] = str(error)
            return None
        if done["state"] != state_after_get(side.name):
            row["problems"].append(f"{side.name}: after a get: {done['state']}")
        return done

    for side in sides.values():
        if round_of(side):
            times[side.name] = {"put": [], "get": []}
    for _ in range(options.warm - 1):
        for side in list(taking_part.values()):
            if is_ours(side.name):
                round_of(side)
    before = {name: side.counters() for name, side in sides.items() if is_ours(name)}
    for number in range(options.pairs):
        order = list(taking_part.values())
        for side in order if number % 2 else reversed(order):
            done = round_of(side)
            for way in ("put", "get") if done else ():
                times[side.name][way].append(done[way])
    row["limit"] = sides["tidepool"].engine.call("limit", host=shape.host)
    for name in before:
        changed = prove_path(row, shape, name, before[name], sides[name].counters(), options)
        if name == "tidepool":
            row["counters"] = changed
        else:
            row.setdefault("registrar", {})[name] = {"conf": sides[name].conf, "segments": sides[name].segments,
                                                     "counters": changed}
    compute(row, shape, taking_part, times)
    if options.matmul and shape.name == "v32":
        row["matmul"] = matmul(shape, taking_part)
    for side in taking_part.values():
        side.engine.call("forget")
    return row


def compute(row, shape, sides, times):
    """Seconds become GB/s, ratios and E."""
    for name, side in sides.items():
        keys = side.keys_for(shape)
        size = {"put": keys * shape.key_bytes, "get": keys * shape.key_bytes * shape.readers}
        row["sides"][name] = {"keys": keys}
        for way in ("put", "get"):
            median = statistics.median(times[name][way])
            row["sides"][name][way] = {"seconds": median, "gbps": size[way] / median / 1e9, "times": times[name][way]}
    for way in ("put", "get"):
        of = row["sides"]["tidepool"][way]
        floor = row["sides"]["null"][way]["seconds"] if "null" in row["sides"] else 0.0
        at_limit = shape.total * (shape.readers if way == "get" else 1) / (row["limit"][way] * 1e9)
        of["e"] = max(floor, at_limit) / of["seconds"]
        for name in row.get("registrar", {}):
            row["sides"][name][way]["of_tidepool"] = row["sides"][name][way]["gbps"] / of["gbps"]
        if "stock" in row["sides"]:
            of["ratio"] = of["gbps"] / row["sides"]["stock"][way]["gbps"]


def prove_path(row, shape, name, before, after, options):
    """The counters of a side's engine must show every byte on the short way. What has changed."""
    moved = {"local_write_bytes": options.pairs * shape.total,
             "local_read_bytes": options.pairs * shape.total * shape.readers, "forward_bytes": 0}
    changed = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    if not after:
        row["problems"].append(f"{name}: `tidepool status` does not show the engine")
    for key, want in moved.items():
        if changed.get(key, 0) != want:
            row["problems"].append(f"{name}: {key} grew by {changed.get(key, 0)}, not by {want}")
    if "registered_bytes" in after:
        changed["registered_bytes"] = after["registered_bytes"]
    return changed


def matmul(shape, sides):
    found = {}
    for name in ("stock", "tidepool"):
        if name not in sides:
            continue
        side = sides[name]
        keys, at_once = side.keys_for(shape), side.a_call(shape)
        side.engine.call("put", keys=keys, keys_a_call=at_once)
        found[name] = side.engine.call("matmul", limit_s=120, keys=keys, keys_a_call=at_once)
        side.engine.call("remove")
    return found


def show(row):
    for way in ("put", "get"):
        side = {name: value[way]["gbps"] for name, value in row["sides"].items()}
        of = row["sides"]["tidepool"][way]
        label = row["shape"] if way == "put" else ""
        print(f"{label:8} {way}  {side.get('stock', 0):7.2f} {side['tidepool']:9.2f} {of.get('ratio', 0):7.1f}x "
              f"{side.get('null', 0):8.2f} {row['limit'][way]:7.2f} {of['e']:6.2f}   "
              + (f"{row['keys']} keys of {row['blocks']}" if way == "put" else how(row)), flush=True)
    for name, about in row.get("registrar", {}).items():
        print(f"         {name}:", flush=True)
        show_registered(row["sides"][name], about)
    for name, value in row.get("matmul", {}).items():
        print(f"         matmul {value['tflops_alone']:.0f} TFLOP/s alone, {value['tflops_during']:.0f} during gets of"
              f" {name}, which moved {value['get_gbps']:.2f} GB/s", flush=True)
    if "stock_failure" in row:
        print(f"         stock failed: {row['stock_failure'].splitlines()[0]}", flush=True)
    for problem in row["problems"]:
        print(f"         PROBLEM: {problem}", flush=True)


def show_registered(side, about):
    counters = about["counters"]
    print(f"         {about['segments']} {json.dumps(about['conf'])}: put {side['put']['gbps']:.2f}, get {side['get']['gbps']:.2f}"
          f" GB/s: {side['put']['of_tidepool']:.3f} and {side['get']['of_tidepool']:.3f} of cumem;"
          f" {counters.get('registered_bytes', 0) / MIB:.0f} MiB registered, {counters.get('registrations', 0)} registrations,"
          f" {counters.get('register_evictions', 0)} evictions, {counters.get('register_hits', 0)} hits,"
          f" {counters.get('register_misses', 0)} misses, {counters.get('register_full', 0)} times full,"
          f" {counters.get('register_failures', 0)} failures; {how({'counters': counters})}", flush=True)


def how(row):
    """By what the bytes moved, as far as the counters tell."""
    counters = row["counters"]
    known = [(name, counters.get(name, 0)) for name in ("dma_bytes", "kernel_bytes", "staged_bytes")]
    text = ", ".join(f"{name.split('_')[0]} {value / MIB:.0f} MiB" for name, value in known if value)
    return text or "host copies"


def arguments():
    beside = next((folder for folder in (os.path.join(ROOT, "build"), HERE)
                   if os.path.exists(os.path.join(folder, "libtidepool.so"))), ROOT)
    null = next((path for path in (os.path.join(ROOT, "build-null/tests/bench/libtidepool-null.so"),
                                   os.path.join(beside, "libtidepool-null.so")) if os.path.exists(path)), None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="names, separated by commas (default: all): " + ", ".join(s.name for s in SHAPES))
    parser.add_argument("--pairs", type=int, default=3, help="rounds of each side a shape (default 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the keys (default 1)")
    parser.add_argument("--threads", type=int, default=0, help="readers of each GPU shape (default: 8 for vds, else 1)")
    parser.add_argument("--wheel-python", default=sys.executable, help="a Python that imports mooncake (default: this one)")
    parser.add_argument("--lib", default=os.path.join(beside, "libtidepool.so"), help="default: %(default)s")
    parser.add_argument("--tool", help="the tidepool program (default: beside the library)")
    parser.add_argument("--null-lib", default=null, help="libtidepool-null.so, built with -Dnull_copies=true; without it, no T_null")
    parser.add_argument("--no-stock", action="store_true", help="do not measure stock Mooncake")
    parser.add_argument("--host", action="store_true", help="everything in host memory: no GPU is used")
    parser.add_argument("--store-memory", choices=["cumem", "memfd"], help="default: cumem, with --host memfd")
    parser.add_argument("--segments", metavar="DIR|memfd", help="also Tidepool with its store there, memory registered: a"
                        " directory on tmpfs or hugetlbfs, or memfd")
    parser.add_argument("--engine-conf", metavar="JSON", action="append", help="with --segments: keys of transports.shm of"
                        " that side's engine, such as '{\"register_max_bytes\": \"256M\"}'; may be given several times: a side each")
    parser.add_argument("--untuned", action="store_true", help="also Tidepool as `tidepool run` sets it up, and memfd by hand")
    parser.add_argument("--warm", type=int, default=1, help="rounds of each Tidepool side before those that count (default 1)")
    parser.add_argument("--store-gib", type=float, default=4, help="each store's segment (default 4)")
    parser.add_argument("--matmul", action="store_true", help="also gets beside a bf16 matmul loop (shape v32; torch)")
    parser.add_argument("--json", metavar="FILE", help="write every measured time here, after each shape")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the processes' logs there")
    options = parser.parse_args()
    options.tool = options.tool or os.path.join(os.path.dirname(os.path.abspath(options.lib)), "tidepool")
    options.store_memory = options.store_memory or ("memfd" if options.host else "cumem")
    if options.engine_conf and not options.segments:
        parser.error("--engine-conf needs --segments")
    if options.segments and options.store_memory != "cumem":
        parser.error("--segments compares with CUDA VMM memory: not with --host or --store-memory memfd")
    try:
        made = [json.loads(text) for text in options.engine_conf or ["{}"]] if options.segments else []
        options.engine_conf = [{"register_peer_memory": True, **conf} for conf in made]
    except (ValueError, TypeError) as error:
        parser.error(f"--engine-conf: {error}")
    for path in (options.lib, options.tool, options.null_lib):
        if path and not os.path.exists(path):
            parser.error(f"{path} does not exist")
    return options


def chosen(options):
    shapes = SHAPES
    if options.shapes:
        names = options.shapes.split(",")
        unknown = set(names) - {shape.name for shape in SHAPES}
        if unknown:
            sys.exit(f"gpu_bench: no such shape: {', '.join(sorted(unknown))}")
        shapes = [shape for shape in SHAPES if shape.name in names]
    made = []
    for shape in shapes:
        readers = options.threads if options.threads and not shape.host else shape.readers
        keys = max(1, round(shape.keys * options.scale))
        made.append(Shape(shape.name, shape.what, keys, shape.parts, shape.host, readers, shape.calls))
    room = int(options.store_gib * 1024) * MIB * 0.85
    too_large = [shape.name for shape in made if shape.total > room]
    if too_large:
        sys.exit(f"gpu_bench: --store-gib {options.store_gib} is too small for {', '.join(too_large)}")
    return made


def wheel_folder(python):
    code = "import importlib.util as u; print(u.find_spec('mooncake').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"gpu_bench: {python} does not find mooncake: {done.stderr.strip()[-300:]}")
    folder = done.stdout.strip()
    # pip --target keeps no modes; a wheel that was unpacked by hand may not either.
    master = os.path.join(folder, "mooncake_master")
    if not os.access(master, os.X_OK):
        try:
            os.chmod(master, 0o755)
        except OSError as error:
            sys.exit(f"gpu_bench: {master} cannot be run: {error}")
    return folder


def write_json(options, report):
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def run(options, folder, report):
    shapes, wheel = chosen(options), wheel_folder(options.wheel_python)
    names = [name for name in ("stock", "tidepool", "null")
             if not (name == "stock" and options.no_stock) and not (name == "null" and not options.null_lib)]
    names += [f"registered-{number + 1}" for number in range(len(options.engine_conf))]
    names += ["default", "hand"] if options.untuned else []
    sides, failed = {}, 0
    try:
        for name in names:
            try:
                sides[name] = Side(name, options, folder, wheel)
            except Failure as error:
                if name == "tidepool":
                    raise
                failed += 1
                print(f"gpu_bench: goes on without {name}: {error}", flush=True)
        report.update(sides["tidepool"].hello, wheel=wheel, cores=len(os.sched_getaffinity(0)))
        print(f"gpu_bench: {report['device']}, {report['kind']}, {report['cores']} cores; {wheel}\n"
              f"GB/s, medians of {options.pairs} rounds\n{'shape':8} {'':3}  {'stock':>7} {'tidepool':>9} {'ratio':>8} "
              f"{'T_null':>8} {'limit':>7} {'E':>6}   what, and by what", flush=True)
        for shape in shapes:
            try:
                row = measure(shape, sides, options)
                show(row)
                if "stock_failure" in row:
                    recover(sides["stock"], sides, options, folder, wheel)
                failed += bool(row["problems"])
            except Failure as error:
                row = {"shape": shape.name, "failure": str(error)}
                print(f"{shape.name:8} FAILED: {error}", flush=True)
                failed += 1
                for side in list(sides.values()):
                    recover(side, sides, options, folder, wheel)
            report["rows"].append(row)
            write_json(options, report)
    finally:
        for side in sides.values():
            side.end()
    return failed


def recover(side, sides, options, folder, wheel):
    """After a failure: the side as it was, or a new one."""
    try:
        side.engine.call("forget")
        side.engine.call("remove")
    except (Failure, OSError):
        side.end()
        again = os.path.join(folder, f"again-{time.monotonic_ns()}")
        sides[side.name] = Side(side.name, options, again, wheel)


def main():
    options, start = arguments(), time.monotonic()
    end_on_signals()
    folder = tempfile.mkdtemp(prefix="tidepool-bench-")
    report = {"options": vars(options), "rows": []}
    try:
        failed = run(options, folder, report)
    except Failure as error:
        print(f"gpu_bench: FAILED: {error}", flush=True)
        failed, report["failure"] = 1, str(error)
    finally:
        if options.logs:
            shutil.copytree(folder, options.logs, dirs_exist_ok=True,
                            ignore=lambda at, found: ["sockets"] if "sockets" in found else [])
        shutil.rmtree(folder, ignore_errors=True)
    report["seconds"] = round(time.monotonic() - start, 1)
    write_json(options, report)
    print(f"gpu_bench: {report['seconds']:.0f} s, {failed} with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        sys.exit(main())
