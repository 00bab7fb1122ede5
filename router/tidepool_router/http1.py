# SPDX-License-Identifier: Apache-2.0
"""As much of HTTP/1.1 as the test engines and the replay need, on asyncio streams."""
import asyncio


class Broken(Exception):
    """The connection ended. `began` says whether a response had begun: then no proxy can send the request elsewhere."""

    def __init__(self, what, began):
        super().__init__(what)
        self.began = began


async def read_head(reader):
    """(first line, {header: value}); EOFError where nothing comes."""
    head = await reader.readuntil(b'\r\n\r\n')
    first, *lines = head.decode('latin-1').split('\r\n')
    headers = {}
    for line in lines:
        name, colon, value = line.partition(':')
        if colon:
            headers[name.strip().lower()] = value.strip()
    return first, headers


async def read_body(reader, headers):
    if headers.get('transfer-encoding', '').lower() == 'chunked':
        body = b''
        while True:
            size = int((await reader.readline()).split(b';')[0] or b'x', 16)
            chunk = await reader.readexactly(size + 2)
            if not size:
                return body
            body += chunk[:-2]
    return await reader.readexactly(int(headers.get('content-length', 0)))


class Client:
    """Keeps connections and uses each for one request at a time."""

    def __init__(self, port, host='127.0.0.1'):
        self.host, self.port, self.idle = host, port, []

    async def request(self, method, path, body=b'', headers=None):
        """(status, headers, body)"""
        reused = bool(self.idle)
        reader, writer = self.idle.pop() if reused else await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        began = False
        try:
            lines = [f'{method} {path} HTTP/1.1', f'host: {self.host}', f'content-length: {len(body)}']
            lines += [f'{name}: {value}' for name, value in (headers or {}).items()]
            writer.write('\r\n'.join(lines).encode() + b'\r\n\r\n' + body)
            first, head = await read_head(reader)
            began = True
            data = await read_body(reader, head)
        except (OSError, EOFError, ValueError) as error:
            writer.close()
            if reused and not began:      # an idle connection that was closed meanwhile
                return await self.request(method, path, body, headers)
            raise Broken(f'{method} {path}: {error!r}', began) from None
        except BaseException:
            writer.close()
            raise
        if head.get('connection', '').lower() == 'close':
            writer.close()
        else:
            self.idle.append((reader, writer))
        return int(first.split()[1]), head, data

    def close(self):
        for _, writer in self.idle:
            writer.close()
        self.idle = []
