# SPDX-License-Identifier: Apache-2.0
"""Runs of the simulation over seeds, and what they say with which confidence."""
import math
import multiprocessing
import random
import sys
from dataclasses import dataclass

import numpy as np

from .simulation import Model, Simulation
from .workload import Parameters, Source, WorkloadError, read_trace

# Two-sided 95% points of Student's distribution for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09)
TRACE_WARM_UP_S = 600
_traces = {}


@dataclass(frozen=True)
class Run:
    policy: str
    model: Model
    per_node: float                 # live conversations a node; with a trace 0 takes all of them
    turns: int                      # to measure
    seed: int
    parameters: Parameters = Parameters()
    trace: str = ''


def _live_seconds(conversations, model, until):
    """Conversation-seconds between first question and last answer."""
    return sum(min(until - c.start, sum(t.gap for t in c.turns) + model.service_seconds(c.turns[-1])) for c in conversations)


def synthetic(run):
    """(conversations, measure_from, measure_until)"""
    source = Source(run.seed, run.parameters)
    live = source.live_seconds(lambda turn: run.model.service_seconds(turn, turn.input_length * .5))
    rate = run.model.nodes * run.per_node / live
    probe = Source(run.seed + 1_000_003, run.parameters)
    turns = np.mean([len(probe.conversation().turns) for _ in range(2000)])
    start = max(3 * live, 600, 1.5 * run.model.open_for)
    end = start + run.turns / (rate * turns)
    return source.arrivals(rate, end), start, end


def traced(run):
    if run.trace not in _traces:
        _traces[run.trace] = read_trace(run.trace)
    conversations = _traces[run.trace]
    end = max(c.start for c in conversations)
    if run.per_node:
        have = _live_seconds(conversations, run.model, end) / end / run.model.nodes
        if run.per_node > have * 1.0001:
            raise WorkloadError(f'--per-node {run.per_node:g}: the trace has {have:.1f} live conversations a node on {run.model.nodes} '
                                'nodes; give fewer, or fewer nodes')
        rng = random.Random(run.seed)
        conversations = [c for c in conversations if rng.random() < run.per_node / have]
    return conversations, min(TRACE_WARM_UP_S, end / 6), end


def execute(run):
    conversations, start, end = traced(run) if run.trace else synthetic(run)
    outcome = Simulation(run.model, run.policy, random.Random(run.seed)).run(conversations, start, end)
    return run, outcome.figures()


def execute_all(runs, processes=2, quiet=False):
    """{run without its seed: [figures, one for each seed]}, with progress on standard error."""
    results, done = {}, 0
    if any(run.trace for run in runs):
        traced(runs[0])                    # a bad trace is an error here, not in a worker
    with multiprocessing.Pool(processes) as pool:
        for run, figures in pool.imap_unordered(execute, runs):
            key = (run.policy, run.model.load, run.model.open_for, run.per_node, run.parameters)
            results.setdefault(key, []).append((run.seed, figures))
            done += 1
            if not quiet:
                print(f'\r{done}/{len(runs)} runs', end='', file=sys.stderr, flush=True)
    if not quiet:
        print(file=sys.stderr)
    return {key: [figures for _, figures in sorted(found, key=lambda pair: pair[0])] for key, found in results.items()}


def interval(values):
    """Mean and half the width of its 95% confidence interval over seeds (0 for one seed)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    point = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 1.96
    return mean, point * deviation / math.sqrt(len(values))


def rate_text(figures, name):
    """A rate per later turn. Never seen is not zero: 3 / turns is the 95% bound then."""
    mean, half = interval([f[name] for f in figures])
    if mean == 0:
        counts = [f['later_turns'] for f in figures]
        turns = sum(counts) if len(set(counts)) > 1 else counts[0]      # one trace replayed with several seeds is one sample
        return f'0 (<{3 / turns:.4%})' if turns else '-'
    return f'{mean:.3%} +-{half:.3%}'


def plain_text(figures, name, form):
    mean, half = interval([f[name] for f in figures])
    return f'{mean:{form}} +-{half:{form}}'


COLUMNS = (('moves/turn', lambda f: rate_text(f, 'moves_per_turn')),
           ('guarded/turn', lambda f: rate_text(f, 'guarded_per_turn')),
           ('added prefill', lambda f: rate_text(f, 'added_prefill') if any(x['moves_per_turn'] for x in f) else '0'),
           ('added tokens/turn', lambda f: plain_text(f, 'added_tokens_per_turn', '.0f') if any(x['moves_per_turn'] for x in f) else '0'),
           ('forgotten prefill', lambda f: rate_text(f, 'forgotten_prefill') if any(x['forgotten_per_turn'] for x in f) else '0'),
           ('hit rate', lambda f: plain_text(f, 'hit_rate', '.2%')),
           ('spread requests', lambda f: plain_text(f, 'spread_requests', '.2f')),
           ('spread live', lambda f: plain_text(f, 'spread_live', '.2f')),
           ('spread prefill', lambda f: plain_text(f, 'spread_prefill', '.2f')),
           ('TTFT p95 s', lambda f: plain_text(f, 'ttft_p95_s', '.2f')))


def table(rows, first):
    """rows: [(label, figures)]"""
    lines = [[first] + [name for name, _ in COLUMNS]]
    lines += [[label] + [text(figures) for _, text in COLUMNS] for label, figures in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
