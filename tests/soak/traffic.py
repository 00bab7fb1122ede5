"""What an engine of the soak test does: random calls on random keys, every byte of every successful get compared.

Runs in the engine's process, on the stock wheel (harness/worker.py).
"""

import collections
import json
import random
import threading
import time
import traceback

from blocks import LARGEST, POISON, Table, fill, first_difference, generation_of
from harness import actions_store
from harness.memory import Buffer

GAP = 64
ROOM = LARGEST + (8 << 20)  # of one thread's source and of its target
NOT_FOUND = -704

PUTS = ["put", "put_batch", "put_parts", "put_from", "batch_put_from", "batch_put_from_multi_buffers", "put_session"]
UPSERTS = ["upsert_from", "batch_upsert_from"]
GETS = [
    "get", "get_buffer", "batch_get_buffer", "get_into", "batch_get_into", "batch_get_into_multi_buffers", "get_into_ranges",
    "get_session",
]


def size_of(key, seed):
    """4 KiB to 32 MiB, small ones more often; most are no multiple of a page or of a word."""
    dice = random.Random(seed * 1000003 + key)
    size = int(4096 * 2 ** (13 * dice.random() ** 3))
    return min(LARGEST, size if dice.random() < 0.3 else size + dice.randrange(4096))


class Slice:
    def __init__(self, buffer, start, size):
        self.bytes = buffer.bytes[start : start + size]
        self.address, self.size = buffer.address + start, size


def cut(buffer, sizes):
    """A place for each object, with a gap behind it that nobody may write to."""
    slices, at = [], 0
    for size in sizes:
        slices.append(Slice(buffer, at, size))
        at += (size + GAP + 63) & ~63
    return slices


class Session(Exception):
    """A call of a session failed; the session was given up."""


def put_session(w, keys, buffers):
    started = list(w.store.batch_put_session_start(keys, [b.size for b in buffers]))
    good = [i for i, result in enumerate(started) if result == 0]
    addresses, sizes, offsets = actions_store.pieces(buffers)
    for third in range(3) if good else ():
        written = w.store.batch_put_from_multi_buffer_ranges(
            [keys[i] for i in good], [[addresses[i][third]] for i in good], [[sizes[i][third]] for i in good],
            [[offsets[i][third]] for i in good],
        )
        if list(written) != [sizes[i][third] for i in good]:
            w.store.batch_put_session_revoke([keys[i] for i in good])
            raise Session(f"write {sorted(set(written))[:3]}")
    ended = w.store.batch_put_session_end([keys[i] for i in good]) if good else []
    for i, result in zip(good, ended if isinstance(ended, (list, tuple)) else [ended] * len(good)):
        started[i] = result
    return started


def get_session(w, keys, buffers):
    started = list(w.store.batch_get_session_start(keys))
    good = [i for i, result in enumerate(started) if result == 0]
    if good:
        addresses, sizes, offsets = ([row[i] for i in good] for row in actions_store.pieces(buffers))
        try:
            got = w.store.batch_get_into_multi_buffer_ranges([keys[i] for i in good], addresses, sizes, offsets)
        finally:
            w.store.batch_get_session_end([keys[i] for i in good])
        for i, result in zip(good, got):
            started[i] = result
    return started


WAYS = {**actions_store.PUTS, **actions_store.GETS, "put_session": put_session, "get_session": get_session}


class Caller(threading.Thread):
    def __init__(self, w, number, plan):
        super().__init__(name=f"caller{number}")
        self.w, self.number, self.plan = w, number, plan
        self.dice = random.Random(plan["seed"] * 7919 + number * 31 + plan["life"])
        self.table = Table(plan["table"], plan["keys"], plan["threads"])
        self.row = self.table.threads[number]
        self.mine = range(number, plan["keys"], plan["threads"])
        # One in six of a thread's keys is upserted, and read by its writer only: an upsert may write in place.
        self.own = [key for key in self.mine if key // plan["threads"] % 6 == 0]
        self.shared = [key for key in range(plan["keys"]) if key // plan["threads"] % 6]
        self.results = collections.Counter()
        self.source, self.target = (Buffer(ROOM, 0) for _ in range(2))
        for buffer in (self.source, self.target):
            self.register(buffer)

    def register(self, buffer):
        """Mooncake asks the metadata server, and gives up when this process is stopped meanwhile."""
        for _ in range(20):
            if self.w.store.register_buffer(buffer.address, buffer.size) == 0:
                return
            time.sleep(0.5)
        raise AssertionError("a buffer cannot be registered")

    def run(self):
        try:
            while not self.table.flags[Table.STOP] and not self.row[Table.LEAVE]:
                self.turn()
        except Exception:
            self.find("exception", trace=traceback.format_exc())
        finally:
            self.row[Table.CALL_SINCE] = 0

    def turn(self):
        what = self.dice.random()
        if what < 0.35:
            self.put(self.choose([key for key in self.mine if key not in self.own]), self.dice.choice(PUTS))
        elif what < 0.42 and self.own:
            self.put(self.choose(self.own), self.dice.choice(UPSERTS), upsert=True)
        elif what < 0.50 and self.own:
            self.get(self.choose(self.own), self.dice.choice(GETS))
        else:
            self.get(self.choose(self.shared), self.dice.choice(GETS))
        if self.dice.random() < 0.2:
            time.sleep(self.dice.random() * 0.05)

    def choose(self, keys):
        """Some keys whose blocks fit into the buffer."""
        chosen, room = [], ROOM
        for key in self.dice.sample(keys, min(len(keys), self.dice.choice([1, 1, 2, 4, 8]))):
            need = size_of(key, self.plan["seed"]) + 2 * GAP
            if need <= room:
                chosen.append(key)
                room -= need
        return chosen

    def call(self, way, keys, buffers):
        """Results one a key; None if the call raised."""
        if actions_store.missing(self.w, [way]):
            return None
        self.row[Table.CALL_SINCE] = time.monotonic_ns()
        self.row[Table.WAYS] = list(WAYS).index(way)
        try:
            results = list(WAYS[way](self.w, [self.name_of(key) for key in keys], buffers))
        except Exception as error:
            self.results[f"{way} raised {type(error).__name__}"] += 1
            results = None
        self.row[Table.CALL_SINCE] = 0
        self.row[Table.CALLS] += 1
        return results

    def name_of(self, key):
        return f"{self.plan['name']}-{key}"

    def absent(self, key):
        """Remove a key. Returns whether it is known not to exist now."""
        result = self.w.store.remove(self.name_of(key))
        self.results[f"remove {result}"] += 1
        return result in (0, NOT_FOUND)

    def put(self, keys, way, upsert=False):
        alone = {key: upsert or self.absent(key) for key in keys}
        keys = [key for key in keys if alone[key] or self.dice.random() < 0.1]
        if not keys:
            return
        generations = []
        buffers = cut(self.source, [size_of(key, self.plan["seed"]) for key in keys])
        for key, buffer in zip(keys, buffers):
            generations.append(int(self.table.keys[key, Table.STARTED]) + 1)
            self.table.keys[key, Table.STARTED] = generations[-1]
            fill(buffer.bytes, key, generations[-1])
        results = self.call(way, keys, buffers)
        for key, buffer, generation, result in zip(keys, buffers, generations, results or []):
            self.results[f"{way} {min(result, 0)}"] += 1
            if result == 0 and alone[key]:
                self.table.keys[key, Table.FLOOR] = generation
            if result == 0:
                self.row[Table.OK] += 1
                self.row[Table.BYTES] += buffer.size
        if not self.source.guards_intact or (keys and first_difference(buffers[0].bytes, keys[0], generations[0]) is not None):
            self.find("a put wrote to its source", way=way)
        if self.dice.random() < 0.3:
            self.get(keys, self.dice.choice(GETS))

    def get(self, keys, way):
        if not keys:
            return
        buffers = cut(self.target, [size_of(key, self.plan["seed"]) for key in keys])
        self.target.bytes[: buffers[-1].address + buffers[-1].size + GAP - self.target.address] = POISON
        floors = [int(self.table.keys[key, Table.FLOOR]) for key in keys]
        results = self.call(way, keys, buffers)
        for key, buffer, floor, result in zip(keys, buffers, floors, results or []):
            good = result == buffer.size
            self.results[f"{way} {'size' if good else min(result, 0)}"] += 1
            if good:
                self.compare(key, buffer, floor, way)
            elif result > 0:
                self.find("a get of another size", way=way, key=key, size=buffer.size, got=result)
        for buffer in buffers:
            after = buffer.address + buffer.size - self.target.address
            if not (self.target.bytes[after : after + GAP] == POISON).all():
                self.find("a get wrote beyond its buffer", way=way, size=buffer.size)
        if not self.target.guards_intact:
            self.find("a get wrote beyond its buffer", way=way)

    def compare(self, key, buffer, floor, way):
        started = int(self.table.keys[key, Table.STARTED])
        self.row[Table.OK] += 1
        self.row[Table.BYTES] += buffer.size
        # From generation 1 on, so that an old one is recognised as such.
        generation = generation_of(buffer.bytes, key, 1, started)
        about = dict(way=way, key=self.name_of(key), size=buffer.size, floor=floor, started=started, generation=generation)
        if generation is None:
            first = buffer.bytes[:32].tobytes().hex()
            self.find("other bytes", first=first, poison=int((buffer.bytes == POISON).sum()), **about)
            return
        wrong = first_difference(buffer.bytes, key, generation)
        if wrong is not None:
            self.find("other bytes", from_byte=wrong, bytes=buffer.bytes[wrong : wrong + 32].tobytes().hex(), **about)
        elif generation < floor:
            self.find("an old generation", **about)

    def find(self, kind, **about):
        self.row[Table.FINDINGS] += 1
        line = json.dumps({"kind": kind, "engine": self.plan["engine"], "at": round(time.time(), 3), **about})
        with open(self.plan["findings"], "a") as file:
            file.write(line + "\n")


def run(w, plan):
    """Until the table says stop or leave. Returns how often each result came."""
    callers = [Caller(w, number, plan) for number in plan["numbers"]]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for caller in callers:
        for buffer in (caller.source, caller.target):
            w.store.unregister_buffer(buffer.address)
    return dict(sum((caller.results for caller in callers), collections.Counter()))


def settle(w, prefix, bound_s):
    """Put and get until both succeed with the right bytes. Returns seconds, or None if it never did."""
    start, number = time.monotonic(), 0
    while time.monotonic() - start < bound_s:
        number += 1
        keys, sizes = [f"{prefix}-{number}-{index}" for index in range(4)], [100000] * 4
        if actions_store.write_keys(w, keys, sizes, number) == [0] * 4:
            got = actions_store.read_keys(w, keys, sizes, number)
            if got["results"] == sizes:
                return None if got["wrong"] else time.monotonic() - start
        time.sleep(0.2)
    return None
