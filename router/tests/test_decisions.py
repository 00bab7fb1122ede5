# SPDX-License-Identifier: Apache-2.0
"""Each decision of the real proxy is the one that the model of the policy allows, for every kind of load."""
import asyncio
import re

import pytest
from harness import machine
from stepping import Mismatch, step_through

from tidepool_router import policy

EXERCISED = (policy.NEW, policy.STAY, policy.MOVED, policy.GUARDED, policy.REHOMED, policy.UNKEYED)


@pytest.mark.parametrize('load, threshold, nodes, seed', [
    ('requests', 2.0, 6, 1), ('requests', 1.25, 3, 2), ('requests', 2.0, 8, 3),
    ('conversations', 1.25, 4, 4), ('tokens', 2.0, 4, 5), ('tokens', 1.5, 6, 6)])
def test_each_decision_is_the_models(load, threshold, nodes, seed):
    # The proxy's checks of its nodes' health fail when the machine stands still.
    kinds = machine.undisturbed(lambda: asyncio.run(step_through(load, threshold, nodes, 500, seed)))
    assert sum(kinds.values()) >= 500
    missing = [kind for kind in EXERCISED if not kinds[kind]]
    assert not missing, f'the run never came to {missing}: {dict(kinds)}'


def drop(pattern):
    return lambda text: re.sub(pattern, '', text)


BROKEN = {
    'threshold 3 in place of 2': lambda t: t.replace('mul(200)', 'mul(300)'),
    'no guard': lambda t: re.sub(r',sub\(txn\.limit_after\) le 0', ',sub(txn.limit_after) ge -999999', t),
    'never moves': drop(r'  http-request set-var\(txn\.decision\) str\(moved\).*\n'),
    'forgets homes': drop(r'  stick store-request.*\n'),
    'round-robin for leastconn': lambda t: t.replace('balance leastconn', 'balance roundrobin'),
    'ignores draining': lambda t: t.replace('srv_weight', 'srv_iweight'),
    'does not stay': lambda t: t.replace('-m str stay guarded', '-m str guarded'),
}


def test_a_broken_threshold_in_the_lua_action_is_noticed():
    with pytest.raises(Mismatch):
        asyncio.run(step_through('tokens', 1.5, 6, 1500, 6, edit=lambda text: text.replace('"tokens 150 ', '"tokens 400 ')))


@pytest.mark.parametrize('how', BROKEN)
def test_a_broken_policy_is_noticed(how):
    with pytest.raises(Mismatch):
        asyncio.run(step_through('requests', 2.0, 8, 1500, 1, edit=BROKEN[how]))
