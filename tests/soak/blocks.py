"""What the soak test stores and how it is judged: the contents of a block, and the table that all processes share.

Contents: word i of a block is i * STEP xor base(key, generation), so every word depends on the key, the generation and its
place. Bytes of another key, of another generation or of another place in the same block differ in almost every word.

Table: a file that all processes map. Each key has one writer, which counts its generations. `started` is raised before a put
of that generation begins. `floor` is raised after a put has succeeded whose key was known not to exist just before, so that
the object that is visible now can only be of this generation. A get that succeeds must deliver, whole, a generation between
the floor read before the get began and `started` read after it ended. Everything else may fail: objects are evicted, and
stores die with their memory.
"""

import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)
POISON = 0x5A
CHUNK = 1 << 15  # words compared at once: what fits into the caches
LARGEST = 32 << 20

_ramp = None


def ramp():
    global _ramp
    if _ramp is None:
        with np.errstate(over="ignore"):
            _ramp = np.arange(LARGEST // 8 + 1, dtype=np.uint64) * STEP
    return _ramp


def base(key, generation):
    """A well mixed word (splitmix64)."""
    mask = (1 << 64) - 1
    x = (key << 40) + generation + 0x1234567
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & mask
    return np.uint64(x ^ (x >> 31))


def fill(target, key, generation):
    """Write the contents of a block into an array of bytes whose address is a multiple of 8."""
    whole = target.size // 8
    words = target[: 8 * whole].view(np.uint64)
    np.bitwise_xor(ramp()[:whole], base(key, generation), out=words)
    tail = (ramp()[whole : whole + 1] ^ base(key, generation)).view(np.uint8)
    target[8 * whole :] = tail[: target.size - 8 * whole]


def first_difference(got, key, generation):
    """The first byte that is not this generation's, or None."""
    whole, mix = got.size // 8, base(key, generation)
    words = got[: 8 * whole].view(np.uint64)
    for start in range(0, whole, CHUNK):
        part = words[start : start + CHUNK] ^ mix
        equal = part == ramp()[start : start + part.size]
        if not equal.all():
            return 8 * (start + int(np.argmin(equal)))
    tail = (ramp()[whole : whole + 1] ^ mix).view(np.uint8)[: got.size - 8 * whole]
    return None if np.array_equal(got[8 * whole :], tail) else 8 * whole


def generation_of(got, key, low, high):
    """The generation whose first word this is, or None."""
    first = got[:8].view(np.uint64)[0]
    return next((number for number in range(high, max(low, 0) - 1, -1) if base(key, number) == first), None)


class Table:
    """Rows of 64-bit numbers. Each is written by one thread and read by all."""

    STARTED, FLOOR = 0, 1
    CALLS, OK, BYTES, CALL_SINCE, FINDINGS, WAYS, LEAVE = 0, 1, 2, 3, 4, 5, 6  # of a thread; CALL_SINCE in ns, 0 between calls
    STOP = 0

    def __init__(self, path, keys, threads, create=False):
        shape = (keys + threads + 1, 8)
        self.rows = np.memmap(path, dtype=np.uint64, mode="w+" if create else "r+", shape=shape)
        self.keys, self.threads, self.flags = self.rows[:keys], self.rows[keys:-1], self.rows[-1]
