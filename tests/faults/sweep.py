"""Let each call of libc and of the CUDA driver fail that the library makes in the life of a store and an engine (scenario.c).

Each case is one call of one function that fails once with one error. What must hold: nobody crashes or hangs, fds are closed,
bytes are right, what cannot be had is said in a line, and then Mooncake's own way is taken. Without --all as many cases as fit
into the time, in a random order of which the seed is printed, the first call of every function before all others.

    sweep.py [--seconds N] [--all] [--seed S] [--jobs N] [--only TEXT]        TEXT: a part of a case as it is printed
"""

import argparse
import collections
import concurrent.futures
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TIDEPOOL_BUILD", ROOT / "build")).resolve()
SCENARIO = BUILD / "tests" / "faults" / "scenario"
DOUBLE = BUILD / "tests" / "fakecuda"
LIMIT_S = 90
MOST = 40  # calls of one function; what comes later is polling
CUDA_ERRORS = (2, 999)  # CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN
SEGMENTS = ("memfd", "tmpfs", "cumem", "gpu")
Case = collections.namedtuple("Case", "segments victim call nth error")


def functions():
    text = (ROOT / "tests" / "faults" / "faults.h").read_text()
    rows = re.findall(r"^\s+FAULT\((\w+), \S+, (E\w+), (E\w+)\)", text, re.M)
    return [(name, sorted({one, other})) for name, one, other in rows]


def run(case, folder, log=False):
    """The last line of the scenario, its whole output, and whether it ended well."""
    place = tempfile.mkdtemp(dir=folder)
    segments = case.segments if case.segments != "tmpfs" else tempfile.mkdtemp(dir="/dev/shm", prefix="tidepool-faults-")
    environment = {**os.environ, "FAULTS_PROGRAM": "1", "TIDEPOOL_LOG": "warn"}
    if case.segments in ("cumem", "gpu"):
        environment["LD_LIBRARY_PATH"] = str(DOUBLE)
        if log:
            environment["FAKECUDA_LOG"] = os.path.join(folder, "driver")
    words = [str(SCENARIO), place, segments, case.victim, str(case.call), str(case.nth), str(case.error)]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S, errors="replace")
        out, good = done.stdout, done.returncode == 0
        said = done.stderr
    except subprocess.TimeoutExpired as late:
        out, good, said = "it hangs", False, str(late.stderr)
    finally:
        if segments.startswith("/dev/shm/"):
            shutil.rmtree(segments, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
    lines = out.strip().splitlines() or ["no answer"]
    return lines[-1], out + said, good


def cases_of(segments, folder):
    """All calls of one kind of segments."""
    names = functions()
    last, out, good = run(Case(segments, "none", "counts", 0, 0), folder, log=True)
    if not good or last != "ok":
        raise SystemExit(f"faults: without a failure, on {segments}: {out}")
    counts = collections.Counter()
    for role, number, count in re.findall(r"^(store|engine) (\d+) (\d+)$", out, re.M):
        counts[role, int(number)] = max(counts[role, int(number)], int(count))
    # With a GPU's buffers only the driver's calls are others than before.
    for (role, number), count in sorted(counts.items()) if segments != "gpu" else ():
        for nth in range(1, min(count, MOST) + 1):
            for error in names[number][1]:
                yield Case(segments, role, number, nth, getattr(errno, error))
    path = os.path.join(folder, "driver")
    if os.path.exists(path):
        calls = collections.Counter()
        with open(path) as file:
            for line in map(json.loads, file):
                calls[line["pid"], line["call"]] += 1
        os.unlink(path)
        most = collections.Counter()
        for (_, call), count in calls.items():
            if call.startswith("cu"):
                most[call] = max(most[call], count)
        for call, count in sorted(most.items()):
            for nth in range(1, min(count, MOST) + 1):
                roles = ("engine",) if segments == "gpu" else ("store", "engine")
                yield from (Case(segments, role, call, nth, error) for role in roles for error in CUDA_ERRORS)


def text(case):
    driver = isinstance(case.call, str)
    call = case.call if driver else functions()[case.call][0]
    error = case.error if driver else errno.errorcode[case.error]
    return f"{case.segments} {case.victim} {call}:{case.nth}={error}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2 * len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="tpf.", dir="/tmp")
    dice, begin = random.Random(options.seed), time.monotonic()
    try:
        cases = [case for segments in SEGMENTS for case in cases_of(segments, folder)]
        cases = [case for case in cases if options.only in text(case)]
        dice.shuffle(cases)
        if not options.only:
            cases.sort(key=lambda case: case.nth > 1)
        ends, failures, left = collections.Counter(), [], 0

        def one(case):
            if not options.all and time.monotonic() - begin > options.seconds:
                return None
            return run(case, folder)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for case, result in zip(cases, pool.map(one, cases)):
                if result is None:
                    left += 1
                    continue
                last, output, good = result
                ends[last if good else "wrong"] += 1
                if not good:
                    failures.append(case)
                    print(f"FAILED {text(case)}\n  " + output.strip()[-1500:].replace("\n", "\n  "), flush=True)
        print(f"faults: {dict(ends)} in {time.monotonic() - begin:.0f} s, {left} of {len(cases)} cases left out, seed {options.seed}")
        print(f"{sum(ends.values()) - len(failures)} passed, {len(failures)} failed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failures or not ends else 0)


main()
