# SPDX-License-Identifier: Apache-2.0
"""Drives the real proxy one event at a time, with engines that answer when told, and holds each decision against the model.

The model has its own books: what is in flight, who is open with which size, where each home is. Nothing of what the proxy
says enters them.
"""
import asyncio
import random
from collections import Counter

from tidepool_router import policy
from tidepool_router.engine import Engine
from tidepool_router.http1 import Client
from tidepool_router.proxy import Proxy


class Mismatch(AssertionError):
    pass


class Stepper:
    def __init__(self, proxy, engines, load, threshold, seed):
        self.proxy, self.engines, self.load, self.threshold = proxy, engines, load, threshold
        self.random = random.Random(seed)
        self.client, self.metrics_client = Client(proxy.port), Client(proxy.metrics_port)
        self.loads = {name: 0 for name in engines}
        self.up = {name: True for name in engines}
        self.draining = {name: False for name in engines}
        self.home, self.size, self.in_flight = {}, {}, {}
        self.kinds = Counter()
        self.next_conversation = 0

    def usable(self):
        return [name for name in self.engines if self.up[name] and not self.draining[name]]

    async def settled(self):
        """The proxy takes a request off the books a moment after its client has the last byte."""
        for _ in range(400):
            _, _, body = await self.metrics_client.request('GET', '/metrics')
            seen = {}
            for line in body.decode().splitlines():
                if line.startswith('tidepool_router_node_load'):
                    seen[line.split('"')[1]] = int(line.rsplit(' ', 1)[1])
            if seen == self.loads:
                return
            await asyncio.sleep(.005)
        raise Mismatch(f'loads: the proxy counts {seen}, the model {self.loads}')

    async def ask(self, conversation):
        keyed = conversation is not None
        name = conversation if keyed else f'nobody-{self.random.random()}'
        weight, held = 1, 0
        if self.load == 'conversations':
            held = 1 if conversation in self.home else 0
        elif self.load == 'tokens':
            held = self.size.get(conversation, 0)
            weight = held + self.random.choice((10, 100, 1000)) if self.random.random() < .9 else held + self.random.randint(1, 20000)
        home = self.home.get(conversation)
        expected = policy.decide({n: self.loads[n] for n in self.usable()}, home, self.threshold, weight=weight, held=held,
                                 home_load=self.loads.get(home), home_up=self.up.get(home, False), keyed=keyed)
        headers = {'x-input-tokens': str(weight)}
        if keyed:
            headers['x-conversation-id'] = conversation
        engine_key = conversation if keyed else ''
        task = asyncio.ensure_future(self.client.request('POST', '/v1/chat/completions', b'{}', headers))
        arrivals = [asyncio.ensure_future(engine.arrived.get()) for engine in self.engines.values()]
        done, waiting = await asyncio.wait([task, *arrivals], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        for other in waiting:
            if other is not task:
                other.cancel()
        node = next((f.result()[0] for f in done if f is not task), None)
        before = dict(self.loads)
        if node not in expected.nodes:
            answer = task.result()[:2] if task in done else 'no answer'
            raise Mismatch(f'{name} went to {node}, the model has {expected}; home {home}, loads {before}, held {held}, weight {weight}, '
                           f'up {self.up}, draining {self.draining}; {answer}')
        if self.load == 'requests':
            self.loads[node] += 1
        elif keyed:
            if home is not None:
                self.loads[home] -= held
            self.loads[node] += weight
            self.size[conversation] = weight
        self.kinds[expected.kind] += 1
        if self.load != 'requests' and keyed:
            self.home[conversation] = node
        self.in_flight[name] = (task, node, engine_key, expected.kind)

    async def finish(self, name):
        task, node, engine_key, kind = self.in_flight.pop(name)
        self.engines[node].release(engine_key)
        status, headers, _ = await asyncio.wait_for(task, 10)
        if status != 200 or headers.get('x-router-decision') != kind or headers.get('x-router-node') != node:
            raise Mismatch(f'{name}: answered {status} by {headers.get("x-router-node")} as {headers.get("x-router-decision")}; '
                           f'the model has {kind} on {node}')
        if self.load == 'requests':
            self.loads[node] -= 1
            if engine_key:
                self.home[name] = node

    async def operate(self):
        """The operator takes a node out, drains one, or brings one back."""
        name = self.random.choice(list(self.engines))
        what = self.random.choice(('maint', 'drain', 'back', 'back'))
        if what != 'back' and len(self.usable()) <= 2 and name in self.usable():
            return
        if what == 'maint':
            self.up[name] = False
            self.proxy.admin(f'set server nodes/{name} state maint')
        elif what == 'drain':
            self.draining[name] = True
            self.proxy.admin(f'set server nodes/{name} weight 0')
        else:
            self.up[name], self.draining[name] = True, False
            self.proxy.admin(f'set server nodes/{name} state ready')
            self.proxy.admin(f'set server nodes/{name} weight 100%')
        await asyncio.sleep(.06)                 # the action asks for states again after 20 ms

    async def run(self, decisions, operations=True):
        steps = 0
        while sum(self.kinds.values()) < decisions:
            steps += 1
            await self.settled()
            pick = self.random.random()
            most_in_flight = 3 if steps // 150 % 2 else 24      # quiet and busy times
            if operations and pick < .04:
                await self.operate()
            elif self.in_flight and (pick < .45 or len(self.in_flight) >= most_in_flight):
                name = self.random.choice(list(self.in_flight))
                await self.finish(name)
            elif pick < .50 and not any(n.startswith('nobody') for n in self.in_flight):
                await self.ask(None)
            elif pick < .62 or not self.home:
                self.next_conversation += 1
                await self.ask(f'c{self.next_conversation}')
            else:
                idle = [c for c in self.home if c not in self.in_flight]
                if idle:
                    # Conversations of one node are asked more often, so it gets hot.
                    hot = [c for c in idle if self.home[c] == list(self.engines)[steps // 60 % len(self.engines)]]
                    await self.ask(self.random.choice(hot if hot and self.random.random() < .8 else idle))
        while self.in_flight:
            await self.finish(next(iter(self.in_flight)))
        await self.settled()
        seen = {kind: count for kind, count in self.proxy.decisions().items() if count}
        if seen != dict(self.kinds):
            raise Mismatch(f'decisions: the proxy counts {seen}, the model {dict(self.kinds)}')


async def step_through(load, threshold=2.0, nodes=4, decisions=600, seed=1, edit=None, operations=True):
    engines = {f'n{i}': await Engine(f'n{i}', held=True).start() for i in range(1, nodes + 1)}
    options = ['--load', load, '--threshold', str(threshold)]
    if load == 'tokens':
        options += ['--tokens', 'header:x-input-tokens']
    try:
        with Proxy({name: engine.port for name, engine in engines.items()}, *options, edit=edit) as proxy:
            stepper = Stepper(proxy, engines, load, threshold, seed)
            try:
                await stepper.run(decisions, operations)
            finally:
                for task, *_ in stepper.in_flight.values():
                    task.cancel()
                stepper.client.close()
                stepper.metrics_client.close()
        return stepper.kinds
    finally:
        for engine in engines.values():
            await engine.stop()
