# SPDX-License-Identifier: Apache-2.0
"""tests/bench/copy_limits measures what running stores give, changes nothing of them, and says clearly what it cannot measure. Without a
GPU: the double's are in tests/cumem."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from harness import actions_store as actions
from harness import machine
from harness.cluster import MIB
from tools_support import LIVE, STORE, TOOL, FakeProcess, RealProcess, clean_environment, page, segment_row, tidepool

LIMITS = TOOL.parent / "tests" / "bench" / "copy_limits"
BLOCKS = [4096 << 2 * i for i in range(5)]


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    return path


def bench(*arguments, **environment):
    """On a machine with GPUs as well: none of them is seen."""
    return tidepool("--seconds", "0.1", *arguments, tool=LIMITS, timeout=30, CUDA_VISIBLE_DEVICES="", **environment)


def report_of(*arguments, **environment):
    result = bench("--json", *arguments, **environment)
    return result.returncode, json.loads(result.stdout)


def assert_measured(store, put_memory="memfd"):
    (row,) = store["rows"]
    assert store["problem"] is None and store["put_memory"] == put_memory
    assert (row["gpu"], row["registered"], row["problem"]) == (None, False, None)
    assert [block["block_bytes"] for block in row["blocks"]] == BLOCKS
    assert all(block["get_gbs"] > 0 and block["put_gbs"] > 0 for block in row["blocks"])


def test_a_stock_store_is_measured_and_stays_as_it_was(shared):
    if shared.stock:
        pytest.skip("nothing to measure")
    store, engine = shared.store_process, shared.engine_process
    keys, sizes = [f"bench-{i}" for i in range(96)], [MIB] * 96
    assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=7) == [0] * 96
    before = dict(shared.counters(store))
    code, report = report_of(shared.directory)
    assert code == 0 and report["gpus"] == [] and report["no_gpu"]
    (measured,) = report["stores"]
    assert_measured(measured)
    assert measured["pid"] == store.pid and measured["bytes"] == 1 << 30 and measured["sample_bytes"] == 64 * MIB
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=7) == {"results": sizes, "wrong": []}
    after = dict(shared.counters(store))
    assert {name: after[name] for name in after if "bytes" in name} == {name: before[name] for name in before if "bytes" in name}


def test_every_store_is_a_row_and_the_text_has_the_same(directory):
    with RealProcess(directory, "store") as one, RealProcess(directory, "store") as other:
        code, report = report_of(directory)
        assert code == 0 and {store["pid"] for store in report["stores"]} == {one.pid, other.pid}
        for store in report["stores"]:
            assert_measured(store)
            assert store["sample_bytes"] == 8 * MIB
        result = bench(directory)
        assert result.returncode == 0
        lines = result.stdout.splitlines()
        assert lines[0].startswith("NO GPU: ") and f"STORES in {directory}" in lines
        for pid in (one.pid, other.pid):
            (at,) = [i for i, line in enumerate(lines) if f"pid {pid} " in line]
            assert re.fullmatch(r" +4\.0 KiB +16\.0 KiB +64\.0 KiB +256 KiB +1\.0 MiB", lines[at + 1])
            for line, way in ((lines[at + 2], "get"), (lines[at + 3], "put")):
                assert re.fullmatch(rf"    host memory +{way}( +[0-9.]+){{5}}", line)
            assert "puts went to scratch memory: memfd" in lines[at + 4]
        assert all(len(line) <= 120 for line in lines)


def test_nothing_is_left_behind(directory):
    with RealProcess(directory, "store"):
        before = sorted(os.listdir(directory))
        assert report_of(directory)[0] == 0
        assert sorted(os.listdir(directory)) == before


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_no_store(directory, arguments):
    with RealProcess(directory, "engine"):
        result = bench(directory, *arguments)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(f"tidepool copy_limits: there is no store in {directory}")
    assert result.stderr.count("\n") == 1


def test_a_dead_store_is_no_store(directory):
    with RealProcess(directory, "store") as store:
        store.process.kill()
        store.process.wait()
        result = bench(directory)
    assert result.returncode == 1 and "there is no store" in result.stderr


def test_a_stopped_store_costs_its_own_row(directory):
    with RealProcess(directory, "store") as stopped, RealProcess(directory, "store") as alive:
        stopped.stop()
        code, report = report_of(directory)
        os.kill(stopped.pid, signal.SIGCONT)
    stores = {store["pid"]: store for store in report["stores"]}
    assert code == 1 and "not_answering" in stores[stopped.pid]["problem"] and stores[stopped.pid]["rows"] == []
    assert_measured(stores[alive.pid])


def test_a_store_that_ends_meanwhile(directory):
    """Each figure takes a second here, so it ends within the first or the second."""
    command = [LIMITS, directory, "--json", "--seconds", "20"]
    with RealProcess(directory, "store") as store:
        with subprocess.Popen(command, env=clean_environment(CUDA_VISIBLE_DEVICES=""), stdout=subprocess.PIPE) as tool:
            time.sleep(1.5)
            store.process.kill()
            start = time.monotonic()
            report = json.loads(tool.communicate(timeout=20)[0])
    assert machine.ran_s(start) < 4
    (ended,) = report["stores"]
    assert tool.returncode == 1 and "ended while" in ended["problem"]
    assert ended["rows"][0]["blocks"][0]["get_gbs"] > 0 and ended["rows"][0]["blocks"][-1]["put_gbs"] is None


def test_a_store_that_lies_costs_its_own_row(directory):
    liar = page(roles=STORE, name=b"\x1b[2Jliar", segments=[segment_row(size=2**64 - 1, state=LIVE, detail=b"\n\x1b")])
    with FakeProcess(directory, "s", raw=liar), RealProcess(directory, "store") as honest:
        code, report = report_of(directory)
    (lied,) = [store for store in report["stores"] if store["pid"] != honest.pid]
    (good,) = [store for store in report["stores"] if store["pid"] == honest.pid]
    assert code == 1 and lied["name"] == "?[2Jliar" and lied["detail"] == "??" and "attach" in lied["problem"]
    assert_measured(good)


def test_nothing_to_measure():
    result = bench()
    assert result.returncode == 1 and result.stdout == ""
    assert "there is no GPU" in result.stderr and "nothing to measure" in result.stderr
    result = bench("--gpu", "0")
    assert result.returncode == 1 and result.stdout == "" and "--gpu 0" in result.stderr


def test_directories_that_cannot_be_used(directory):
    result = bench(directory / "missing")
    assert result.returncode == 1 and "No such file" in result.stderr
    directory.chmod(0o777)
    result = bench(directory)
    assert result.returncode == 1 and str(directory) in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("--gpu", "x"), "--gpu x"),
        (("--gpu", "-1"), "--gpu -1"),
        (("--gpu", "99999999999"), "--gpu 99999999999"),
        (("--seconds", "0"), "from 0.1 to 600"),
        (("--seconds", "nan"), "from 0.1 to 600"),
        (("--seconds", "1s"), "from 0.1 to 600"),
        (("--seconds",), "a value is missing"),
        (("--nonsense",), "--nonsense"),
        (("a", "b"), "one directory at a time"),
    ],
)
def test_wrong_usage(arguments, word):
    result = tidepool(*arguments, tool=LIMITS)
    assert result.returncode == 2 and result.stdout == ""
    assert word in result.stderr and result.stderr.startswith("tidepool copy_limits: ") and result.stderr.count("\n") == 1
