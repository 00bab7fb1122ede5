# SPDX-License-Identifier: Apache-2.0
"""The CUDA double from Python: device memory for tests of unmodified programs, and its log.

The process must have been started with environment(); the libraries are found by the loader's path, as the program finds them.
"""
import contextlib
import ctypes
import json
import os
import pathlib

_U64, _SIZE = ctypes.c_uint64, ctypes.c_size_t


def environment(folder, log=None, base=None, **settings):
    """An environment in which programs load the double from `folder` (the build's tests/fakecuda).

    settings are the double's variables without the prefix: devices=1, delay_us=1000, fail="cuMemMap:3=2"...
    """
    env = dict(os.environ if base is None else base)
    path = [str(folder)] + ([env["LD_LIBRARY_PATH"]] if env.get("LD_LIBRARY_PATH") else [])
    env["LD_LIBRARY_PATH"] = ":".join(path)
    if log is not None:
        env["FAKECUDA_LOG"] = str(log)
    env.update({f"FAKECUDA_{name.upper()}": str(value) for name, value in settings.items()})
    return env


class CudaError(RuntimeError):
    """A call that did not succeed."""

    def __init__(self, call, result):
        super().__init__(f"{call} gave {result}")
        self.result = result


class Cuda:
    """The double as this process sees it. Device memory is allocated in a device's primary context."""

    def __init__(self):
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.fakecuda_last_violation.restype = ctypes.c_char_p
        self._driver.fakecuda_violations.restype = ctypes.c_ulong
        self._contexts = {}
        self.call("cuInit", 0)

    def call(self, name, *args):
        """Call a driver function; an error raises."""
        result = getattr(self._driver, name)(*args)
        if result:
            raise CudaError(name, result)

    @contextlib.contextmanager
    def context(self, device=0):
        """Make a device's primary context current for a while."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", None)

    def alloc(self, size, device=0):
        """Device memory: an address that the CPU may not touch."""
        address = _U64()
        with self.context(device):
            self.call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(size))
        return address.value

    def free(self, address, device=0):
        with self.context(device):
            self.call("cuMemFree_v2", _U64(address))

    def poke(self, address, data):
        """Write bytes to device memory, past all rules of access."""
        data = bytes(data)
        if self._driver.fakecuda_poke(_U64(address), data, _SIZE(len(data))):
            raise ValueError(f"no memory at {address:#x}+{len(data)}")

    def peek(self, address, size):
        """Read bytes of device memory."""
        data = ctypes.create_string_buffer(size)
        if self._driver.fakecuda_peek(data, _U64(address), _SIZE(size)):
            raise ValueError(f"no memory at {address:#x}+{size}")
        return data.raw

    def violations(self):
        return self._driver.fakecuda_violations()

    def last_violation(self):
        return self._driver.fakecuda_last_violation().decode()

    def contexts(self):
        """How many contexts this process has."""
        return self._driver.fakecuda_contexts()

    def note(self, text):
        """A line of one's own in the log."""
        self._driver.fakecuda_note(text.encode())

    def set_failures(self, rules):
        if self._driver.fakecuda_set_failures(rules.encode()):
            raise ValueError(rules)


def read_log(path):
    """All lines of a log, as dictionaries."""
    path = pathlib.Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def broken_rules(path):
    """The lines of a log that record a violation: what tests assert to be empty."""
    return [line for line in read_log(path) if line["violation"]]
