"""What a worker can be told to do with mooncake.store. Every function takes the worker first; it runs in the
worker's process, on the wheel that is under test, and returns something that JSON can carry.
"""

import time

import numpy as np

from .memory import Buffer, bytes_at, random_bytes


def setup(w, master, segment_bytes=0, local_bytes=64 << 20, host="127.0.0.1", metadata="P2PHANDSHAKE", **more):
    """`more`: what some wheels take besides, such as enable_ssd_offload."""
    from mooncake.store import MooncakeDistributedStore

    w.store = MooncakeDistributedStore()
    return w.store.setup(host, metadata, segment_bytes, local_bytes, "tcp", "", master, **more)


def limit_files(w, count):
    """ulimit -n, for what comes."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def setup_on_engine(w, master, segment_bytes, local_bytes=16 << 20, host="127.0.0.1"):
    """A store on a transfer engine that mooncake.engine has made."""
    from mooncake.engine import TransferEngine

    w.engine = TransferEngine()
    assert w.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
    return setup(w, master, segment_bytes, local_bytes, host, engine=w.engine.get_engine())


def setup_dummy(w, server, pool_bytes=64 << 20, local_bytes=16 << 20):
    """A client without an engine of its own: mooncake_client at `server` does its transfers."""
    from mooncake.store import MooncakeDistributedStore

    w.store = MooncakeDistributedStore()
    return w.store.setup_dummy(pool_bytes, local_bytes, server)


def close(w):
    result = w.store.close()
    w.store = None
    w.kept = {name: kept for name, kept in w.kept.items() if name.startswith("aside")}
    return result


def mount(w, size, path=None):
    """More memory for the store while it runs: of its own, or a file. Returns the names of the segments."""
    made = w.store.mount_segment(path, size) if path else w.store.allocate_and_mount_segment(size)
    assert made["ret"] == 0, made
    return list(made["segment_ids"])


def unmount(w, segments, path=None):
    return w.store.unmount_segment(segments) if path else w.store.unmount_and_free_segment(segments)


def set_aside(w, name=""):
    """Another store client is set up next in this process; this one stays."""
    w.kept[f"aside{name}"] = w.store
    w.store = None


def take_back(w, name=""):
    w.store = w.kept.pop(f"aside{name}")


def names(w):
    return [name for name in dir(w.store) if not name.startswith("_")]


def replicas(w, key):
    """Where each replica of a key lies: endpoint, address, length."""
    found = []
    for replica in w.store.get_replica_desc(key):
        descriptor = replica.get_memory_descriptor().buffer_descriptor
        values = {
            name.rstrip("_"): getattr(descriptor, name)
            for name in dir(descriptor)
            if not name.startswith("_") and not callable(getattr(descriptor, name))
        }
        found.append(values)
    return found


def replica_kinds(w, keys):
    """Where replicas of each key lie: "memory" for memory, "disk" for a store's own disk."""
    kinds = {"memory": "is_memory_replica", "disk": "is_local_disk_replica"}
    return [
        sorted({kind for replica in w.store.get_replica_desc(key) for kind, ask in kinds.items() if getattr(replica, ask)()})
        for key in keys
    ]


def endpoints(w, keys):
    """In whose memory each key's replicas lie."""
    return [[replica["transport_endpoint"] for replica in replicas(w, key)] for key in keys]


# ---- every way to put. Each takes keys and buffers and returns Mooncake's results, one a key.


def put(w, keys, buffers):
    return [w.store.put(key, buffer.bytes.tobytes()) for key, buffer in zip(keys, buffers)]


def put_batch(w, keys, buffers):
    return [w.store.put_batch(keys, [buffer.bytes.tobytes() for buffer in buffers])] * len(keys)


def thirds(buffer):
    cut = buffer.size // 3
    return [(0, cut), (cut, cut), (2 * cut, buffer.size - 2 * cut)] if cut else [(0, buffer.size)]


def parts(buffer):
    return [buffer.bytes[start : start + size].tobytes() for start, size in thirds(buffer)]


def put_parts(w, keys, buffers):
    return [w.store.put_parts(key, *parts(buffer)) for key, buffer in zip(keys, buffers)]


def put_from(w, keys, buffers):
    return [w.store.put_from(key, buffer.address, buffer.size) for key, buffer in zip(keys, buffers)]


def batch_put_from(w, keys, buffers):
    return w.store.batch_put_from(keys, [b.address for b in buffers], [b.size for b in buffers])


def pieces(buffers):
    addresses = [[b.address + start for start, _ in thirds(b)] for b in buffers]
    sizes = [[size for _, size in thirds(b)] for b in buffers]
    offsets = [[start for start, _ in thirds(b)] for b in buffers]
    return addresses, sizes, offsets


def batch_put_from_multi_buffers(w, keys, buffers):
    addresses, sizes, _ = pieces(buffers)
    return w.store.batch_put_from_multi_buffers(keys, addresses, sizes)


def put_from_with_metadata(w, keys, buffers):
    # The object is the metadata followed by the data.
    results = []
    for key, buffer in zip(keys, buffers):
        cut = min(16, buffer.size // 2)
        if cut == 0:
            results.append(w.store.put_from(key, buffer.address, buffer.size))
            continue
        results.append(
            w.store.put_from_with_metadata(key, buffer.address + cut, buffer.address, buffer.size - cut, cut)
        )
    return results


def upsert(w, keys, buffers):
    return [w.store.upsert(key, buffer.bytes.tobytes()) for key, buffer in zip(keys, buffers)]


def upsert_batch(w, keys, buffers):
    return [w.store.upsert_batch(keys, [buffer.bytes.tobytes() for buffer in buffers])] * len(keys)


def upsert_parts(w, keys, buffers):
    return [w.store.upsert_parts(key, *parts(buffer)) for key, buffer in zip(keys, buffers)]


def upsert_from(w, keys, buffers):
    return [w.store.upsert_from(key, buffer.address, buffer.size) for key, buffer in zip(keys, buffers)]


def batch_upsert_from(w, keys, buffers):
    return w.store.batch_upsert_from(keys, [b.address for b in buffers], [b.size for b in buffers])


def put_session(w, keys, buffers):
    """Reserve, write each third of every object in its own call, end."""
    started = w.store.batch_put_session_start(keys, [b.size for b in buffers])
    assert all(result == 0 for result in started), started
    addresses, sizes, offsets = pieces(buffers)
    for third in range(max(len(row) for row in sizes)):
        chosen = [index for index, row in enumerate(sizes) if third < len(row)]
        written = w.store.batch_put_from_multi_buffer_ranges(
            [keys[i] for i in chosen],
            [[addresses[i][third]] for i in chosen],
            [[sizes[i][third]] for i in chosen],
            [[offsets[i][third]] for i in chosen],
        )
        assert written == [sizes[i][third] for i in chosen], written
    return w.store.batch_put_session_end(keys)


PUTS = {
    function.__name__: function
    for function in (
        put,
        put_batch,
        put_parts,
        put_from,
        batch_put_from,
        batch_put_from_multi_buffers,
        put_from_with_metadata,
        upsert,
        upsert_batch,
        upsert_parts,
        upsert_from,
        batch_upsert_from,
        put_session,
    )
}

# ---- every way to get. Each fills the buffers and returns the number of bytes that Mooncake says it read, one a key.


def take(buffer, raw):
    if raw:
        buffer.bytes[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    return len(raw)


def get(w, keys, buffers):
    return [take(buffer, w.store.get(key)) for key, buffer in zip(keys, buffers)]


def get_batch(w, keys, buffers):
    return [take(buffer, raw) for raw, buffer in zip(w.store.get_batch(keys), buffers)]


def take_handle(buffer, handle):
    if handle is None:
        return -1
    return take(buffer, bytes_at(handle.ptr(), handle.size()))


def get_buffer(w, keys, buffers):
    return [take_handle(buffer, w.store.get_buffer(key)) for key, buffer in zip(keys, buffers)]


def batch_get_buffer(w, keys, buffers):
    return [take_handle(b, handle) for handle, b in zip(w.store.batch_get_buffer(keys), buffers)]


def get_into(w, keys, buffers):
    return [w.store.get_into(key, buffer.address, buffer.size) for key, buffer in zip(keys, buffers)]


def batch_get_into(w, keys, buffers):
    return w.store.batch_get_into(keys, [b.address for b in buffers], [b.size for b in buffers])


def batch_get_into_multi_buffers(w, keys, buffers):
    addresses, sizes, _ = pieces(buffers)
    return w.store.batch_get_into_multi_buffers(keys, addresses, sizes)


def get_into_ranges(w, keys, buffers):
    """One call a buffer: each third of the object is a range of its own, last third first."""
    results = []
    for key, buffer in zip(keys, buffers):
        cuts = thirds(buffer)[::-1]
        offsets = [start for start, _ in cuts]
        sizes = [size for _, size in cuts]
        got = w.store.get_into_ranges([buffer.address], [[key]], [[offsets]], [[offsets]], [[sizes]])
        results.append(sum(got[0][0]) if got[0][0] == sizes else min(got[0][0]))
    return results


def get_session(w, keys, buffers):
    started = w.store.batch_get_session_start(keys)
    assert all(result == 0 for result in started), started
    addresses, sizes, offsets = pieces(buffers)
    got = w.store.batch_get_into_multi_buffer_ranges(keys, addresses, sizes, offsets)
    assert w.store.batch_get_session_end(keys) == 0
    return got


GETS = {
    function.__name__: function
    for function in (
        get,
        get_batch,
        get_buffer,
        batch_get_buffer,
        get_into,
        batch_get_into,
        batch_get_into_multi_buffers,
        get_into_ranges,
        get_session,
    )
}


# ---- what a wheel has of these

SESSION_CALLS = {
    "put_session": ["batch_put_session_start", "batch_put_from_multi_buffer_ranges", "batch_put_session_end"],
    "get_session": ["batch_get_session_start", "batch_get_into_multi_buffer_ranges", "batch_get_session_end"],
}


def missing(w, ways):
    """The methods that these ways need and this wheel's store does not have. A way is named after its method."""
    needed = [name for way in ways for name in SESSION_CALLS.get(way, [way])]
    return [name for name in needed if not hasattr(w.store, name)]


# ---- calls


def make_buffers(w, sizes, seed=None, offset=0):
    """Registered buffers of these sizes: random for a seed, else poisoned."""
    buffers = []
    for index, size in enumerate(sizes):
        buffer = Buffer(size, (offset + 7 * index) % 64 if offset else 0)
        if seed is None:
            buffer.poison()
        else:
            buffer.bytes[:] = random_bytes(size, seed + index)
        assert w.store.register_buffer(buffer.address, size) == 0
        buffers.append(buffer)
    return buffers


def drop_buffers(w, buffers):
    for buffer in buffers:
        w.store.unregister_buffer(buffer.address)


def wrong(buffers, sizes, seed):
    """Indices whose contents are not what this seed made, or whose guards were written to."""
    return [
        index
        for index, (buffer, size) in enumerate(zip(buffers, sizes))
        if not buffer.guards_intact or not np.array_equal(buffer.bytes, random_bytes(size, seed + index))
    ]


def write_keys(w, keys, sizes, seed, way="batch_put_from", offset=0):
    """Put random objects. Returns Mooncake's results."""
    buffers = make_buffers(w, sizes, seed, offset)
    results = PUTS[way](w, keys, buffers)
    changed = wrong(buffers, sizes, seed)
    drop_buffers(w, buffers)
    assert not changed, f"the source was written to: {changed}"
    return results


def read_keys(w, keys, sizes, seed, way="batch_get_into", offset=0):
    """Get objects and compare every byte. Returns Mooncake's results and the indices that are wrong."""
    buffers = make_buffers(w, sizes, offset=offset)
    results = GETS[way](w, keys, buffers)
    bad = wrong(buffers, sizes, seed)
    drop_buffers(w, buffers)
    return {"results": results, "wrong": bad}


def write_plain(w, keys, sizes, seed):
    """Put random objects by value: for clients that cannot register memory of their own."""
    return [w.store.put(key, random_bytes(size, seed + index).tobytes()) for index, (key, size) in enumerate(zip(keys, sizes))]


def read_plain(w, keys, sizes, seed):
    """The keys whose values are not what this seed made."""
    values = [w.store.get(key) for key in keys]
    return [
        key for index, key in enumerate(keys) if values[index] != random_bytes(sizes[index], seed + index).tobytes()
    ]


def get_sizes(w, keys, sizes, way="batch_get_into"):
    """How much Mooncake says it read of each."""
    buffers = make_buffers(w, sizes)
    results = GETS[way](w, keys, buffers)
    drop_buffers(w, buffers)
    return results


def write_replicated(w, keys, sizes, seed, replica_num):
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.replica_num = replica_num
    buffers = make_buffers(w, sizes, seed)
    results = w.store.batch_put_from(keys, [b.address for b in buffers], [b.size for b in buffers], config)
    drop_buffers(w, buffers)
    return results


def write_to_segment(w, keys, sizes, seed, segment):
    """Put objects where the caller wants them."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.preferred_segment = segment
    buffers = make_buffers(w, sizes, seed)
    results = w.store.batch_put_from(keys, [b.address for b in buffers], [b.size for b in buffers], config)
    drop_buffers(w, buffers)
    return results


def many_blocks(w, prefix, keys, blocks, block_bytes, seed):
    """One batch of `keys` objects of `blocks` buffers each, put and got back; the memory is one registered buffer."""
    size = keys * blocks * block_bytes
    source, target = make_buffers(w, [size], seed)[0], make_buffers(w, [size])[0]
    some = [f"{prefix}{index}" for index in range(keys)]
    sizes = [[block_bytes] * blocks] * keys
    stored = w.store.batch_put_from_multi_buffers(some, rows(source, keys, blocks, block_bytes), sizes)
    got = w.store.batch_get_into_multi_buffers(some, rows(target, keys, blocks, block_bytes), sizes)
    equal = bool(np.array_equal(source.bytes, target.bytes)) and target.guards_intact
    drop_buffers(w, [source, target])
    return {
        "put_failed": sum(result != 0 for result in stored),
        "get_failed": sum(result != blocks * block_bytes for result in got),
        "equal": equal,
    }


def small_objects(w, prefix, count, size, seed, batch=500):
    """Put and get `count` small objects in batches; each is compared. Returns how many were wrong."""
    source, target = make_buffers(w, [size * batch], seed)[0], make_buffers(w, [size * batch])[0]
    bad = 0
    for first in range(0, count, batch):
        some = [f"{prefix}{index}" for index in range(first, min(first + batch, count))]
        sources = [source.address + index * size for index in range(len(some))]
        targets = [target.address + index * size for index in range(len(some))]
        source.bytes[: 8 * (len(source.bytes) // 8)].view(np.uint64)[:: max(1, size // 8)] += 1
        target.poison()
        bad += sum(result != 0 for result in w.store.batch_put_from(some, sources, [size] * len(some)))
        bad += sum(result != size for result in w.store.batch_get_into(some, targets, [size] * len(some)))
        used = len(some) * size
        bad += not np.array_equal(source.bytes[:used], target.bytes[:used])
    drop_buffers(w, [source, target])
    return bad


def keep_buffer(w, name, size, seed=None):
    w.kept[name] = make_buffers(w, [size], seed)[0]
    return w.kept[name].address


def put_kept(w, key, name):
    buffer = w.kept[name]
    return w.store.put_from(key, buffer.address, buffer.size)


def get_kept(w, key, name):
    buffer = w.kept[name]
    return w.store.get_into(key, buffer.address, buffer.size)


def kept_equal(w, one, other):
    return bool(np.array_equal(w.kept[one].bytes, w.kept[other].bytes))


def read_for(w, keys, sizes, seed, seconds):
    """Get the same objects one after the other until the time is over, like hammer."""
    target = make_buffers(w, [max(sizes)])[0]
    results, lies = [], 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        index = len(results) % len(keys)
        target.poison()
        result = w.store.get_into(keys[index], target.address, sizes[index])
        results.append(result)
        if result == sizes[index]:
            lies += not np.array_equal(target.bytes[:result], random_bytes(result, seed + index))
    drop_buffers(w, [target])
    good = sum(result > 0 for result in results)
    return {"count": len(results), "good": good, "lies": lies, "last_good": results[-1] > 0}


def hammer(w, key_prefix, size, seconds, seed, every_s=0.0):
    """Put and get one object after the other until the time is over. Returns how many were right, when
    the longest calls began and ended, and how many reads returned success with other bytes than were written."""
    source, target = make_buffers(w, [size], seed)[0], make_buffers(w, [size])[0]
    results, lies, calls = [], 0, []
    deadline = time.monotonic() + seconds
    index = 0
    while time.monotonic() < deadline:
        key = f"{key_prefix}{index}"
        index += 1
        source.bytes[:8] = np.frombuffer(index.to_bytes(8, "little"), dtype=np.uint8)
        target.poison()
        start = time.monotonic()
        put_result = w.store.put_from(key, source.address, size)
        middle = time.monotonic()
        get_result = w.store.get_into(key, target.address, size) if put_result == 0 else None
        end = time.monotonic()
        if get_result == size and not np.array_equal(source.bytes, target.bytes):
            lies += 1
        calls = sorted([*calls, (start, middle), (middle, end)], key=lambda call: call[0] - call[1])[:20]
        results.append((put_result, get_result, end))
        if put_result == 0:
            w.store.remove(key, True)
        if every_s:
            time.sleep(every_s)
    drop_buffers(w, [source, target])
    good = sum(r[0] == 0 and r[1] == size for r in results)
    bad = [r[:2] for r in results if r[0] != 0 or r[1] != size][:5]
    last_good = bool(results and results[-1][1] == size)
    return {"count": len(results), "good": good, "bad": bad, "lies": lies, "longest": calls, "last_good": last_good}


def same_into(w, keys, buffers, seed, ranges):
    """Read objects that all hold what this seed makes, in one call. Returns Mooncake's results and the indices that are
    wrong."""
    expected = random_bytes(buffers[0].size, seed)
    for buffer in buffers:
        buffer.poison()
    results = read_ranges(w, keys, buffers) if ranges else batch_get_into(w, keys, buffers)
    bad = [i for i, b in enumerate(buffers) if not b.guards_intact or not np.array_equal(b.bytes, expected)]
    return {"results": results, "wrong": bad}


def read_same(w, keys, size, seed, ranges=False):
    buffers = make_buffers(w, [size] * len(keys))
    got = same_into(w, keys, buffers, seed, ranges)
    drop_buffers(w, buffers)
    return got


def read_on(w, keys, size, seed, seconds, ranges=False):
    """The same again and again until the time is over. Returns how many calls that were, how often each key failed, and
    how often one was reported as read and held other bytes."""
    buffers = make_buffers(w, [size] * len(keys))
    failed, lies, calls = [0] * len(keys), 0, 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        got = same_into(w, keys, buffers, seed, ranges)
        calls += 1
        for index, result in enumerate(got["results"]):
            failed[index] += result != size
            lies += result == size and index in got["wrong"]
    drop_buffers(w, buffers)
    return {"calls": calls, "failed": failed, "lies": lies}


def read_ranges(w, keys, buffers):
    """One call for all keys, two ranges a key: one batch holds them all."""
    halves = [[(0, b.size // 2), (b.size // 2, b.size - b.size // 2)] for b in buffers]
    starts = [[[start for start, _ in parts]] for parts in halves]
    sizes = [[[size for _, size in parts]] for parts in halves]
    got = w.store.get_into_ranges([b.address for b in buffers], [[key] for key in keys], starts, starts, sizes)
    return [sum(found[0]) if min(found[0], default=-1) >= 0 else min(found[0], default=-1) for found in got]


def exists(w, keys):
    return w.store.batch_is_exist(keys)


def remove_all(w):
    """Removes what is leased too, in wheels that can."""
    try:
        return w.store.remove_all(True)
    except TypeError:
        return w.store.remove_all()


def round_buffers(w, name, size):
    """A source and a target that stay registered from round to round."""
    if name not in w.kept:
        w.kept[name] = (make_buffers(w, [size], seed=size)[0], make_buffers(w, [size])[0])
    return w.kept[name]


def forget_buffers(w, name):
    drop_buffers(w, w.kept.pop(name))


def rows(buffer, keys, blocks, block_bytes):
    """The addresses of each key's blocks, one after the other in the buffer."""
    step = blocks * block_bytes
    return [[buffer.address + key * step + block * block_bytes for block in range(blocks)] for key in range(keys)]


def timed(w, name, number, keys, blocks, block_bytes, keys_a_call):
    """Seconds of one put and one get of all keys of a shape; every byte is compared."""
    source, target = round_buffers(w, name, keys * blocks * block_bytes)
    sources, targets = (rows(buffer, keys, blocks, block_bytes) for buffer in (source, target))
    some = [f"{name}-{number}-{index}" for index in range(keys)]
    source.bytes[:: max(1, block_bytes // 2)] += 1

    def over_calls(single, several, addresses):
        results = []
        start = time.perf_counter()
        for first in range(0, keys, keys_a_call):
            part = slice(first, first + keys_a_call)
            count = len(some[part])
            if blocks == 1:
                results += single(some[part], [row[0] for row in addresses[part]], [block_bytes] * count)
            else:
                results += several(some[part], addresses[part], [[block_bytes] * blocks] * count)
        return time.perf_counter() - start, results

    put_s, stored = over_calls(w.store.batch_put_from, w.store.batch_put_from_multi_buffers, sources)
    target.poison()
    get_s, got = over_calls(w.store.batch_get_into, w.store.batch_get_into_multi_buffers, targets)
    assert not any(stored), f"put failed: {sorted(set(stored))}"
    assert set(got) == {blocks * block_bytes}, f"get failed: {sorted(set(got))}"
    assert np.array_equal(source.bytes, target.bytes), "other bytes came back"
    for key in some:
        w.store.remove(key, True)
    return {"put": put_s, "get": get_s}
