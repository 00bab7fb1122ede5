"""Preloaded into a process that nothing was configured for, the library does nothing at all."""

import json
import os
import statistics
import subprocess
import time

import pytest
from harness import actions_process, status
from harness import actions_store as actions
from harness.cluster import MIB
from harness.wheels import LIBRARY


def used(cluster, name, environment):
    """A client that has moved data."""
    engine = cluster.engine(name, environment=environment)
    assert engine.call(actions.write_keys, keys=[name], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.read_keys, keys=[name], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
    return engine


def of_itself(engine):
    """The names of its threads, and its fds by kind: not how many threads, and of sockets only those of the type that
    Tidepool uses. Two stock processes of one version do not agree on the number of their workers and connections."""
    fds = engine.call(actions_process.fds)
    kinds = sorted(link.split(":")[0] if ":" in link else link for link in fds.values() if "/proc/" not in link)
    kinds = [kind for kind in kinds if kind != "socket" and not kind.endswith(".log")]
    return set(engine.call(actions_process.threads)), kinds, engine.call(actions_process.tidepool_sockets)


@pytest.mark.wheels
@pytest.mark.parametrize(
    "extra", [{}, {"MC_TENT_CONF": '{"transports":{"shm":{"enable":false}}}'}], ids=["nothing", "disabled"]
)
def test_unconfigured(cluster, extra):
    cluster.store("stock-store", environment={})
    plain = used(cluster, "plain", dict(extra))
    loaded = used(cluster, "loaded", {"LD_PRELOAD": str(LIBRARY), **extra})
    # Mooncake's own threads and connections come and go, so the two are compared until they agree.
    status.until(lambda: of_itself(loaded) == of_itself(plain), lambda: f"the same threads and fds with and without: {of_itself(loaded)} {of_itself(plain)}", 5)
    files = [set(engine.call(actions_process.mapped_files)) for engine in (loaded, plain)]
    new = sorted(os.path.basename(path) for path in files[0] - files[1])
    assert "libtidepool.so" in new
    assert [name for name in new if not name.startswith(("libtidepool.so", "libjansson.so", "libnuma.so"))] == []
    assert loaded.tidepool_lines == []
    assert os.listdir(cluster.directory) == []


def test_the_library_needs_no_cuda():
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in needed
    assert "libcuda" not in needed and "libstdc++" not in needed
    assert "STATIC_TLS" not in needed, "initial-exec TLS breaks late loading"


@pytest.mark.parametrize("command", [["/bin/sh", "-c", ":"], ["/bin/true"]], ids=["sh", "true"])
def test_loading_it_costs_less_than_a_millisecond_and_a_half(command):
    plain = {"PATH": "/usr/bin:/bin"}
    loaded = dict(plain, LD_PRELOAD=str(LIBRARY))

    def seconds(environment):
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL)
        return time.perf_counter() - start

    # Pairs, so that whatever else the machine does falls on both; the median, so that single stalls do not count.
    differences = []
    for _ in range(60):
        without = seconds(plain)
        differences.append(seconds(loaded) - without)
    cost = statistics.median(differences)
    print(json.dumps({"command": command, "cost_ms": round(1e3 * cost, 3)}))
    assert cost < 1.5e-3


def test_programs_run_as_before():
    for command in (["sh", "-c", "echo $((6 * 7))"], ["python3", "-c", "print(42)"], ["bash", "-c", "echo 42 | cat"]):
        done = subprocess.run(
            command, env={**os.environ, "LD_PRELOAD": str(LIBRARY)}, capture_output=True, text=True, timeout=20
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", ""), command
