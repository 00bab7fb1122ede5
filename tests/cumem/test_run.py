# SPDX-License-Identifier: Apache-2.0
"""Claim: `tidepool run --store` chooses CUDA host memory where the driver can make it, leaves what the user has set as it is, says
which memory it is and why, and makes no context to find out. On the double of the CUDA libraries.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TIDEPOOL_BUILD", ROOT / "build")).resolve()
sys.path.insert(0, str(ROOT / "tests" / "fakecuda"))
import fakecuda  # noqa: E402

CUDA, MEMFD = "MC_STORE_CUMEM_SOCKET_DIR", "MC_STORE_SHM_SEGMENT_DIR"


def run(folder, *options, extra=None, **settings):
    """What the command sees, what was said, and the calls of the driver."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TIDEPOOL_", "FAKECUDA_", "LD_", "CUDA_"))}
    env = fakecuda.environment(BUILD / "tests" / "fakecuda", folder / "log.jsonl", base, **settings)
    done = subprocess.run([BUILD / "tidepool", "run", "--store", folder / "shared", *options, "--", "/usr/bin/env"],
                          env={**env, **(extra or {})}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    log = folder / "log.jsonl"
    calls = {line["call"] for line in fakecuda.read_log(log)} if log.exists() else set()
    assert not calls or not fakecuda.broken_rules(log)
    assert not {call for call in calls if call.startswith("cuCtx") or "Primary" in call}
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line), done.stderr, calls


def test_a_driver_that_can(tmp_path):
    seen, said, calls = run(tmp_path)
    assert seen[CUDA] == seen["TIDEPOOL_SOCKET_DIR"] == str(tmp_path / "shared") and MEMFD not in seen
    assert said == "tidepool run: store memory: CUDA host memory (the CUDA driver here can make it)\n"
    assert "cuMemRelease" in calls


@pytest.mark.parametrize("fail, why", [("cuMemCreate:*=801", "SYS_NICE"), ("cuInit:*=100", "no GPU can be used")])
def test_a_driver_that_cannot(tmp_path, fail, why):
    seen, said, _ = run(tmp_path, fail=fail)
    assert seen[MEMFD] == "memfd" and CUDA not in seen
    assert said.startswith("tidepool run: store memory: memfd (") and why in said and said.count("\n") == 1


@pytest.mark.parametrize("extra", [{"MC_TENT_PLATFORM": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"MC_STORE_USE_HUGEPAGE": "1"}])
def test_what_the_user_has_set_against_it(tmp_path, extra):
    seen, said, calls = run(tmp_path, extra=extra)
    assert seen[MEMFD] == "memfd" and CUDA not in seen and "cuInit" not in calls
    assert f"tidepool run: store memory: memfd ({next(iter(extra))}" in said


def test_what_the_user_has_chosen(tmp_path):
    seen, said, calls = run(tmp_path, extra={MEMFD: "/dev/shm"})
    assert seen[MEMFD] == "/dev/shm" and CUDA not in seen and MEMFD in said and not calls
    seen, said, calls = run(tmp_path, extra={CUDA: str(tmp_path / "shared")})
    assert seen[CUDA] == str(tmp_path / "shared") and MEMFD not in seen and CUDA in said and not calls
    for segment, name in (("memfd", MEMFD), ("cuda", CUDA)):
        seen, said, calls = run(tmp_path, "--segment", segment)
        assert name in seen and said == "" and not calls


def test_an_allocator_before_the_library(tmp_path):
    found = sorted(pathlib.Path("/usr/lib/x86_64-linux-gnu").glob("libjemalloc.so.2"))
    if not found:
        pytest.skip("no jemalloc on this machine")
    library = BUILD / "libtidepool.so"
    seen, said, _ = run(tmp_path, extra={"LD_PRELOAD": f"{found[0]}:{library}"})
    assert seen[MEMFD] == "memfd" and "jemalloc" in said
    seen, said, _ = run(tmp_path, extra={"LD_PRELOAD": f"{library}:{found[0]}"})
    assert CUDA in seen
