# SPDX-License-Identifier: Apache-2.0
"""Each kind of conversation key leads the second turn to the first one's home, through the real proxy."""
import asyncio
import json

import pytest

from tidepool_router.engine import Engine
from tidepool_router.http1 import Client
from tidepool_router.proxy import Proxy


def through(keys, exchange, *options):
    async def run():
        engines = {f'n{i}': await Engine(f'n{i}', speed=1e6).start() for i in (1, 2, 3)}
        try:
            arguments = [part for key in keys for part in ('--key', key)]
            proxy = await asyncio.to_thread(Proxy, {n: e.port for n, e in engines.items()}, *arguments, *options)
            try:
                await asyncio.to_thread(proxy.start)
                client = Client(proxy.port)

                async def send(body=None, **headers):
                    data = json.dumps(body or {}).encode() if not isinstance(body, bytes) else body
                    status, head, _ = await client.request('POST', '/v1/chat/completions', data,
                                                           {k.replace('_', '-'): v for k, v in headers.items()})
                    assert status == 200
                    return head['x-router-decision'], head['x-router-node']
                await exchange(send)
            finally:
                proxy.stop()
        finally:
            for engine in engines.values():
                await engine.stop()
    asyncio.run(run())


async def expect_two(send, first, second, other):
    """first and second are turns of one conversation, other is of another one."""
    kind, node = await send(*first[0:1], **first[1])
    assert kind == 'new'
    assert (await send(*other[0:1], **other[1]))[0] == 'new'
    assert await send(*second[0:1], **second[1]) == ('stay', node)


@pytest.mark.parametrize('keys, first, second, other', [
    (['header:x-session'], ({}, {'x_session': 'a, b'}), ({}, {'x_session': 'a, b'}), ({}, {'x_session': 'a, c'})),
    (['header:x-session'], ({}, {'x_session': 'k' * 3000 + '1'}), ({}, {'x_session': 'k' * 3000 + '1'}), ({}, {'x_session': 'k' * 3000 + '2'})),
    (['cookie:chat'], ({}, {'cookie': 'x=1; chat=7'}), ({}, {'cookie': 'chat=7; x=2'}), ({}, {'cookie': 'chat=8; x=1'})),
    (['body:$.conversation_id'], ({'conversation_id': 'a', 'x': 1}, {}), ({'x': 2, 'conversation_id': 'a'}, {}), ({'conversation_id': 'b'}, {})),
    (['body:$.metadata.session'], ({'metadata': {'session': 'a'}}, {}), ({'metadata': {'session': 'a', 'n': 2}}, {}),
     ({'metadata': {'session': 'b'}}, {})),
    (['header:x-session', 'body:$.id'], ({'id': 'q'}, {}), ({'id': 'q'}, {}), ({'id': 'q'}, {'x_session': 'a'})),
])
def test_key(keys, first, second, other):
    through(keys, lambda send: expect_two(send, first, second, other))


def chat(*contents, system='You are helpful.', **more):
    roles = ['system'] if system is not None else []
    messages = [{'role': 'system', 'content': system}] if roles else []
    messages += [{'role': ('user', 'assistant')[i % 2], 'content': content} for i, content in enumerate(contents)]
    return {'model': 'm', 'messages': messages, **more}


PARTS = [{'type': 'image_url', 'image_url': {'url': 'data:,x'}}, {'type': 'text', 'text': 'What is "this"?\n'}]


@pytest.mark.parametrize('first, second, other', [
    (chat('Hello'), chat('Hello', 'Hi!', 'And?'), chat('Hello you')),
    (chat('Hello', system=None), chat('Hello', 'Hi!', 'And?', system=None), chat('Hello')),
    (chat('Grüße \U0001f600 "x"'), chat('Grüße \U0001f600 "x"', 'Hi!', 'And?'), chat('Grüße \U0001f601 "x"')),
    (chat('back\\slash \\u0041 \\\\" end'), chat('back\\slash \\u0041 \\\\" end', 'Hi!', 'And?'), chat('back\\slash \\u0042 \\\\" end')),
    (chat(PARTS), chat(PARTS, 'A cat.', 'Sure?'), chat([PARTS[0], {'type': 'text', 'text': 'And this?'}])),
    (chat('Hello', user='a'), chat('Hello', 'Hi!', 'And?', user='a'), chat('Hello', user='b')),
    (chat('Hello', system='A'), chat('Hello', 'Hi!', 'And?', system='A'), chat('Hello', system='B')),
    # Longer than the proxy's buffer: what leads is at the front.
    (chat('Hello'), chat('Hello', 'x' * 200000, 'And?'), chat('Hallo')),
])
def test_leading_messages_name_the_conversation(first, second, other):
    through(['messages'], lambda send: expect_two(send, (first, {}), (second, {}), (other, {})), '--max-body', '16384')


@pytest.mark.parametrize('body', [b'{}', b'not JSON', b'{"messages": []}', b'{"messages": [{"role": "system", "content": "S"}]}', b''])
def test_a_request_without_a_key_goes_somewhere_and_is_not_remembered(body):
    async def exchange(send):
        for _ in range(2):
            assert (await send(body))[0] == 'unkeyed'
    through(['header:x-session', 'messages'], exchange)


def test_an_empty_header_is_no_key():
    async def exchange(send):
        for _ in range(2):
            assert (await send({}, x_session=''))[0] == 'unkeyed'
    through(['header:x-session'], exchange)
