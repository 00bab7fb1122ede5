"""Paired measurements: stock beside Tidepool beside plain memcpy, turn by turn in one run on one machine.

The engine processes live for the whole run; a round of one shape is one put and one get of all its keys on each side,
the order of the sides changing from round to round. Every byte of every round is compared.
"""

import os
import platform
import statistics
import subprocess
from dataclasses import dataclass

from . import actions_store as actions
from . import wheels
from .cluster import MIB, Cluster

WORST_CALL_S = 280
STOCK_BUFFERS_A_CALL = 2000


@dataclass(frozen=True)
class Shape:
    name: str
    what: str
    keys: int
    blocks: int
    block_bytes: int

    @property
    def total(self):
        return self.keys * self.blocks * self.block_bytes

    def scaled(self, scale):
        """Fewer keys, never other blocks."""
        return Shape(self.name, self.what, max(1, round(self.keys * scale)), self.blocks, self.block_bytes)


CORE = [
    Shape("16M", "one buffer of 16 MiB a key", 16, 1, 16 << 20),
    Shape("1M", "one buffer of 1 MiB a key", 128, 1, 1 << 20),
    Shape("256K", "one buffer of 256 KiB a key", 512, 1, 256 << 10),
    Shape("61x64K", "61 buffers of 64 KiB a key", 32, 61, 64 << 10),
]
ENGINES = [
    Shape("s32", "SGLang Qwen3-32B TP2, page 64, page_first", 256, 1, 4 << 20),
    Shape("sds", "SGLang DeepSeek-V3, page 64, layer_first", 128, 61, 73728),
    Shape("l8", "LMCache Llama-3.1-8B, chunk 256", 32, 1, 32 << 20),
    Shape("l16", "LMCache, 80 chunks of 16 MiB", 80, 1, 16 << 20),
]


def machine():
    model = "unknown processor"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) // (1 << 20)
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory,
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


class PlainMemcpy:
    """The same blocks, copied by memcpy in one thread a core."""

    def __init__(self, shape, direction):
        self.shape = shape
        command = [wheels.BUILD / "tests/bench/plain_memcpy", str(shape.keys * shape.blocks), str(shape.block_bytes)]
        self.popen = subprocess.Popen(
            command + [direction], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def seconds(self):
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        return float(self.popen.stdout.readline())

    def end(self):
        self.popen.stdin.close()
        self.popen.wait(10)


class Side:
    """A master, a store and engines, with Tidepool or without."""

    def __init__(self, name, folder, segment_bytes, engines=1):
        os.mkdir(folder)
        self.name = name
        self.cluster = Cluster(wheels.CPU, folder, stock=name == "stock")
        self.store = self.cluster.store(segment_bytes=segment_bytes)
        self.engines = [self.cluster.engine(f"engine{index}") for index in range(engines)]
        for engine in self.engines:
            self.cluster.warm(engine)
        self.rounds = 0

    def run(self, shape):
        """Seconds of one put and one get. Stock Mooncake fails keys when one call holds thousands of buffers, so it
        gets several calls."""
        self.rounds += 1
        at_once = shape.keys if self.name == "tidepool" else max(1, STOCK_BUFFERS_A_CALL // shape.blocks)
        return self.engines[0].call(
            actions.timed,
            limit_s=WORST_CALL_S,
            name=shape.name,
            number=self.rounds,
            keys=shape.keys,
            blocks=shape.blocks,
            block_bytes=shape.block_bytes,
            keys_a_call=at_once,
        )

    def forget(self, shape):
        self.engines[0].call(actions.forget_buffers, name=shape.name)

    def end(self):
        self.cluster.__exit__()


def segment_for(shapes):
    """Room for one round of the largest shape, below the master's mark for eviction."""
    return max(512 * MIB, int(1.5 * max(shape.total for shape in shapes)))


def measure(shape, stock, tidepool, pairs):
    """Medians in GB/s of `pairs` rounds of each side, and how many bytes were compared."""
    plain = {direction: PlainMemcpy(shape, direction) for direction in ("put", "get")}
    times = {side: {"put": [], "get": []} for side in ("stock", "tidepool", "memcpy")}
    engine = tidepool.engines[0]
    for side in (stock, tidepool):
        side.run(shape)
    before = tidepool.cluster.counters(engine)
    for number in range(pairs):
        for side in (stock, tidepool) if number % 2 else (tidepool, stock):
            result = side.run(shape)
            for direction in ("put", "get"):
                times[side.name][direction].append(result[direction])
        for direction in ("put", "get"):
            times["memcpy"][direction].append(plain[direction].seconds())
    after = tidepool.cluster.counters(engine)
    for process in plain.values():
        process.end()
    for side in (stock, tidepool):
        side.forget(shape)
    local = sum(after[name] - before[name] for name in ("local_write_bytes", "local_read_bytes"))
    forward = after["forward_bytes"] - before["forward_bytes"]
    row = {
        "shape": shape.name,
        "what": shape.what,
        "keys": shape.keys,
        "blocks": shape.blocks,
        "block_bytes": shape.block_bytes,
        "pairs": pairs,
        # The first round of each side, which warms up, is compared as well.
        "verified_bytes": 2 * (pairs + 1) * shape.total,
        "local_bytes": local,
        "forward_bytes": forward,
        "moved_bytes": 2 * pairs * shape.total,
    }
    for direction in ("put", "get"):
        speed = {side: shape.total / statistics.median(times[side][direction]) / 1e9 for side in times}
        row[direction] = {
            **{side: round(value, 3) for side, value in speed.items()},
            "ratio": round(speed["tidepool"] / speed["stock"], 2),
            "of_memcpy": round(speed["tidepool"] / speed["memcpy"], 2),
            "times_s": {side: [round(value, 5) for value in times[side][direction]] for side in times},
        }
    return row


HEADING = (
    f"{'shape':8} {'':3} {'stock':>7} {'tidepool':>9} {'ratio':>7} {'memcpy':>7} {'of it':>6}   "
    f"{'verified':>9}   path taken"
)


def path_taken(row):
    share = row["local_bytes"] / row["moved_bytes"]
    if row["forward_bytes"] == 0 and row["local_bytes"] == row["moved_bytes"]:
        return "shared memory, every byte"
    return f"shared memory {share:.0%}, Mooncake's transport {row['forward_bytes'] / row['moved_bytes']:.0%}"


def lines(row):
    """The row as text: GB/s of put and get."""
    size = row["verified_bytes"] / (1 << 30)
    for direction in ("put", "get"):
        it = row[direction]
        tail = f"{size:6.1f} GiB   {path_taken(row)}" if direction == "put" else ""
        yield (
            f"{row['shape'] if direction == 'put' else '':8} {direction:3} {it['stock']:7.2f} {it['tidepool']:9.2f} "
            f"{it['ratio']:6.1f}x {it['memcpy']:7.2f} {it['of_memcpy']:6.2f}   {tail}"
        ).rstrip()
