# SPDX-License-Identifier: Apache-2.0
"""Claim: doctor says what the CUDA driver and its GPUs can do for Tidepool, and makes no context to find out."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TIDEPOOL_BUILD", ROOT / "build")).resolve()
sys.path.insert(0, str(ROOT / "tests" / "fakecuda"))
import fakecuda  # noqa: E402


def doctor(folder, double=BUILD / "tests" / "fakecuda", extra=None, **settings):
    """The findings about GPUs by name, and the calls of the driver."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TIDEPOOL_", "FAKECUDA_", "LD_", "MOONCAKE_"))}
    env = fakecuda.environment(double, folder / "log.jsonl", base, **settings) if double else base
    env.update(extra or {})
    done = subprocess.run(
        [BUILD / "tidepool", "doctor", "--no-python", "--json"], env=env, capture_output=True, text=True, timeout=30
    )
    found = {f["what"]: f for f in json.loads(done.stdout)["findings"] if f["what"].startswith("gpu")}
    assert not fakecuda.broken_rules(folder / "log.jsonl")
    calls = {line["call"] for line in fakecuda.read_log(folder / "log.jsonl")}
    assert not {call for call in calls if call.startswith("cuCtx") or "Primary" in call}
    return found, calls


def cumem(folder):
    (folder / "sockets").mkdir(mode=0o700, exist_ok=True)
    return {"MC_STORE_CUMEM_SOCKET_DIR": str(folder / "sockets")}


def test_a_driver_with_gpus(tmp_path):
    found, calls = doctor(tmp_path, devices=2, numa_nodes=1)
    assert found["gpu driver"]["level"] == "OK" and "CUDA 13.0" in found["gpu driver"]["value"]
    assert {"gpu 0", "gpu 1"} <= set(found) and "gpu 2" not in found
    assert found["gpu batch copies"]["level"] == "OK"
    assert found["gpu host memory 0"]["level"] == "OK"
    assert "cuMemCreate" in calls and "cuMemRelease" in calls


def test_an_old_driver(tmp_path):
    path = f"{BUILD / 'tests' / 'fakecuda' / 'driver-12.4'}:{BUILD / 'tests' / 'fakecuda'}"
    found, _ = doctor(tmp_path, double=path)
    assert found["gpu batch copies"]["level"] == "WARN" and "12.8" in found["gpu batch copies"]["advice"]


def test_no_gpu_matters_to_a_cumem_store_only(tmp_path):
    found, _ = doctor(tmp_path, devices=0)
    assert found["gpu driver"]["level"] == "OK" and "cuInit" in found["gpu driver"]["value"]
    found, _ = doctor(tmp_path, devices=0, extra=cumem(tmp_path))
    assert found["gpu driver"]["level"] == "FAIL" and "--gpus all" in found["gpu driver"]["advice"]


def test_a_node_that_gives_no_memory(tmp_path):
    found, _ = doctor(tmp_path, fail="cuMemCreate:*=801")
    assert found["gpu host memory 0"]["level"] == "WARN" and "SYS_NICE" in found["gpu host memory 0"]["advice"]


def test_a_store_larger_than_the_node(tmp_path):
    extra = {**cumem(tmp_path), "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(1 << 50)}
    found, _ = doctor(tmp_path, extra=extra)
    assert found["gpu host memory 0"]["level"] == "WARN" and "free" in found["gpu host memory 0"]["value"]
