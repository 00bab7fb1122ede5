"""C++ programs that use Mooncake's RealClient without python, as LMCache's multi-process server does: the wheel's own code,
loaded under another name by a program without an interpreter, is served in every role."""

import glob
import os
import shutil
import subprocess

import pytest
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB
from harness.process import Logged, die_with_parent
from harness.wheels import BUILD, ROOT

pytestmark = pytest.mark.stores

PROGRAM = BUILD / "tests" / "cxx" / "real_client"
SIZES = [8, 4096, 65536, 3 * MIB, 20 * MIB]


class Program(Logged):
    """real_client, driven over its pipes."""

    def __init__(self, cluster, name, module, python, environment, segment):
        preload = ":".join(filter(None, [environment.get("LD_PRELOAD"), python]))
        whole = cluster.whole_environment(name, {**environment, "LD_PRELOAD": preload})
        libraries = glob.glob(f"{os.path.dirname(cluster.wheel.folder)}/mooncake*.libs")
        paths = [whole["LD_LIBRARY_PATH"]] if whole.get("LD_LIBRARY_PATH") else []
        whole["LD_LIBRARY_PATH"] = ":".join([*paths, *libraries, cluster.wheel.folder])
        self.name, self.log_path = name, os.path.join(cluster.folder, f"{name}.log")
        with open(self.log_path, "wb") as log:
            self.popen = subprocess.Popen(
                [PROGRAM, module, cluster.master_address, str(segment)],
                env=whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=die_with_parent,
            )
        cluster.processes.append(self)
        first = self.popen.stdout.readline().strip()
        if first != "0" and cluster.wheel.any_version and "no _ZN" in self.log:
            pytest.skip("this version's RealClient has other methods")
        assert first == "0", self.log[-3000:]

    def tell(self, *words):
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline().strip()

    def put(self, keys, seed):
        return [self.tell("put", key, size, seed) for key, size in zip(keys, SIZES)]

    def get(self, keys, seed):
        return [self.tell("get", key, size, seed) for key, size in zip(keys, SIZES)]

    def close(self):
        assert self.tell("close") == "closed"
        return self.popen.wait(20)

    def dispose(self):
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def program(cluster, tmp_path):
    if not PROGRAM.exists():
        pytest.skip("no C++ compiler when the build was configured")
    found = glob.glob(f"{cluster.wheel.folder}/store.so") + glob.glob(f"{cluster.wheel.folder}/_store.*.so")
    module, python = tmp_path / "libkvcache_backend.so", tmp_path / "python.so"
    shutil.copy(found[0], module)
    subprocess.run([ROOT / "tests" / "stubs" / "make-python", module, python], check=True)
    cluster.start_master()

    def start(name, environment, segment=0):
        return Program(cluster, name, module, str(python), environment, segment)

    return start


def until_used(cluster, one, stores=1):
    """Its first transfers make it attach; then every byte goes the short way."""
    if not cluster.stock:
        one.put([f"warm-{one.name}-{index}" for index in range(4 * stores)], seed=9)
        status.until_attached(cluster.directory, one, stores)


def round_trip(engine):
    """One key of each size put and got; returns the keys."""
    keys = [f"key{index}" for index in range(len(SIZES))]
    assert engine.put(keys, seed=1) == ["0"] * len(SIZES)
    assert engine.get(keys, seed=1) == [f"{size} equal" for size in SIZES]
    return keys


@pytest.mark.wheels
@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_store_and_engine(cluster, program, mode):
    cluster.use_segments(mode)
    store = program("cxx-store", cluster.store_environment(), 256 * MIB)
    engine = program("cxx-engine", cluster.engine_environment())
    until_used(cluster, engine)
    before = cluster.counters(engine)
    keys = round_trip(engine)
    assert engine.get(keys[:2], seed=2) == [f"{size} other" for size in SIZES[:2]], "the comparison compares"
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES) + sum(SIZES[:2]))
    # What it wrote is what everybody gets.
    python = cluster.engine("python")
    cluster.warm(python)
    before = cluster.counters(python)
    assert python.call(actions.get_sizes, keys=keys, sizes=SIZES) == SIZES
    cluster.assert_local(python, before, read=sum(SIZES))
    assert (engine.close(), store.close()) == (0, 0)
    cluster.assert_no_rule_broken()
    if not cluster.stock:
        assert all("/s-" not in path for path in status.sockets(cluster.directory))


def test_with_mooncake_client(cluster, program):
    cluster.client()
    engine = program("cxx-engine", cluster.engine_environment())
    until_used(cluster, engine)
    before = cluster.counters(engine)
    round_trip(engine)
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
    assert engine.close() == 0


def test_store_and_engine_at_once(cluster, program):
    both = [program(f"cxx-{index}", cluster.both_environment(), 128 * MIB) for index in range(2)]
    for one in both:
        until_used(cluster, one)
    before = [cluster.counters(one) for one in both]
    for number, one in enumerate(both):
        for index in range(4):
            keys = [f"key{number}-{index}-{size}" for size in SIZES]
            assert one.put(keys, seed=index) == ["0"] * len(SIZES)
            for reader in both:
                assert reader.get(keys, seed=index) == [f"{size} equal" for size in SIZES]
    if not cluster.stock:
        for one, counted in zip(both, before):
            after = cluster.counters(one)
            assert after["local_read_bytes"] > counted["local_read_bytes"]
            assert after["forward_requests"] == counted["forward_requests"]
    assert [one.close() for one in both] == [0, 0]
