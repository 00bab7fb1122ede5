# SPDX-License-Identifier: Apache-2.0
"""Conversations to route: read from a trace, or made up with the statistics of one.

A trace has one JSON object a line: timestamp (ms), input_length and output_length (tokens), hash_ids (one for each
block of 512 tokens; equal ids are equal prefixes). A request continues the one whose blocks it repeats, all but the last.
"""
import json
from dataclasses import dataclass

import numpy as np

BLOCK = 512


class WorkloadError(ValueError):
    pass


@dataclass
class Turn:
    gap: float             # seconds since the turn before was asked (0 for the first)
    input_length: int
    output_length: int
    hash_ids: list


@dataclass
class Conversation:
    start: float           # seconds
    turns: list


# Measured on an hour of a chat service with 12,031 requests: values at these shares, straight lines between (of the
# logarithm, where all are positive). tests/test_simulation.py compares what comes out with the trace itself.
SHARES = (0, .01, .05, .10, .25, .50, .75, .90, .95, .99, 1)
GAP_S = (1, 13, 29, 43, 75, 140, 305, 530, 760, 1600, 3030)
FIRST_INPUT = (890, 894, 900, 908, 1490, 5989, 14358, 26499, 42000, 87203, 126195)
OUTPUT = (1, 3, 10, 24, 156, 350, 472, 597, 740, 1119, 2000)
GROWTH_SHARES = (0, .01, .05, .10, .25, .50, .70, .80, .85, .90, .95, .98, .99, .999, 1)
GROWTH = (-1291, -305, -21, -4, 9, 26, 140, 900, 1950, 4194, 8200, 11500, 16705, 28000, 91467)     # next input - (input + output)
# After turn k another one follows with this chance; the last holds for all later turns.
CONTINUES = (.285, .43, .50, .55, .62, .66, .70, .78)


@dataclass(frozen=True)
class Parameters:
    turns: float = 0           # mean turns of a conversation, geometric; 0: as in the trace
    think_scale: float = 1.0   # multiplies the times between turns
    input_scale: float = 1.0   # multiplies the first turn's input
    growth_scale: float = 1.0  # multiplies what the user adds in each turn
    output_scale: float = 1.0
    system_tokens: int = 512   # shared by all conversations

    def __post_init__(self):
        for name in ('think_scale', 'input_scale', 'growth_scale', 'output_scale'):
            if not getattr(self, name) > 0:
                raise WorkloadError(f'{name} {getattr(self, name)!r}: must be above 0')
        if self.turns and self.turns < 1:
            raise WorkloadError(f'turns {self.turns!r}: a conversation has at least one turn; give 1 or more, or 0 for the trace\'s')


def _draw(random, values, count):
    shares = GROWTH_SHARES if values is GROWTH else SHARES
    u = random.random(count)
    if min(values) > 0:
        return np.exp(np.interp(u, shares, np.log(values)))
    return np.interp(u, shares, values)


class Source:
    """Makes conversations one after the other, all different, all from one seed."""

    def __init__(self, seed, parameters=Parameters()):
        self.random = np.random.default_rng(seed)
        self.parameters = parameters
        self.next_block = 1 << 20
        self.pools = {}

    def _value(self, name, values):
        pool = self.pools.get(name)
        if not pool:
            pool = self.pools[name] = _draw(self.random, values, 4096).tolist()
        return pool.pop()

    def _chance(self):
        pool = self.pools.get('chance')
        if not pool:
            pool = self.pools['chance'] = self.random.random(4096).tolist()
        return pool.pop()

    def _turn_count(self):
        count = 1
        mean = self.parameters.turns
        while count < 200:
            follows = 1 - 1 / mean if mean else CONTINUES[min(count, len(CONTINUES)) - 1]
            if self._chance() >= follows:
                break
            count += 1
        return count

    def conversation(self, start=0.0):
        p = self.parameters
        system_blocks = list(range(p.system_tokens // BLOCK))
        context = list(system_blocks)
        turns = []
        length = 0
        for number in range(self._turn_count()):
            gap = 0.0
            if number == 0:
                length = p.system_tokens + max(1, self._value('first', FIRST_INPUT) * p.input_scale - p.system_tokens)
            else:
                gap = self._value('gap', GAP_S) * p.think_scale
                before = turns[-1]
                length = max(before.input_length + 1, before.input_length + before.output_length
                             + self._value('growth', GROWTH) * p.growth_scale)
            length = int(length)
            full = length // BLOCK
            while len(context) < full:
                context.append(self.next_block)
                self.next_block += 1
            ids = context[:full]
            if length % BLOCK:
                ids = ids + [self.next_block]      # a part of a block is no prefix of a later turn
                self.next_block += 1
            output = max(1, int(self._value('output', OUTPUT) * p.output_scale))
            turns.append(Turn(gap, length, output, ids))
        return Conversation(start, turns)

    def arrivals(self, rate, seconds):
        t = 0.0
        while True:
            t += self.random.exponential(1 / rate)
            if t > seconds:
                return
            yield self.conversation(t)

    def live_seconds(self, service_seconds, samples=3000):
        """Mean time from a conversation's first question to its last answer; service_seconds(turn) is for one turn."""
        other = Source(self.random.integers(1 << 62), self.parameters)
        total = 0.0
        for _ in range(samples):
            c = other.conversation()
            total += sum(turn.gap for turn in c.turns) + service_seconds(c.turns[-1])
        return total / samples


def read_trace(path):
    try:
        lines = open(path)
    except OSError as error:
        raise WorkloadError(f'trace {path!r}: {error.strerror}; give a file with one JSON request a line') from None
    conversations, latest, request_of = [], {}, []
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                r = json.loads(line)
                t, ids = r['timestamp'] / 1000, r['hash_ids']
                turn = Turn(0.0, int(r['input_length']), int(r['output_length']), list(ids))
            except (ValueError, KeyError, TypeError) as error:
                raise WorkloadError(f'trace {path!r} line {number}: {error!r}; expected a JSON object with timestamp, '
                                    'input_length, output_length and hash_ids') from None
            depth = 0
            while depth < len(ids) and ids[depth] in latest:
                depth += 1
            before = latest[ids[depth - 1]] if depth > 1 else None
            if before is not None and depth >= request_of[before][2] - 1:
                conversation, asked, _ = request_of[before]
                last = conversation.start + sum(turn.gap for turn in conversation.turns)
                turn.gap = max(0.0, t - last)      # of the few that branch, the branches follow each other
                conversation.turns.append(turn)
            else:
                conversation = Conversation(t, [turn])
                conversations.append(conversation)
            request_of.append((conversation, t, len(ids)))
            for block in ids:
                latest[block] = number - 1
    if not conversations:
        raise WorkloadError(f'trace {path!r} is empty; expected one JSON request a line')
    return conversations


def write_trace(conversations, path):
    rows = []
    for c in conversations:
        t = c.start
        for turn in c.turns:
            t += turn.gap
            rows.append((t, turn))
    rows.sort(key=lambda row: row[0])
    with open(path, 'w') as file:
        for t, turn in rows:
            file.write(json.dumps({'timestamp': int(t * 1000), 'input_length': turn.input_length,
                                   'output_length': turn.output_length, 'hash_ids': turn.hash_ids}) + '\n')


def within(conversations, seconds):
    """What an observer of that long sees: turns asked later are cut off."""
    seen = []
    for c in conversations:
        t, turns = c.start, []
        for turn in c.turns:
            t += turn.gap
            if t > seconds:
                break
            turns.append(turn)
        if turns:
            seen.append(Conversation(c.start, turns))
    return seen


def statistics(conversations):
    counts = np.array([len(c.turns) for c in conversations])
    turns = [turn for c in conversations for turn in c.turns]
    later = [(a, b) for c in conversations for a, b in zip(c.turns, c.turns[1:])]
    gaps = np.array([b.gap for _, b in later]) if later else np.zeros(1)
    growth = np.array([b.input_length - a.input_length - a.output_length for a, b in later]) if later else np.zeros(1)
    first = np.array([c.turns[0].input_length for c in conversations])
    inputs = np.array([turn.input_length for turn in turns])
    outputs = np.array([turn.output_length for turn in turns])
    return {'conversations': len(conversations), 'requests': len(turns),
            'turns_mean': counts.mean(), 'single_turn_share': (counts == 1).mean(), 'turns_p99': np.percentile(counts, 99),
            'gap_median_s': np.median(gaps), 'gap_mean_s': gaps.mean(),
            'first_input_median': np.median(first), 'first_input_mean': first.mean(),
            'input_mean': inputs.mean(), 'output_median': np.median(outputs), 'output_mean': outputs.mean(),
            'growth_median': np.median(growth), 'growth_mean': growth.mean()}
