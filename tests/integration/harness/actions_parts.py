"""What a worker can be told to do with batched calls of many keys, on slices of one registered buffer."""

import threading
import zlib

import numpy as np

from harness.memory import Buffer, random_bytes

PUTS = ("batch_put_from", "batch_put_from_multi_buffers")
GETS = ("batch_get_into", "batch_get_into_multi_buffers")


def config_of(fields):
    """A ReplicateConfig with these fields."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def config_fields(w):
    """The names of all fields, and how many bytes its memory has room for (what malloc gave, at least the object's size)."""
    import ctypes

    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    # pybind11: the pointer to the C++ object follows the head of the python object.
    address = ctypes.c_void_p.from_address(id(config) + object.__basicsize__)
    usable = ctypes.CDLL(None).malloc_usable_size
    usable.argtypes, usable.restype = [ctypes.c_void_p], ctypes.c_size_t
    return [name for name in dir(ReplicateConfig) if not name.startswith("_")], usable(address)


def slices(buffer, sizes):
    """A place for each key, none beside another's."""
    room = buffer.size // len(sizes)
    assert max(sizes) <= room
    return [buffer.address + index * room for index in range(len(sizes))]


def call(w, way, keys, addresses, sizes, fields=None, uneven=None):
    arguments = [keys, addresses, sizes]
    if way.endswith("multi_buffers"):
        arguments[1] = [[address, address + size // 2] for address, size in zip(addresses, sizes)]
        arguments[2] = [[size // 2, size - size // 2] for size in sizes]
        if uneven is not None:
            del arguments[2][uneven][1]
    if way in PUTS and fields:
        arguments.append(config_of(fields))
    return list(getattr(w.store, way)(*arguments))


def batch(w, way, keys, sizes, room, seed=None, fields=None, uneven=None):
    """One call. Returns its results and a checksum of each key's place. `uneven`: this key has a buffer more than sizes."""
    buffer = Buffer(room * len(keys), 0)
    if seed is None:
        buffer.poison()
    else:
        buffer.bytes[:] = random_bytes(buffer.size, seed)
    assert w.store.register_buffer(buffer.address, buffer.size) == 0
    results = call(w, way, keys, slices(buffer, sizes), sizes, fields, uneven)
    w.store.unregister_buffer(buffer.address)
    assert buffer.guards_intact
    return {"results": results, "sums": [zlib.crc32(part) for part in np.split(buffer.bytes, len(keys))]}


def at_once(w, prefix, threads, rounds, count, size):
    """Several python threads, each with keys of its own. Returns what was wrong."""
    problems = []

    def work(number):
        keys = [f"{prefix}-{number}-{index}" for index in range(count)]
        for round_number in range(rounds):
            way = (number + round_number) % 2
            names = [f"{key}-{round_number}" for key in keys]
            put = batch(w, PUTS[way], names, [size] * count, size, seed=100 * number + round_number)
            got = batch(w, GETS[way], names, [size] * count, size)
            if put["results"] != [0] * count or got["results"] != [size] * count or got["sums"] != put["sums"]:
                problems.append((number, round_number, put["results"], got["results"]))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return problems


def put_until_failure(w, prefix, count, size, limit):
    """Puts of `count` keys until one fails. Returns the last results and the number of calls."""
    buffer = Buffer(count * size, 0)
    assert w.store.register_buffer(buffer.address, buffer.size) == 0
    for number in range(limit):
        keys = [f"{prefix}-{number}-{index}" for index in range(count)]
        results = call(w, "batch_put_from", keys, slices(buffer, [size] * count), [size] * count)
        if any(results):
            break
        if number % 4 == 3:
            w.store.remove_all()
    w.store.unregister_buffer(buffer.address)
    return results, number + 1
