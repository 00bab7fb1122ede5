"""What a worker can be told to do with GPU memory, on the double of the CUDA libraries (its folder is on PYTHONPATH)."""

import time

import fakecuda

from .actions_store import drop_buffers, make_buffers, wrong
from .memory import random_bytes


class DeviceBuffer:
    """Memory of a GPU, registered or not."""

    def __init__(self, w, size, seed=None, register=True):
        if "cuda" not in w.kept:
            w.kept["cuda"] = fakecuda.Cuda()
        self.cuda = w.kept["cuda"]
        self.size = size
        self.address = self.cuda.alloc(size)
        self.cuda.poke(self.address, b"\x5a" * size if seed is None else random_bytes(size, seed).tobytes())
        self.registered = register
        assert not register or w.store.register_buffer(self.address, size) == 0

    def holds(self, seed):
        return self.cuda.peek(self.address, self.size) == random_bytes(self.size, seed).tobytes()

    def drop(self, w):
        if self.registered:
            w.store.unregister_buffer(self.address)
        self.cuda.free(self.address)


def device_round(w, keys, size, seed, register=True):
    """Put objects from GPU memory and get them back into other GPU memory. Returns whether all is right."""
    sources = [DeviceBuffer(w, size, seed + index, register) for index in range(len(keys))]
    targets = [DeviceBuffer(w, size, None, register) for _ in keys]
    put = w.store.batch_put_from(keys, [b.address for b in sources], [size] * len(keys))
    got = w.store.batch_get_into(keys, [b.address for b in targets], [size] * len(keys))
    right = all(target.holds(seed + index) for index, target in enumerate(targets))
    for buffer in sources + targets:
        buffer.drop(w)
    return put == [0] * len(keys) and got == [size] * len(keys) and right


def mixed_round(w, keys, size, seed):
    """Objects of two buffers each, the first in host memory and the second in a GPU's: one batch holds both."""
    count = len(keys)
    hosts, devices = make_buffers(w, [size] * count, seed), [DeviceBuffer(w, size, seed + 100 + i) for i in range(count)]
    to_hosts, to_devices = make_buffers(w, [size] * count), [DeviceBuffer(w, size) for _ in keys]
    sizes = [[size, size]] * count
    put = w.store.batch_put_from_multi_buffers(keys, [[h.address, d.address] for h, d in zip(hosts, devices)], sizes)
    got = w.store.batch_get_into_multi_buffers(keys, [[h.address, d.address] for h, d in zip(to_hosts, to_devices)], sizes)
    right = not wrong(to_hosts, [size] * count, seed) and all(d.holds(seed + 100 + i) for i, d in enumerate(to_devices))
    drop_buffers(w, hosts + to_hosts)
    for buffer in devices + to_devices:
        buffer.drop(w)
    return put == [0] * count and got == [2 * size] * count and right


def device_read(w, keys, size, seed):
    """Get objects of make_buffers' contents into GPU memory. Returns whether all is right."""
    targets = [DeviceBuffer(w, size) for _ in keys]
    got = w.store.batch_get_into(keys, [b.address for b in targets], [size] * len(keys))
    right = all(target.holds(seed + index) for index, target in enumerate(targets))
    for buffer in targets:
        buffer.drop(w)
    return got == [size] * len(keys) and right


def device_hammer(w, key_prefix, size, seconds, seed):
    """actions_store.hammer with GPU memory at both ends."""
    source, target = DeviceBuffer(w, size, seed), DeviceBuffer(w, size)
    good = count = lies = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        key = f"{key_prefix}{count}"
        count += 1
        target.cuda.poke(target.address, b"\x5a" * size)
        put = w.store.put_from(key, source.address, size)
        if put == 0 and w.store.get_into(key, target.address, size) == size:
            good += 1
            lies += not target.holds(seed)
        if put == 0:
            w.store.remove(key, True)
    for buffer in (source, target):
        buffer.drop(w)
    return {"count": count, "good": good, "lies": lies}
