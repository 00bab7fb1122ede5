# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that behaves as an inference engine: it prefills one request after the other, decodes them side by
side, and has a prefix cache. It answers with the first token after prefill, and ends after decode.

A request says input_length and output_length (tokens), hash_ids (its blocks) and kept_ids (the blocks that the node holds
afterwards, with the answer's). Times are divided by `speed`.
"""
import argparse
import asyncio
import json
import time

from .http1 import read_body, read_head
from .simulation import PrefixCache
from .workload import BLOCK


class Engine:
    def __init__(self, name, speed=1.0, prefill_rate=10000.0, decode_rate=50.0, held=False):
        self.name, self.speed = name, speed
        self.prefill_rate, self.decode_rate = prefill_rate * speed, decode_rate * speed
        self.cache = PrefixCache()
        self.free_at = 0.0
        self.used_tokens = self.running = self.served = 0
        self.prefilled = 0
        self.held = held                 # answers only when told: see release()
        self.waiting = {}                # conversation: (arrived, go on)
        self.arrived = asyncio.Queue()
        self.server, self.connections = None, set()
        self.health_status = 200
        self.metrics_status = 200

    async def start(self, port=0):
        self.server = await asyncio.start_server(self._serve, '127.0.0.1', port, limit=1 << 20)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self.server.close()
        for writer in list(self.connections):
            writer.transport.abort()
        await self.server.wait_closed()

    def release(self, conversation):
        self.waiting.pop(conversation).set()

    async def _serve(self, reader, writer):
        self.connections.add(writer)
        try:
            while True:
                first, headers = await read_head(reader)
                body = await read_body(reader, headers)
                path = first.split()[1]
                if path == '/health':
                    writer.write(f'HTTP/1.1 {self.health_status} x\r\ncontent-length: 0\r\n\r\n'.encode())
                elif path == '/metrics':
                    text = (f'# TYPE sglang:num_used_tokens gauge\nsglang:num_used_tokens{{model_name="m"}} {float(self.used_tokens)}\n'
                            f'vllm:num_requests_running{{model_name="m"}} {float(self.running)}\n').encode()
                    writer.write(f'HTTP/1.1 {self.metrics_status} x\r\ncontent-length: {len(text)}\r\n\r\n'.encode() + text)
                else:
                    try:
                        request = json.loads(body)
                    except ValueError:
                        request = {}
                    await self._generate(request, headers, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _generate(self, request, headers, writer):
        input_length, output_length = request.get('input_length', 1), request.get('output_length', 1)
        ids = request.get('hash_ids', [])
        cached = min(self.cache.cached_blocks(ids) * BLOCK, input_length - 1)
        self.cache.add(request.get('kept_ids', ids))
        self.running += 1
        self.used_tokens += input_length
        self.prefilled += input_length - cached
        try:
            if self.held:
                conversation = headers.get('x-conversation-id', '')
                go_on = self.waiting[conversation] = asyncio.Event()
                self.arrived.put_nowait((self.name, conversation))
                await go_on.wait()
            else:
                now = time.monotonic()
                self.free_at = max(now, self.free_at) + (input_length - cached) / self.prefill_rate
                await asyncio.sleep(self.free_at - now)
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n')
            if not self.held:
                await writer.drain()
                await asyncio.sleep(output_length / self.decode_rate)
            text = json.dumps({'engine': self.name, 'usage': {'prompt_tokens': input_length, 'completion_tokens': output_length,
                                                              'prompt_tokens_details': {'cached_tokens': cached}}}).encode()
            writer.write(b'%x\r\n%s\r\n0\r\n\r\n' % (len(text), text))
            self.served += 1
        finally:
            self.running -= 1
            self.used_tokens -= input_length


def main():
    p = argparse.ArgumentParser(description='A server that behaves as an inference engine, for tests')
    p.add_argument('--name', required=True)
    p.add_argument('--port', type=int, required=True)
    p.add_argument('--speed', type=float, default=1.0)
    a = p.parse_args()

    async def run():
        engine = await Engine(a.name, a.speed).start(a.port)
        await engine.server.serve_forever()
    asyncio.run(run())


if __name__ == '__main__':
    main()
