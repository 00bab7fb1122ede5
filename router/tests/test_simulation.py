# SPDX-License-Identifier: Apache-2.0
"""The workload has the trace's statistics, the simulation is reproducible and right in cases that can be worked out by hand."""
import os
import random
import subprocess
import sys

import pytest
from conftest import ROUTER

from tidepool_router import experiment, policy
from tidepool_router.simulation import POLICIES, Model, PrefixCache, Simulation, common_blocks
from tidepool_router.workload import (Conversation, Parameters, Source, Turn, WorkloadError, read_trace, statistics, within,
                                      write_trace)


def hour(seed=1, **parameters):
    source = Source(seed, Parameters(**parameters))
    return within(source.arrivals(8072 / 3537, 3537), 3537)


# What the synthetic hour may differ by from the trace's, as a share.
ALLOWED = {'conversations': .05, 'requests': .06, 'turns_mean': .05, 'single_turn_share': .04, 'turns_p99': .3, 'gap_median_s': .10,
           'gap_mean_s': .10, 'first_input_median': .08, 'first_input_mean': .08, 'input_mean': .10, 'output_median': .05,
           'output_mean': .05, 'growth_median': .25, 'growth_mean': .25}


def test_the_synthetic_workload_has_the_traces_statistics(trace):
    real, made = statistics(read_trace(trace)), statistics(hour())
    off = {name: (made[name], real[name]) for name, share in ALLOWED.items() if abs(made[name] - real[name]) > share * abs(real[name])}
    assert not off, off
    assert set(ALLOWED) == set(real)


def test_the_trace_and_the_synthetic_workload_simulate_alike(trace):
    figures = {}
    for name, conversations in (('trace', read_trace(trace)), ('made', hour())):
        end = max(c.start for c in conversations)
        figures[name] = Simulation(Model(load='requests'), 'threshold', random.Random(1)).run(conversations, 600, end).figures()
    assert abs(figures['trace']['hit_rate'] - figures['made']['hit_rate']) < .06
    assert abs(figures['trace']['live_per_node'] - figures['made']['live_per_node']) < 6
    assert abs(figures['trace']['moves_per_turn'] - figures['made']['moves_per_turn']) < .006


def test_a_written_trace_reads_back_the_same(tmp_path):
    made = hour(3)
    write_trace(made, tmp_path / 'trace')
    assert mean_statistics(read_trace(str(tmp_path / 'trace'))) == pytest.approx(mean_statistics(made), rel=.05)     # a first turn within one block is not recognised


def mean_statistics(conversations):
    found = statistics(conversations)
    return [found[name] for name in ('conversations', 'requests', 'turns_mean', 'input_mean', 'output_mean', 'gap_mean_s')]


@pytest.mark.parametrize('line', ['', 'x', '{"timestamp": 0}', '[]', '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}'])
def test_a_bad_trace_names_its_line(tmp_path, line):
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
    (tmp_path / 'trace').write_text(good + line + '\n')
    with pytest.raises(WorkloadError, match='line 2'):
        read_trace(str(tmp_path / 'trace'))


def test_the_same_seed_gives_the_same_figures():
    run = experiment.Run('threshold', Model(load='requests'), 4, 600, 5)
    assert experiment.execute(run)[1] == experiment.execute(run)[1]
    assert experiment.execute(run)[1] != experiment.execute(experiment.Run('threshold', Model(load='requests'), 4, 600, 6))[1]


def talk(start, turns, length=5120, growth=512, gap=60.0, base=0):
    blocks = [base + i for i in range(1000)]
    return Conversation(start, [Turn(gap if i else 0.0, length + i * growth, 1, blocks[:(length + i * growth) // 512]) for i in range(turns)])


def test_a_sticky_conversation_prefills_only_what_is_new():
    figures = Simulation(Model(nodes=2), 'sticky', random.Random(1)).run([talk(0, 3)]).figures()
    # 5120 + 5632 + 6144 tokens asked; 5120 + 512 + 512 prefilled.
    assert figures['hit_rate'] == pytest.approx(1 - 6144 / 16896)
    assert figures['added_prefill'] == 0 == figures['moves_per_turn']


def test_round_robin_prefills_each_turn_again():
    simulation = Simulation(Model(nodes=3), 'round-robin', random.Random(1))
    figures = simulation.run([talk(0, 3)]).figures()
    assert figures['hit_rate'] == 0 and figures['moves_per_turn'] == 1
    assert figures['added_prefill'] == pytest.approx((5120 + 5632) / 6144)
    assert figures['added_tokens_per_turn'] == pytest.approx((5120 + 5632) / 3)


def test_a_move_costs_one_cold_prefill_and_then_stays():
    record = []
    simulation = Simulation(Model(nodes=4, load='requests'), 'threshold', random.Random(1), record)
    # Three long answers keep the first conversation's home over twice the average when it comes back.
    home = {'node': None}
    choose = simulation._choose

    def crowd(key, weight):
        if key != 1 and home['node'] is not None:
            return policy.Decision(policy.NEW, (home['node'],))
        return choose(key, weight)
    simulation._choose = crowd
    first = talk(0, 3)
    others = [Conversation(10.0 + i, [Turn(0.0, 100, 4000, [10000 + i])]) for i in range(3)]
    original_ask = simulation._ask

    def ask(now, key, c, index, measured):
        answered = original_ask(now, key, c, index, measured)
        if key == 1 and index == 0:
            home['node'] = simulation.node_of[1]
        return answered
    simulation._ask = ask
    outcome = simulation.run([first, *others])
    mine = [(kind, node) for _, key, _, kind, node in record if key == 1]
    assert [kind for kind, _ in mine] == ['new', 'moved', 'stay']
    assert mine[1][1] == mine[2][1] != mine[0][1]
    assert outcome.added_tokens == 5120


def test_a_huge_conversation_never_bounces():
    for other in range(0, 900, 100):
        loads = {'a': 5000 + other, 'b': other, 'c': other, 'd': other}
        assert policy.decide(loads, 'a', 2.0, weight=5100, held=5000).kind in (policy.GUARDED, policy.STAY)
    assert policy.decide({'a': 5000, 'b': 0, 'c': 0, 'd': 0}, 'a', 2.0, weight=100, held=90).kind == policy.MOVED


def test_the_cache_forgets_the_least_recent_prefix_from_its_end():
    cache = PrefixCache(6)
    cache.add([1, 2, 3, 4])
    cache.add([5, 6, 7, 8])
    assert cache.cached_blocks([5, 6, 7, 8]) == 4 and cache.cached_blocks([1, 2, 3, 4]) == 2
    assert common_blocks(Turn(0, 1024, 1, [1, 2]), Turn(0, 1536, 1, [1, 9, 3])) == 2      # the last block was partial: its id says nothing


def test_the_policies_differ_as_they_must():
    results = {name: experiment.execute(experiment.Run(name, Model(load='tokens'), 8, 3000, 1))[1] for name in POLICIES}
    assert results['round-robin']['moves_per_turn'] > .8 and results['least-loaded']['moves_per_turn'] > .8
    assert results['hash']['moves_per_turn'] == 0 == results['sticky']['moves_per_turn']
    assert 0 < results['bounded-hash']['moves_per_turn'] < .6
    assert results['threshold']['hit_rate'] > results['bounded-hash']['hit_rate'] + .03
    assert results['threshold']['hit_rate'] > results['round-robin']['hit_rate'] + .2
    assert results['threshold']['moves_per_turn'] < .02


def test_the_claim_where_it_holds_and_where_it_does_not():
    """Open conversations' tokens as load: next to no moves. Requests in flight as load: many at 8 a node."""
    def figures(load, per_node):
        return [experiment.execute(experiment.Run('threshold', Model(load=load), per_node, 4000, seed))[1] for seed in (1, 2, 3)]
    def mean(name, found):
        return sum(f[name] for f in found) / len(found)
    assert mean('moves_per_turn', figures('tokens', 32)) < .0005
    assert mean('added_prefill', figures('tokens', 8)) < .004
    assert mean('moves_per_turn', figures('conversations', 32)) == 0
    assert mean('moves_per_turn', figures('requests', 8)) > .04
    assert mean('added_prefill', figures('requests', 8)) > .02


@pytest.mark.parametrize('options, parts', [
    (['--nodes', '1'], ('--nodes 1', '2 or more')), (['--load', 'x'], ("'x'", 'requests')), (['--policy', 'y'], ("'y'", 'threshold')),
    (['--curve', '2,a'], ("'2,a'",)), (['--trace', '/nonexistent'], ("'/nonexistent'", 'No such file')),
    (['--threshold', '0.5'], ("'0.5'", 'above 1')), (['--mean-turns', '0.5'], ('0.5', 'at least one turn')),
    (['--think-scale', '0'], ('think_scale', 'above 0'))])
def test_a_bad_parameter_is_a_clear_error(options, parts):
    run = subprocess.run([sys.executable, os.path.join(ROUTER, 'simulate'), *options], capture_output=True, text=True)
    assert run.returncode != 0 and run.stderr.startswith('simulate: ') and 'Traceback' not in run.stderr
    assert all(part in run.stderr for part in parts), run.stderr


def test_the_command_prints_a_curve_and_draws_it(tmp_path):
    png = tmp_path / 'curve.png'
    run = subprocess.run([sys.executable, os.path.join(ROUTER, 'simulate'), '--curve', '2,8', '--seeds', '2', '--turns', '400',
                          '--load', 'tokens,requests', '--chart', str(png)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count('per node') == 2 and png.read_bytes().startswith(b'\x89PNG')
