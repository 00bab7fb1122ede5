# SPDX-License-Identifier: Apache-2.0
"""One workload through the real proxy and through the simulation: the same figures, within stated bounds.

Bounds, for each figure: three standard deviations of the simulation's own runs with other seeds for ties, and a margin for
what only the real thing has (two threads deciding at once, the proxy's own time, answers a little late).
"""
import asyncio
import importlib.machinery
import importlib.util
import os
import statistics

import pytest
from conftest import ROUTER
from harness import machine

from tidepool_router.simulation import Model
from tidepool_router.workload import Parameters

MARGIN = {'moves_per_turn': .015, 'guarded_per_turn': .015, 'added_prefill': .02, 'hit_rate': .015, 'spread_requests': .25, 'spread_live': .20}


def load_bench():
    loader = importlib.machinery.SourceFileLoader('bench_replay', os.path.join(ROUTER, 'bench', 'replay'))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader('bench_replay', loader))
    loader.exec_module(module)
    return module


bench = load_bench()


def compare(load, threshold, nodes, per_node, parameters):
    model = Model(nodes, threshold, load, open_for=1e9 if load == 'tokens' else 0)
    conversations, start, end = bench.workload(nodes, per_node, 1200, 1, parameters, model)
    # The replay takes this many seconds, whatever the workload's length.
    speed = (end + 400) / 11
    observed, counted = asyncio.run(bench.through_proxy(load, threshold, nodes, conversations, speed, start, end, progress=False))
    assert not observed.failures
    judged = sum(observed.decisions.values())
    assert judged == sum(len(c.turns) for c in conversations)
    # Loads in flight are written down a moment after the decision; the sums in Lua are those of the decision itself.
    allowed = .01 * judged if load == 'requests' else 0
    assert len(observed.mismatches) <= allowed, (len(observed.mismatches), judged, observed.mismatches[:5])
    assert {kind: count for kind, count in counted.items() if count} == dict(observed.decisions)
    real = observed.outcome.figures()
    runs = [bench.simulated(model, conversations, start, end, seed) for seed in range(1, 9)]
    assert abs(real['turns'] - runs[0]['turns']) < .02 * runs[0]['turns']     # some are asked a little later, beyond what is measured
    off = {}
    for name, margin in MARGIN.items():
        values = [run[name] for run in runs]
        bound = 3 * statistics.stdev(values) + margin
        if abs(real[name] - statistics.mean(values)) > bound:
            off[name] = f'proxy {real[name]:.4f}, simulation {statistics.mean(values):.4f} +- {bound:.4f}'
    assert not off, off
    assert observed.decisions['moved'] > 0, 'no conversation moved: nothing was compared'


@pytest.mark.parametrize('load, threshold, nodes, per_node, parameters', [
    ('requests', 2.0, 6, 8, Parameters()), ('tokens', 1.1, 6, 8, Parameters(turns=4, think_scale=.25))])
def test_proxy_and_simulation_agree(load, threshold, nodes, per_node, parameters):
    machine.undisturbed(lambda: compare(load, threshold, nodes, per_node, parameters))
