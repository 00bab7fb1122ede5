# SPDX-License-Identifier: Apache-2.0
"""Claim: the double answers as a real driver does (580, one H200; probe-driver-580.txt is its output), but for known differences.

FAKECUDA_DIR=<build>/tests/fakecuda
"""
import os
import pathlib
import subprocess

import pytest

FOLDER = os.environ.get("FAKECUDA_DIR", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="FAKECUDA_DIR is not set")

# Where the double differs, and why.
KNOWN = {
    "the descriptor's file type": "a regular file, not the nvidia character device",
    "the descriptor's size": "likewise",
    "with errno": "EBADF of O_PATH, not EINVAL",
    "copy without any access": "the driver crashes",
    "copy with CPU access only": "the driver crashed before it was asked",
    "copy from unmapped": "likewise",
    "and synchronize": "likewise",
    "copy into a registration": "from plain memory on into a registration: refused, since nothing promises it",
    "query of a destroyed stream": "the driver crashes",
}


def answers(text):
    """{question: [answers in order]}"""
    found = {}
    for line in text.splitlines():
        question, equals, answer = line.rpartition(" = ")
        if equals:
            found.setdefault(question, []).append(int(answer))
    return found


def test_answers():
    real = answers((pathlib.Path(__file__).parent / "probe-driver-580.txt").read_text())
    env = dict(os.environ, LD_LIBRARY_PATH=FOLDER, FAKECUDA_LOG="/dev/null")
    out = subprocess.run([pathlib.Path(FOLDER) / "fakecuda-probe"], env=env, capture_output=True, text=True, timeout=60,
                         check=True)
    double = answers(out.stdout)
    assert len(double) > 150
    assert {q: a for q, a in double.items() if a != real.get(q) and q not in KNOWN} == {}
    assert set(real) <= set(double)
