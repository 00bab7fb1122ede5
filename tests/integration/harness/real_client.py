"""A C++ program that uses Mooncake's RealClient without python (tests/cxx/real_client.cpp): the wheel's own store module,
loaded under another name. It starts in a fraction of the time that an interpreter takes.
"""

import glob
import os
import resource
import shutil
import subprocess

import pytest

from .process import Logged, die_with_parent
from .wheels import BUILD, ROOT

PROGRAM = BUILD / "tests" / "cxx" / "real_client"


class SetupFailed(Exception):
    """It did not come up; the text is the end of its log."""


class RealClient(Logged):
    """real_client, driven over its pipes."""

    def __init__(self, cluster, name, module, python, environment, segment, limits):
        preload = ":".join(filter(None, [environment.get("LD_PRELOAD"), python]))
        whole = cluster.whole_environment(name, {**environment, "LD_PRELOAD": preload})
        libraries = glob.glob(f"{os.path.dirname(cluster.wheel.folder)}/mooncake*.libs")
        paths = [whole["LD_LIBRARY_PATH"]] if whole.get("LD_LIBRARY_PATH") else []
        whole["LD_LIBRARY_PATH"] = ":".join([*paths, *libraries, cluster.wheel.folder])
        self.name, self.log_path = name, os.path.join(cluster.folder, f"{name}.log")

        def prepare():
            die_with_parent()
            for limit, value in limits.items():
                resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))

        with open(self.log_path, "wb") as log:
            self.popen = subprocess.Popen(
                [PROGRAM, module, cluster.master_address, str(segment)],
                env=whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=prepare,
            )
        cluster.processes.append(self)
        first = self.popen.stdout.readline().strip()
        if first != "0" and cluster.wheel.any_version and "no _ZN" in self.log:
            pytest.skip("this version's RealClient has other methods")
        if first != "0":
            raise SetupFailed(self.log[-3000:])

    def tell(self, *words):
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline().strip()

    def put(self, keys, sizes, seed):
        return [self.tell("put", key, size, seed) for key, size in zip(keys, sizes)]

    def get(self, keys, sizes, seed):
        return [self.tell("get", key, size, seed) for key, size in zip(keys, sizes)]

    def close(self):
        assert self.tell("close") == "closed"
        return self.popen.wait(20)

    def dispose(self):
        self.popen.kill()
        self.popen.wait()


def starter(cluster, folder):
    """What starts such programs in this cluster: start(name, environment, segment_bytes=0, limits={}), with soft
    limits as of setrlimit."""
    if not PROGRAM.exists():
        pytest.skip("no C++ compiler when the build was configured")
    found = glob.glob(f"{cluster.wheel.folder}/store.so") + glob.glob(f"{cluster.wheel.folder}/_store.*.so")
    module, python = folder / "libkvcache_backend.so", folder / "python.so"
    shutil.copy(found[0], module)
    subprocess.run([ROOT / "tests" / "stubs" / "make-python", module, python], check=True)
    cluster.start_master()

    def start(name, environment, segment=0, limits=None):
        return RealClient(cluster, name, module, str(python), environment, segment, limits or {})

    return start
