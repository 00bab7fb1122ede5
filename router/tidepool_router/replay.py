# SPDX-License-Identifier: Apache-2.0
"""Replays conversations through the real proxy to test engines, and takes the same figures as the simulation."""
import asyncio
import heapq
import json
import sys
from collections import Counter
from dataclasses import dataclass, field

from . import policy
from .http1 import Broken, Client
from .simulation import Outcome, common_blocks, kept_blocks
from .workload import BLOCK


@dataclass
class Observed:
    outcome: Outcome
    decisions: Counter = field(default_factory=Counter)
    mismatches: list = field(default_factory=list)       # decisions that the model does not allow
    failures: list = field(default_factory=list)         # requests without a whole answer


class Replay:
    """engines: {name: Engine} in this process; what they have in flight is asked of them for the load spread. Times are the
    workload's own; the clock runs `speed` times as fast."""

    def __init__(self, port, engines, load, threshold, speed, measure_from=0.0, measure_until=float('inf'), progress=False):
        self.client, self.engines, self.names = Client(port), engines, list(engines)
        self.load, self.threshold, self.speed = load, threshold, speed
        self.measure_from, self.measure_until, self.progress = measure_from, measure_until, progress
        self.observed = Observed(Outcome(node_prefill=[0] * len(engines)))
        self.node_of, self.size_of, self.alive = {}, {}, set()

    def _virtual(self):
        return (asyncio.get_running_loop().time() - self.start) * self.speed

    async def run(self, conversations):
        loop = asyncio.get_running_loop()
        self.start = loop.time() + .05
        queue = [(c.start, number, c, 0) for number, c in enumerate(conversations)]
        heapq.heapify(queue)
        total, done = sum(len(c.turns) for c in conversations), 0
        running, woken = set(), asyncio.Event()
        while queue or running:
            woken.clear()
            now = self._virtual()
            while queue and queue[0][0] <= now:
                at, key, c, index = heapq.heappop(queue)
                self.alive.add(key)
                task = loop.create_task(self._turn(at, key, c, index))
                task.where = (at, key, c, index)
                task.add_done_callback(lambda _: woken.set())
                running.add(task)
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()                                  # an error of the replay itself ends it
                done += 1
                at, key, c, index = task.where
                if index + 1 < len(c.turns):
                    heapq.heappush(queue, (max(self._virtual(), at + c.turns[index + 1].gap), key, c, index + 1))
                else:
                    self.alive.discard(key)
                if self.progress and done % 100 == 0:
                    print(f'\r{done}/{total} requests', end='', file=sys.stderr, flush=True)
            pause = min((queue[0][0] - self._virtual()) / self.speed, 1.0) if queue else 1.0
            if pause > 0 and not woken.is_set():
                try:
                    await asyncio.wait_for(woken.wait(), pause)
                except asyncio.TimeoutError:
                    pass
        if self.progress:
            print(file=sys.stderr)
        self.client.close()
        return self.observed

    async def _turn(self, at, key, c, index):
        turn, home = c.turns[index], self.node_of.get(key)
        in_flight = [engine.running for engine in self.engines.values()]
        live = Counter(self.node_of[k] for k in self.alive if k in self.node_of)
        body = json.dumps({'input_length': turn.input_length, 'output_length': turn.output_length, 'hash_ids': turn.hash_ids,
                           'kept_ids': kept_blocks(c, index)}).encode()
        headers = {'x-conversation-id': f'conversation-{key}', 'x-input-tokens': str(turn.input_length)}
        try:
            status, head, answer = await self.client.request('POST', '/v1/chat/completions', body, headers)
        except Broken as error:
            self.observed.failures.append(f'turn {index} of {key}: {error}')
            return
        if status != 200:
            self.observed.failures.append(f'turn {index} of {key}: status {status}')
            return
        node = head['x-router-node']
        self._judge(key, index, home, turn, head)
        self.node_of[key], self.size_of[key] = node, turn.input_length
        if self.measure_from <= at < self.measure_until:
            cached = json.loads(answer)['usage']['prompt_tokens_details']['cached_tokens']
            self._measure(c, index, home, node, cached, head['x-router-decision'], in_flight, live)

    def _judge(self, key, index, home, turn, head):
        """The decision against the model, given the loads that the proxy saw; home and sizes are the replay's own books."""
        loads = {name: int(value) for name, value in (pair.split('=') for pair in head['x-router-loads'].split())}
        weight, held = 1, 0
        if self.load == 'tokens':
            weight, held = turn.input_length, self.size_of.get(key, 0)
        elif self.load == 'conversations':
            held = 1 if home else 0
        expected = policy.decide(loads, home, self.threshold, weight=weight, held=held)
        kind, node = head['x-router-decision'], head['x-router-node']
        self.observed.decisions[kind] += 1
        if kind != expected.kind or node not in expected.nodes:
            self.observed.mismatches.append(f'turn {index} of {key}: {kind} on {node}; the model has {expected}; home {home}, '
                                            f'loads {loads}, held {held}, weight {weight}')

    def _measure(self, c, index, home, node, cached, kind, in_flight, live):
        out, turn = self.observed.outcome, c.turns[index]
        count = len(self.names)
        out.turns += 1
        out.later_turns += index > 0
        out.changes += index > 0 and node != home
        out.moved += kind == policy.MOVED
        out.guarded += kind == policy.GUARDED
        out.spread_max += max(in_flight)
        out.spread_mean += sum(in_flight) / count
        out.open_max += max(live.values(), default=0)
        out.open_mean += sum(live.values()) / count
        stayed = min(common_blocks(c.turns[index - 1], turn) * BLOCK, turn.input_length - 1) if index else cached
        out.input_tokens += turn.input_length
        out.prefill_tokens += turn.input_length - cached
        out.added_tokens += max(0, stayed - cached)
        out.stay_prefill_tokens += turn.input_length - max(stayed, cached)
        out.node_prefill[self.names.index(node)] += turn.input_length - cached
