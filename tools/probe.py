# SPDX-License-Identifier: Apache-2.0
"""What `tidepool doctor` asks a Python about its Mooncake: run with -c in a child process, answers as JSON lines on a pipe.

Arguments: the pipe's fd, then the symbols to look for. A line is written as soon as it is known, since importing or opening a module
may kill this process.
"""
import ctypes
import glob
import importlib
import importlib.util
import json
import os
import sys

out = os.fdopen(int(sys.argv[1]), "w")
symbols = sys.argv[2:]
RESERVE = "_ZNSt6vectorIN8mooncake9Transport15TransferRequestESaIS2_EE7reserveEm"
TENT = "_ZN8mooncake4tent12getMachineIDB5cxx11Ev"
MODULES = {
    "store": ("store.so", "store.*.so", "_store.so", "_store.*.so"),
    "engine": ("engine.so", "engine.*.so", "_engine.so", "_engine.*.so"),
}


def say(**what):
    out.write(json.dumps(what) + "\n")
    out.flush()


def wheels():
    try:
        from importlib import metadata
    except ImportError:
        return []
    found = set()
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("mooncake-transfer-engine"):
            found.add((name, distribution.version))
    return sorted(found)


def element_bytes(library):
    """sizeof(TransferRequest), from what reserve(16) does to an empty std::vector of them; 0 where it is not exported."""
    if not hasattr(library, RESERVE):
        return 0
    reserve = getattr(library, RESERVE)
    reserve.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    reserve.restype = None
    vector = (ctypes.c_size_t * 3)()
    reserve(ctypes.byref(vector), 16)
    return (vector[2] - vector[0]) // 16


def error_text(error):
    return "%s: %s" % (type(error).__name__, error)


def look(name, directory):
    answer = {"module": name, "path": "", "error": "", "found": "", "element": 0, "tent": False}
    paths = [path for pattern in MODULES[name] for path in sorted(glob.glob(os.path.join(directory, pattern)))]
    if not paths:
        answer["error"] = "no such file"
        return answer
    answer["path"] = paths[0]
    say(begin=name, path=paths[0])
    try:
        importlib.import_module("mooncake." + name)
        library = ctypes.CDLL(paths[0])
    except BaseException as error:
        answer["error"] = error_text(error)
        return answer
    answer["found"] = "".join("1" if hasattr(library, symbol) else "0" for symbol in symbols)
    answer["element"] = element_bytes(library)
    answer["tent"] = hasattr(library, TENT)
    return answer


def main():
    try:
        spec = importlib.util.find_spec("mooncake")
        where = list(spec.submodule_search_locations or [""])[0] if spec else ""
        error = "" if spec else "no package mooncake"
    except BaseException as failure:
        where, error = "", error_text(failure)
    say(python=sys.version.split()[0], executable=sys.executable, wheels=wheels(), directory=where, error=error)
    if where:
        for name in MODULES:
            say(**look(name, where))
    say(end=True)


main()
