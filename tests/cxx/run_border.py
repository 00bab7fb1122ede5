#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every scenario of border.cpp in every layout: a store and an engine in two processes, the library preloaded."""
import os
import pathlib
import subprocess
import sys
import tempfile

LIBRARY, PROGRAMS = sys.argv[1], pathlib.Path(sys.argv[2])
SEGMENT = 32 << 20
SCENARIOS = ["roundtrip", "mixed", "busy", "refused", "range", "scatter", "engines", "strange"]
NAME = "10.1.2.3:15000"


def environment(directory, store, engine, tent):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TIDEPOOL_"))}
    env.update(LD_PRELOAD=LIBRARY, TIDEPOOL_SOCKET_DIR=directory, SEGMENT_BYTES=str(SEGMENT))
    if store:
        env["MC_STORE_SHM_SEGMENT_DIR"] = "memfd"
    if engine:
        env["MC_TENT_CONF"] = '{"transports":{"shm":{"enable":true}}}'
    if tent:
        env["MC_USE_TENT"] = "1"
    return env


def run_variant(variant, scenarios, engine=True):
    failures = 0
    tent = variant.endswith("tent")
    program = str(PROGRAMS / f"border_{variant}")
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        store = subprocess.Popen([program, "store", NAME, str(SEGMENT)], env=environment(directory, True, False, tent),
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        base = store.stdout.readline().strip()
        for scenario in scenarios:
            done = subprocess.run([program, "engine", NAME, base, scenario], env=environment(directory, False, engine, tent),
                                  capture_output=True, text=True, timeout=30)
            good = done.returncode == 0 and done.stdout.strip() == "ok"
            failures += not good
            print("ok  " if good else "FAIL", variant, scenario, "" if good else (done.returncode, done.stdout, done.stderr))
        store.stdin.close()
        code = store.wait(timeout=10)
        if code != 0 or os.listdir(directory) != ["addresses"]:  # the record stays
            failures += 1
            print("FAIL", variant, "store", code, os.listdir(directory))
    return failures


failed = sum(run_variant(v, SCENARIOS) for v in ("48inlined", "48", "56", "72", "72tent"))
failed += run_variant("64", ["forwarded"])
failed += run_variant("72", ["forwarded"], engine=False)
print(f"{failed} failed")
sys.exit(1 if failed else 0)
