# SPDX-License-Identifier: Apache-2.0
"""Nodes, their prefix caches, and the ways to choose among them, event by event.

A node prefills one request after the other and decodes all of them side by side. Its cache keeps every prefix it has
seen (a node's store is large), or the most recent `cache_blocks` of them. A turn is asked `gap` seconds after the one
before, or when that one is answered if this is later.
"""
import bisect
import hashlib
import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from . import policy
from .workload import BLOCK

LOADS = ('requests', 'conversations', 'tokens', 'used-tokens')
POLICIES = ('threshold', 'sticky', 'round-robin', 'least-loaded', 'hash', 'bounded-hash')


@dataclass(frozen=True)
class Model:
    nodes: int = 8
    threshold: float = 2.0
    load: str = 'conversations'
    open_for: float = 0.0            # seconds a conversation counts after its last turn was asked; 0: until its last answer
    prefill_rate: float = 10000.0    # tokens/s of a node
    decode_rate: float = 50.0        # tokens/s of one request
    cache_blocks: int = 0            # 0: everything fits
    bound: float = 1.25              # of consistent hashing with bounded loads

    def service_seconds(self, turn, cached=0):
        return (turn.input_length - cached) / self.prefill_rate + turn.output_length / self.decode_rate


class PrefixCache:
    """Which blocks a node holds. The blocks of a prefix come and go from the end, so a prefix is found by bisection."""

    def __init__(self, capacity=0):
        self.capacity = capacity
        self.blocks = OrderedDict() if capacity else set()

    def cached_blocks(self, ids):
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if ids[middle] in self.blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, ids):
        if not self.capacity:
            self.blocks.update(ids)
            return
        for block in reversed(ids):            # the end of a prefix goes first
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


class Ring:
    """Consistent hashing: a node has many points, a key belongs to the next one."""

    def __init__(self, nodes, points=160):
        self.points = sorted((self._hash(f'{node}/{i}'), node) for node in range(nodes) for i in range(points))
        self.places = [place for place, _ in self.points]

    @staticmethod
    def _hash(text):
        return int.from_bytes(hashlib.sha1(text.encode()).digest()[:8], 'big')

    def walk(self, key):
        start = bisect.bisect(self.places, self._hash(str(key)))
        seen = set()
        for i in range(len(self.points)):
            node = self.points[(start + i) % len(self.points)][1]
            if node not in seen:
                seen.add(node)
                yield node


@dataclass
class Outcome:
    turns: int = 0                  # all that were measured
    later_turns: int = 0            # those with a turn before
    changes: int = 0                # later turns on another node than the turn before, for another reason than the next
    forgotten: int = 0              # later turns whose home had expired
    moved: int = 0                  # the policy's own decisions
    guarded: int = 0
    input_tokens: int = 0
    prefill_tokens: int = 0
    added_tokens: int = 0           # prefilled again because the turn is not where its conversation's KV is
    forgotten_tokens: int = 0       # the same after an expired home
    stay_prefill_tokens: int = 0    # had every conversation stayed
    spread_max: float = 0.0
    spread_mean: float = 0.0
    open_max: float = 0.0
    open_mean: float = 0.0
    waits: list = field(default_factory=list)
    node_prefill: list = field(default_factory=list)

    def figures(self):
        def ratio(a, b):
            return a / b if b else 0.0
        waits = sorted(self.waits)
        return {'turns': self.turns, 'later_turns': self.later_turns,
                'moves_per_turn': ratio(self.changes, self.later_turns),
                'guarded_per_turn': ratio(self.guarded, self.later_turns),
                'added_tokens_per_turn': ratio(self.added_tokens, self.turns),
                'added_prefill': ratio(self.added_tokens, self.stay_prefill_tokens),
                'forgotten_per_turn': ratio(self.forgotten, self.later_turns),
                'forgotten_prefill': ratio(self.forgotten_tokens, self.stay_prefill_tokens),
                'hit_rate': 1 - ratio(self.prefill_tokens, self.input_tokens),
                'spread_requests': ratio(self.spread_max, self.spread_mean),
                'spread_live': ratio(self.open_max, self.open_mean),
                'spread_prefill': ratio(max(self.node_prefill, default=0) * len(self.node_prefill), sum(self.node_prefill)),
                'ttft_mean_s': ratio(sum(waits), len(waits)),
                'ttft_p95_s': waits[int(.95 * len(waits))] if waits else 0.0,
                'live_per_node': ratio(self.open_mean, self.turns)}


class Simulation:
    def __init__(self, model, policy_name, random, record=None):
        self.model, self.policy, self.random, self.record = model, policy_name, random, record
        n = model.nodes
        self.caches = [PrefixCache(model.cache_blocks) for _ in range(n)]
        self.free_at = [0.0] * n
        self.load = {kind: [0] * n for kind in LOADS}
        self.live = [0] * n
        self.home = {}               # what the router remembers
        self.node_of = {}            # where the latest turn really was
        self.counted = {}            # size by which a conversation counts among the open ones
        self.closing = {}
        self.ring = Ring(n) if 'hash' in policy_name else None
        self.turn_about = 0
        self.outcome = Outcome(node_prefill=[0] * n)

    def _pick(self, candidates):
        return candidates[0] if len(candidates) == 1 else candidates[int(self.random.random() * len(candidates))]

    def _choose(self, key, weight):
        home, loads = self.home.get(key), self.load[self.model.load]
        if self.policy == 'threshold':
            held = 0
            if home is not None and self.model.load in ('conversations', 'tokens'):
                held = 1 if self.model.load == 'conversations' else self.counted[key]
            return policy.decide(dict(enumerate(loads)), home, self.model.threshold, weight=weight, held=held)
        if self.policy == 'sticky' and home is not None:
            return policy.Decision(policy.STAY, (home,))
        if self.policy == 'round-robin':
            self.turn_about = (self.turn_about + 1) % self.model.nodes
            return policy.Decision(policy.NEW, (self.turn_about,))
        if self.policy == 'hash':
            return policy.Decision(policy.NEW, (next(self.ring.walk(key)),))
        if self.policy == 'bounded-hash':
            bound = self.model.bound * (sum(loads) + weight) / self.model.nodes
            bound = math.ceil(bound) if weight == 1 else max(bound, weight)
            for node in self.ring.walk(key):
                if loads[node] + weight <= bound:
                    return policy.Decision(policy.NEW, (node,))
        return policy.Decision(policy.NEW, policy.least_loaded(dict(enumerate(loads))))

    def _weight(self, turn):
        return 1 if self.model.load in ('requests', 'conversations') else turn.input_length

    def run(self, conversations, measure_from=0.0, measure_until=math.inf, progress=None):
        """conversations come in the order of their start. Only turns asked between the two times count: before, the
        caches warm up; after, no new conversation comes and the last ones drain."""
        queue, number = [], 0
        source = iter(conversations)

        def next_start():
            nonlocal number
            c = next(source, None)
            if c is not None:
                number += 1
                heapq.heappush(queue, (c.start, number, 'ask', number, c, 0))

        next_start()
        sequence = 1 << 40
        while queue:
            now, _, what, key, c, index = heapq.heappop(queue)
            if now >= measure_until:
                break
            if what == 'ask':
                if index == 0:
                    next_start()
                answered = self._ask(now, key, c, index, measure_from <= now < measure_until)
                sequence += 1
                heapq.heappush(queue, (answered, sequence, 'answered', key, c, (index, now)))
                if self.model.open_for:
                    sequence += 1
                    heapq.heappush(queue, (now + self.model.open_for, sequence, 'close', key, c, index))
                if progress:
                    progress(now)
            elif what == 'answered':
                index, asked = index
                turn, node = c.turns[index], self.node_of[key]
                self.load['requests'][node] -= 1
                self.load['used-tokens'][node] -= turn.input_length
                sequence += 1
                if index + 1 < len(c.turns):
                    heapq.heappush(queue, (max(now, asked + c.turns[index + 1].gap), sequence, 'ask', key, c, index + 1))
                else:
                    self.live[node] -= 1
                    if not self.model.open_for:
                        self._close(key)
            elif what == 'close' and self.closing.get(key) == index:
                self._close(key)
        return self.outcome

    def _close(self, key):
        node = self.home.pop(key)
        self.load['conversations'][node] -= 1
        self.load['tokens'][node] -= self.counted.pop(key)

    def _ask(self, now, key, c, index, measured):
        turn, out = c.turns[index], self.outcome
        before = self.node_of.get(key)
        forgotten = index > 0 and key not in self.home
        decision = self._choose(key, self._weight(turn))
        node = self._pick(decision.nodes)
        if self.record is not None:
            self.record.append((now, key, index, decision.kind, node))
        if before is None:
            self.live[node] += 1
        elif before != node:
            self.live[before] -= 1
            self.live[node] += 1
        if measured:
            out.spread_max += max(self.load['requests'])
            out.spread_mean += sum(self.load['requests']) / self.model.nodes
            out.open_max += max(self.live)
            out.open_mean += sum(self.live) / self.model.nodes
        cache = self.caches[node]
        cached = min(cache.cached_blocks(turn.hash_ids) * BLOCK, turn.input_length - 1)
        if index:
            earlier = c.turns[index - 1]
            stayed = min(common_blocks(earlier, turn) * BLOCK, turn.input_length - 1)
        else:
            stayed = cached
        cache.add(kept_blocks(c, index))
        prefill = turn.input_length - cached
        begin = max(now, self.free_at[node])
        self.free_at[node] = begin + prefill / self.model.prefill_rate
        answered = self.free_at[node] + turn.output_length / self.model.decode_rate
        self._count(key, node, turn)
        self.closing[key] = index
        if measured:
            out.turns += 1
            out.later_turns += index > 0
            out.changes += index > 0 and not forgotten and before != node
            out.forgotten += forgotten
            out.moved += decision.kind == policy.MOVED
            out.guarded += decision.kind == policy.GUARDED
            out.input_tokens += turn.input_length
            out.prefill_tokens += prefill
            again = max(0, stayed - cached)
            out.added_tokens += 0 if forgotten else again
            out.forgotten_tokens += again if forgotten else 0
            out.stay_prefill_tokens += turn.input_length - max(stayed, cached)
            out.waits.append(self.free_at[node] - now)
            out.node_prefill[node] += prefill
        return answered

    def _count(self, key, node, turn):
        home = self.home.get(key)
        if home is not None:
            self.load['conversations'][home] -= 1
            self.load['tokens'][home] -= self.counted[key]
        self.load['conversations'][node] += 1
        self.load['tokens'][node] += turn.input_length
        self.load['requests'][node] += 1
        self.load['used-tokens'][node] += turn.input_length
        self.counted[key] = turn.input_length
        self.home[key] = self.node_of[key] = node


def common_blocks(earlier, turn):
    """Blocks of turn that a node holds which has answered the turn before: its input and its output."""
    blocks = min((earlier.input_length + earlier.output_length) // BLOCK, len(turn.hash_ids))
    # What the user took back or edited is no common prefix.
    mine, theirs = turn.hash_ids, earlier.hash_ids
    low, high = 0, min(blocks, len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low if low < len(theirs) - 1 else blocks


def kept_blocks(c, index):
    """Blocks that a node holds after it has answered: the turn's own, with those of the answer under the ids that the next turn
    gives them."""
    turn = c.turns[index]
    if index + 1 == len(c.turns):
        return turn.hash_ids
    shared = common_blocks(turn, c.turns[index + 1])
    return c.turns[index + 1].hash_ids[:shared] + turn.hash_ids[shared:]
