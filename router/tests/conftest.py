# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import sys

import pytest

ROUTER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROUTER)
sys.path.append(os.path.join(os.path.dirname(ROUTER), 'tests', 'integration'))     # for harness.machine
TRACE = os.path.join(os.path.dirname(os.path.dirname(ROUTER)), 'shared', 'traces', 'conversation_trace.jsonl')


def pytest_configure(config):
    if not shutil.which('haproxy'):
        pytest.exit('haproxy is not installed: these tests run the real proxy; install the package haproxy', returncode=2)


@pytest.fixture
def trace():
    if not os.path.exists(TRACE):
        pytest.skip('no trace at ../shared/traces/conversation_trace.jsonl beside the repository')
    return TRACE
