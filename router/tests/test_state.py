# SPDX-License-Identifier: Apache-2.0
"""Homes: they outlive a reload, two routers agree on them, and a node that leaves, joins, drains or dies moves what it must."""
import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest

from tidepool_router.engine import Engine
from tidepool_router.http1 import Broken, Client
from tidepool_router.proxy import ROUTER, Proxy, free_ports

LOADS = {'requests': ('--load', 'requests'), 'conversations': ('--load', 'conversations'),
         'tokens': ('--load', 'tokens', '--tokens', 'header:x-input-tokens')}


@asynccontextmanager
async def engines(count):
    running = {f'n{i}': await Engine(f'n{i}', speed=1e6).start() for i in range(1, count + 1)}
    try:
        yield running
    finally:
        for engine in running.values():
            await engine.stop()


@asynccontextmanager
async def router(*arguments, **named):
    """Nothing here may keep the engines, which share this loop, from answering health checks."""
    proxy = await asyncio.to_thread(Proxy, *arguments, **named)
    try:
        await asyncio.to_thread(proxy.start)
        yield proxy
    finally:
        proxy.stop()


def alone():
    return {'r1': free_ports(1)[0]}


def ports(running, names=None):
    return {name: engine.port for name, engine in running.items() if names is None or name in names}


async def ask(client, conversation, tokens=100):
    status, head, _ = await client.request('POST', '/v1/chat/completions', b'{}',
                                           {'x-conversation-id': conversation, 'x-input-tokens': str(tokens)})
    assert status == 200
    return head['x-router-node'], head['x-router-decision']


async def ask_all(client, names):
    return {name: (await ask(client, name))[0] for name in names}


NAMES = [f'conversation-{i}' for i in range(40)]


def for_each_load(run):
    """All kinds of load side by side: each spends most of its time waiting for the proxy's start."""
    async def gather():
        await asyncio.gather(*(run(load) for load in LOADS))
    asyncio.run(gather())


async def in_step(proxy):
    await asyncio.to_thread(wait_for, proxy.in_step, 'the router has learned what there is to learn', 15)


def test_homes_outlive_reloads_under_traffic():
    async def run(load):
        async with engines(4) as e:
            async with router(ports(e), *LOADS[load], routers=alone()) as proxy:
                client = Client(proxy.port)
                homes = await ask_all(client, NAMES)
                assert len(set(homes.values())) == 4
                end, wrong, asked = asyncio.Event(), [], 0

                async def traffic():
                    nonlocal asked
                    while not end.is_set():
                        for name in NAMES:
                            node, decision = await ask(Client(proxy.port), name)     # a connection each: the new worker's as well
                            asked += 1
                            if node != homes[name]:
                                wrong.append((name, homes[name], node, decision))
                        await asyncio.sleep(0)
                await in_step(proxy)
                task = asyncio.create_task(traffic())
                for _ in range(3):
                    await asyncio.sleep(.3)
                    await asyncio.to_thread(proxy.reload)
                await asyncio.sleep(.5)
                end.set()
                await task
                assert asked > 40
                assert not wrong, f'{len(wrong)} of {asked} turns left their home: {wrong[:5]}'
                counted = {labels.get('node'): int(value) for name, labels, value in proxy.metrics()
                           if name == 'tidepool_router_node_load'}
                if load == 'conversations':
                    assert counted == {node: list(homes.values()).count(node) for node in e}
    for_each_load(run)


@pytest.mark.parametrize('load', LOADS)
def test_two_routers_agree(load):
    async def run():
        async with engines(4) as e:
            meeting = dict(zip(('r1', 'r2'), free_ports(2)))
            async with router(ports(e), *LOADS[load], routers=meeting, self_name='r1') as one, \
                    router(ports(e), *LOADS[load], routers=meeting, self_name='r2') as two:
                first, second = Client(one.port), Client(two.port)
                await settle(one, two)
                homes = await ask_all(first, NAMES[:20])
                homes |= await ask_all(second, NAMES[20:])
                await asyncio.to_thread(wait_for, lambda: conversations(one) == conversations(two) == 40, 'both routers know 40 homes')
                if load == 'conversations':          # each knows what the other's conversations weigh, unasked
                    counts = {node: list(homes.values()).count(node) for node in e}
                    await asyncio.to_thread(wait_for, lambda: one.loads() == two.loads() == counts, f'both count {counts}')
                assert await ask_all(second, NAMES[:20]) == {name: homes[name] for name in NAMES[:20]}
                assert await ask_all(first, NAMES[20:]) == {name: homes[name] for name in NAMES[20:]}
                assert two.decisions()['stay'] == 20 and two.decisions()['new'] == 20
    asyncio.run(run())


def conversations(proxy):
    return next(int(value) for name, _, value in proxy.metrics() if name == 'tidepool_router_conversations')


def wait_for(condition, what, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f'not within {seconds} s: {what}'
        time.sleep(.05)


async def settle(one, two):
    """The routers have met: each has a session with the other."""
    def met():
        return all('(remote,active)' in p.admin('show peers') for p in (one, two))
    await asyncio.to_thread(wait_for, met, 'the routers meet')


def test_a_node_that_joins_moves_nothing_and_one_that_leaves_only_its_own():
    async def run(load):
        async with engines(4) as e:
            async with router(ports(e, ('n1', 'n2', 'n3')), *LOADS[load], routers=alone()) as proxy:
                homes = await ask_all(Client(proxy.port), NAMES)
                await in_step(proxy)
                await asyncio.to_thread(proxy.configure, ports(e))
                await asyncio.to_thread(proxy.reload)
                assert await ask_all(Client(proxy.port), NAMES) == homes, 'a node joined'
                node, decision = await ask(Client(proxy.port), 'another')
                if load != 'requests':
                    assert (node, decision) == ('n4', 'new')
                # n1 leaves: it stands first, so every later node changes its place in the file.
                await asyncio.to_thread(proxy.configure, ports(e, ('n2', 'n3', 'n4')))
                await asyncio.to_thread(proxy.reload)
                after = await ask_all(Client(proxy.port), NAMES)
                assert {n: h for n, h in after.items() if homes[n] != 'n1'} == {n: h for n, h in homes.items() if h != 'n1'}
                assert 'n1' not in after.values() and 'n1' in homes.values()
                # It comes back, and what left it stays where it is.
                await asyncio.to_thread(proxy.configure, ports(e))
                await asyncio.to_thread(proxy.reload)
                assert await ask_all(Client(proxy.port), NAMES) == after
    for_each_load(run)


@pytest.mark.parametrize('load', LOADS)
def test_a_draining_node_keeps_its_conversations_and_gets_no_new_ones(load):
    async def run():
        async with engines(3) as e:
            async with router(ports(e), *LOADS[load]) as proxy:
                client = Client(proxy.port)
                homes = await ask_all(client, NAMES)
                proxy.admin('set server nodes/n2 weight 0')
                await asyncio.sleep(.05)
                assert await ask_all(client, NAMES) == homes
                assert 'n2' not in (await ask_all(client, [f'new-{i}' for i in range(20)])).values()
                proxy.admin('set server nodes/n2 weight 100%')
                await asyncio.sleep(.05)
                assert 'n2' in (await ask_all(client, [f'newer-{i}' for i in range(20)])).values()
    asyncio.run(run())


def test_an_unhealthy_node_is_left_and_its_conversations_stay_where_they_went():
    async def run():
        async with engines(3) as e:
            async with router(ports(e), '--check-interval', '100ms') as proxy:
                client = Client(proxy.port)
                homes = await ask_all(client, NAMES)
                e['n2'].health_status = 503
                up = lambda: {labels['node']: value for name, labels, value in proxy.metrics() if name == 'tidepool_router_node_up'}  # noqa: E731
                await asyncio.to_thread(wait_for, lambda: up()['n2'] == 0, 'n2 is down')
                after = await ask_all(client, NAMES)
                assert 'n2' not in after.values()
                assert all(after[n] == homes[n] for n in NAMES if homes[n] != 'n2')
                assert proxy.decisions()['rehomed'] == list(homes.values()).count('n2')
                e['n2'].health_status = 200
                await asyncio.to_thread(wait_for, lambda: up()['n2'] == 1, 'n2 is up')
                assert await ask_all(client, NAMES) == after
    asyncio.run(run())


def start_engine(name, port, speed):
    return subprocess.Popen([sys.executable, '-m', 'tidepool_router.engine', '--name', name, '--port', str(port), '--speed', str(speed)],
                            cwd=ROUTER, env={**os.environ, 'PYTHONPATH': ROUTER})


@pytest.mark.parametrize('load', LOADS)
def test_a_node_killed_under_load_loses_no_request_that_could_be_retried(load):
    body = b'{"input_length": 2000, "output_length": 10, "hash_ids": []}'     # 20 ms of prefill in line, 20 ms of decode

    async def run(proxy, victim):
        client, answered, cut, lost, end = Client(proxy.port), {}, [], [], time.monotonic() + 3

        async def conversation(name):
            while time.monotonic() < end:
                try:
                    status, head, _ = await client.request('POST', '/v1/chat/completions', body,
                                                           {'x-conversation-id': name, 'x-input-tokens': '2000'})
                except Broken as error:
                    (cut if error.began else lost).append(str(error))
                    continue
                if status != 200:
                    lost.append(f'{name}: status {status}')
                answered[name] = head.get('x-router-node')
        tasks = [asyncio.create_task(conversation(f'c{i}')) for i in range(30)]
        await asyncio.sleep(1.2)
        at_victim = sum(node == 'n1' for node in answered.values())
        victim.send_signal(signal.SIGKILL)
        await asyncio.gather(*tasks)
        client.close()
        return at_victim, answered, cut, lost

    numbers = free_ports(3)
    processes = [start_engine(f'n{i}', port, 10) for i, port in enumerate(numbers, 1)]
    try:
        with Proxy({f'n{i}': port for i, port in enumerate(numbers, 1)}, '--check-interval', '200ms', *LOADS[load]) as proxy:
            proxy.wait_until(lambda: sum(v for n, _, v in proxy.metrics() if n == 'tidepool_router_node_up') == 3, 'see three nodes up')
            time.sleep(.5)
            at_victim, answered, cut, lost = asyncio.run(run(proxy, processes[0]))
            assert at_victim >= 3, 'the killed node had no conversations: nothing was tested'
            assert not lost, f'{len(lost)} requests lost that had no answer begun: {lost[:5]}'
            assert proxy.total('haproxy_backend_redispatch_warnings_total') > 0, 'no request had to be sent on: nothing was tested'
            assert len(cut) <= at_victim, 'more answers were cut off than the node had requests'
            assert 'n1' not in answered.values()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_load_from_the_engines_metric():
    async def run():
        async with engines(3) as e:
            options = ('--load', 'tokens', '--tokens', 'metric:sglang:num_used_tokens', '--sync-interval', '100ms')
            async with router(ports(e), *options) as proxy:
                client = Client(proxy.port)
                e['n1'].used_tokens, e['n2'].used_tokens, e['n3'].used_tokens = 5000, 900, 4000
                await asyncio.to_thread(wait_for, lambda: proxy.loads() == {'n1': 5000, 'n2': 900, 'n3': 4000}, 'loads are the metric')
                assert await ask(client, 'a') == ('n2', 'new')
                e['n2'].used_tokens = 50000
                await asyncio.to_thread(wait_for, lambda: proxy.loads()['n2'] == 50000, 'the load follows')
                assert await ask(client, 'a') == ('n3', 'moved')
                # An engine without the metric counts as the mean of the others, and the log names it.
                e['n1'].metrics_status = 404
                await asyncio.to_thread(wait_for, lambda: proxy.loads()['n1'] == 27000, 'the mean of the others')
                with open(proxy.log) as log:
                    assert 'node n1: no metric sglang:num_used_tokens' in log.read()
    asyncio.run(run())


@pytest.mark.parametrize('load', ['conversations', 'tokens'])
def test_a_silent_conversation_closes(load):
    async def run():
        async with engines(2) as e:
            async with router(ports(e), *LOADS[load], '--expire', '2s', '--sync-interval', '100ms') as proxy:
                client = Client(proxy.port)
                await ask_all(client, NAMES)
                assert sum(proxy.loads().values()) == len(NAMES) * (100 if load == 'tokens' else 1)
                end = time.monotonic() + 3
                while time.monotonic() < end:          # one of them goes on
                    await ask(client, NAMES[0])
                    await asyncio.sleep(.2)
                await asyncio.to_thread(wait_for, lambda: sum(proxy.loads().values()) == (100 if load == 'tokens' else 1), 'the others are closed')
                assert (await ask(client, NAMES[1]))[1] == 'new'
    asyncio.run(run())


MANY = 20000


def remember(proxy, names, size):
    """Homes by the proxy's own command: conversation i is at the node i % 4, all of the same size."""
    with open(proxy.config) as file:
        ids = [line.split()[-1] for line in file if line.startswith('  server ')]
    for first in range(0, len(names), 50):
        commands = []
        for i in range(first, min(first + 50, len(names))):
            key = hashlib.sha1(names[i].encode()).hexdigest().upper()
            commands += [f'set table homes key {key} data.gpt0 {ids[i % 4]}', f'set table sizes key {key} data.gpt0 {size}']
        proxy.admin('; '.join(commands))


def test_many_homes_are_counted_soon_after_a_reload_and_nothing_moves_meanwhile():
    async def run():
        async with engines(4) as e:
            async with router(ports(e), *LOADS['tokens'], routers=alone()) as proxy:
                names = [f'c{i}' for i in range(MANY)]
                await asyncio.to_thread(remember, proxy, names, 100)
                counted = {node: MANY // 4 * 100 for node in e}
                await asyncio.to_thread(wait_for, lambda: proxy.loads() == counted, f'the router counts {counted}')
                await in_step(proxy)
                await asyncio.to_thread(proxy.reload)
                counts = asyncio.ensure_future(asyncio.to_thread(wait_for, lambda: proxy.loads() == counted, f'the new worker counts {counted}', 15))
                asked = 0
                while not counts.done():               # the size stays what it was, so the sums must come out the same
                    asked += 1
                    i = asked * 7919 % MANY
                    node, decision = await ask(Client(proxy.port), names[i])
                    assert node == f'n{i % 4 + 1}', (i, node, decision)
                await counts
                assert asked > 20
    asyncio.run(run())


class Wire:
    """Between a router and the port of another, and may be cut."""

    def __init__(self):
        self.whole, self.ends = True, set()

    async def start(self, target):
        self.target = target
        self.server = await asyncio.start_server(self._connect, '127.0.0.1', 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def _connect(self, reader, writer):
        self.ends.add(writer)
        try:
            if self.whole:
                other_reader, other = await asyncio.open_connection('127.0.0.1', self.target)
                self.ends.add(other)
                await asyncio.gather(self._carry(reader, other), self._carry(other_reader, writer))
        except OSError:
            pass
        writer.close()

    async def _carry(self, reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    def cut(self):
        self.whole = False
        for writer in self.ends:
            writer.transport.abort()
        self.ends.clear()


def test_routers_that_were_apart_agree_again_when_a_conversation_is_next_asked():
    async def run():
        async with engines(4) as e:
            own = dict(zip(('r1', 'r2'), free_ports(2)))
            wires = {name: await Wire().start(port) for name, port in own.items()}
            options = *LOADS['conversations'], '--sync-interval', '200ms'
            async with router(ports(e), *options, routers={'r1': own['r1'], 'r2': wires['r2'].port}, self_name='r1') as one, \
                    router(ports(e), *options, routers={'r1': wires['r1'].port, 'r2': own['r2']}, self_name='r2') as two:
                first, second = Client(one.port), Client(two.port)
                await settle(one, two)
                homes = await ask_all(first, NAMES[:20])
                await asyncio.to_thread(wait_for, lambda: conversations(two) == 20, 'the other router knows 20 homes')
                for wire in wires.values():
                    wire.cut()
                assert await ask_all(second, NAMES[:20]) == homes
                mine, theirs = await ask_all(first, NAMES[20:]), await ask_all(second, list(reversed(NAMES[20:])))
                assert mine != theirs, 'the routers chose alike: nothing was tested'
                for wire in wires.values():
                    wire.whole = True
                await settle(one, two)
                await asyncio.sleep(1)
                chosen = await ask_all(first, NAMES[20:])
                agreed = {node: [*homes.values(), *chosen.values()].count(node) for node in e}
                await asyncio.to_thread(wait_for, lambda: one.loads() == two.loads() == agreed, f'both count {agreed}')
                assert await ask_all(second, NAMES) == homes | chosen
    asyncio.run(run())
