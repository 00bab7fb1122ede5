"""Buffers with guards around them and random contents, for the worker's side."""

import ctypes
import mmap

import numpy as np

GUARD = 4096
GUARD_BYTE = 0xA5
POISON_BYTE = 0x5A


class Buffer:
    """`size` bytes at any alignment, with guard bytes on both sides that nobody may touch."""

    def __init__(self, size, offset=0):
        self.size = size
        self.map = mmap.mmap(-1, size + 2 * GUARD + offset)
        self.whole = np.frombuffer(self.map, dtype=np.uint8)
        self.whole[:] = GUARD_BYTE
        start = GUARD + offset
        self.bytes = self.whole[start : start + size]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + start
        self.start = start

    @property
    def guards_intact(self):
        before, after = self.whole[: self.start], self.whole[self.start + self.size :]
        return bool((before == GUARD_BYTE).all() and (after == GUARD_BYTE).all())

    def poison(self):
        self.bytes[:] = POISON_BYTE


def random_bytes(size, seed):
    """Different for every seed, and no byte sequence repeats within it."""
    words = np.random.default_rng(seed).integers(0, 1 << 63, size // 8 + 1, dtype=np.uint64)
    return words.view(np.uint8)[:size]


def bytes_at(address, size):
    return ctypes.string_at(address, size)
