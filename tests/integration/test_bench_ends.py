"""Claim: a measuring program that is told to end ends all its masters, stores and engines, and leaves nothing behind; a
store that finds no huge pages does not hold it up for minutes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from harness import machine, mounts, wheels

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"


def children(pid):
    return [int(child) for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def runs(pid):
    """A child that its parent did not wait for may have become a zombie of somebody else."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(true, what, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("program", ["gpu_bench.py", "gpu_pair.py"])
def test_a_signal_ends_all(tmp_path, program, number):
    command = [wheels.CPU.python, BENCH / program, "--host", "--store-memory", "memfd", "--store-gib", "0.5", "--shapes", "16M",
               "--scale", "0.1", "--lib", wheels.LIBRARY, "--tool", wheels.TOOL]
    many = ["--no-stock", "--pairs", "9999"] if program == "gpu_bench.py" else ["--seconds", "30"]
    process = subprocess.Popen([str(word) for word in command + many], env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        wait_for(lambda: len(children(process.pid)) >= 3 or process.poll() is not None, "a master, a store and an engine")
        made = children(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)  # nobody else holds its standard output
        assert process.returncode == 128 + number, output.decode()
        wait_for(lambda: not any(map(runs, made)), "its processes end", limit_s=5)
        assert not list(tmp_path.iterdir())
    finally:
        process.kill()
        process.wait()


@pytest.mark.hugepages
def test_a_store_without_huge_pages_fails_soon(tmp_path):
    sys.path.insert(0, str(BENCH))
    import gpu_bench

    class Options:
        wheel_python, lib, null_lib = str(wheels.CPU.python), str(wheels.LIBRARY), None
        store_memory, store_gib, engine_conf, host = "cumem", 0.0625, [{}], True

    with mounts.huge_pages(40), mounts.mounted("hugetlbfs", "pagesize=2M") as folder:
        Options.segments = folder
        with open(os.path.join(folder, "held"), "w") as held:
            os.posix_fallocate(held.fileno(), 0, (mounts.number(mounts.FREE) - 10) << 21)
            start = time.monotonic()
            with pytest.raises(gpu_bench.Failure, match="pages of 2 MiB are missing"):
                gpu_bench.Side("registered-1", Options, str(tmp_path), gpu_bench.wheel_folder(Options.wheel_python))
            assert machine.ran_s(start) < 30
