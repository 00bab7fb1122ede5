# SPDX-License-Identifier: Apache-2.0
"""What the operator chooses, checked: nodes, key, load, threshold. Every error names the option, the value and the remedy."""
import re
import zlib
from dataclasses import dataclass, field

NAME = re.compile(r'[A-Za-z0-9_.-]{1,64}\Z')
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+\Z")
JSON_PATH = re.compile(r'\$(\.[A-Za-z_][A-Za-z0-9_-]*(\[[0-9]+\])*)+\Z')
METRIC = re.compile(r'([A-Za-z_:][A-Za-z0-9_:]*)(?:\*([0-9]+))?\Z')
URI = re.compile(r'/[A-Za-z0-9_./-]*\Z')
DURATION = re.compile(r'([1-9][0-9]*)(ms|s|m|h|d)\Z')
ADDRESS = re.compile(r'(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.*-]+):([0-9]{1,5})\Z')
USER = re.compile(r'[a-z_][a-z0-9_-]{0,31}\Z')
MAX_NODES = 128
MAX_ID = 2**31 - 1


class SettingError(ValueError):
    pass


def _fail(option, value, problem, remedy):
    raise SettingError(f'{option} {value!r}: {problem}; {remedy}')


def check_address(option, value, wildcard=False):
    match = ADDRESS.match(value)
    if not match:
        _fail(option, value, 'not an address', 'write HOST:PORT, for example 10.0.0.1:8000, or [::1]:8000')
    if not 1 <= int(match[2]) <= 65535:
        _fail(option, value, f'port {match[2]} is out of range', 'use 1 to 65535')
    if '*' in match[1] and not (wildcard and match[1] == '*'):
        _fail(option, value, 'a wildcard is no address to connect to', 'name one host')
    return value


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    id: int

    @classmethod
    def parse(cls, text):
        """NAME=HOST:PORT[,id=N]. The id is what a home is remembered by, so it follows from the name, not the position."""
        name, equals, rest = text.partition('=')
        address, _, option = rest.partition(',')
        if not equals or not NAME.match(name):
            _fail('--node', text, 'no valid name before =', 'write NAME=HOST:PORT, NAME of letters, digits, _ . -')
        check_address('--node', address)
        number = zlib.crc32(name.encode()) % MAX_ID + 1
        if option:
            if not re.match(r'id=[0-9]{1,10}\Z', option) or not 1 <= int(option[3:]) <= MAX_ID:
                _fail('--node', text, f'unknown option {option!r}', f'the only one is id=N with N from 1 to {MAX_ID}')
            number = int(option[3:])
        return cls(name, address, number)


@dataclass(frozen=True)
class Key:
    kind: str          # header, cookie, body or messages
    name: str = ''

    @classmethod
    def parse(cls, text):
        kind, colon, name = text.partition(':')
        if kind == 'messages' and not colon:
            return cls(kind)
        checks = {'header': (HEADER, 'a header name'), 'cookie': (HEADER, 'a cookie name'),
                  'body': (JSON_PATH, 'a path such as $.conversation_id or $.metadata.session')}
        if kind not in checks or not colon:
            _fail('--key', text, 'unknown kind of key', 'use header:NAME, cookie:NAME, body:$.FIELD or messages')
        pattern, expected = checks[kind]
        if not pattern.match(name):
            _fail('--key', text, f'{name!r} is not {expected}', f'write {kind}: and {expected}')
        return cls(kind, name)


@dataclass(frozen=True)
class Tokens:
    kind: str          # bytes, header or metric
    name: str = ''
    number: int = 1    # bytes a token, or the factor of a metric

    @classmethod
    def parse(cls, text):
        kind, _, rest = text.partition(':')
        if kind == 'bytes':
            if not re.match(r'[1-9][0-9]{0,3}\Z', rest):
                _fail('--tokens', text, f'{rest!r} is not a number of bytes a token', 'write bytes:N, N from 1 to 9999')
            return cls(kind, number=int(rest))
        if kind == 'header':
            if not HEADER.match(rest):
                _fail('--tokens', text, f'{rest!r} is not a header name', 'write header:NAME')
            return cls(kind, rest)
        if kind == 'metric':
            match = METRIC.match(rest)
            if not match or match[2] == '0':
                _fail('--tokens', text, f'{rest!r} is not a metric', 'write metric:NAME or metric:NAME*FACTOR, FACTOR a whole number')
            return cls(kind, match[1], int(match[2] or 1))
        _fail('--tokens', text, 'unknown source of tokens', 'use bytes:N, header:NAME or metric:NAME[*FACTOR]')


def check_duration(option, value):
    if not DURATION.match(value):
        _fail(option, value, 'not a duration', 'write a whole number and a unit: 500ms, 30s, 30m, 2h or 1d')
    return value


def check_threshold(value):
    try:
        number = float(value)
    except ValueError:
        _fail('--threshold', value, 'not a number', 'give the multiple of the average load, for example 2')
    if not 1 < number <= 100:
        _fail('--threshold', value, 'out of range', 'give a multiple of the average load above 1 and up to 100')
    if abs(number * 100 - round(number * 100)) > 1e-9:
        _fail('--threshold', value, 'more than two decimals', 'round it: the proxy counts in hundredths')
    return number


def check_integer(option, value, low, high, unit):
    try:
        number = int(value)
    except ValueError:
        _fail(option, value, 'not a whole number', f'give {unit} from {low} to {high}')
    if not low <= number <= high:
        _fail(option, value, 'out of range', f'give {unit} from {low} to {high}')
    return number


@dataclass
class Settings:
    nodes: list
    keys: list = field(default_factory=lambda: [Key('header', 'x-conversation-id')])
    load: str = 'requests'
    tokens: Tokens = Tokens('bytes', number=4)
    threshold: float = 2.0
    listen: str = '*:8080'
    metrics: str = '127.0.0.1:8405'
    routers: list = field(default_factory=list)     # of (name, address); the first is this one unless self_name says so
    self_name: str = ''
    socket: str = ''
    health: str = '/health'
    expire: str = '30m'
    conversations: int = 200000
    max_body: int = 65536
    max_connections: int = 4000
    timeout: str = '10m'
    threads: int = 0
    explain: bool = False
    check_interval: str = '1s'
    sync_interval_ms: int = 2000
    user: str = ''
    lua_path: str = ''

    def __post_init__(self):
        if not self.nodes:
            raise SettingError('--node is missing: there is nothing to route to; give --node NAME=HOST:PORT once a node')
        if len(self.nodes) > MAX_NODES:
            _fail('--node', len(self.nodes), 'too many nodes', f'one router serves up to {MAX_NODES}')
        for what in ('name', 'address', 'id'):
            seen = {}
            for node in self.nodes:
                value = getattr(node, what)
                if value in seen:
                    remedy = 'give one of them another id with ,id=N' if what == 'id' else f'give each node its own {what}'
                    _fail('--node', node.name, f'has the same {what} {value!r} as node {seen[value]!r}', remedy)
                seen[value] = node.name
        if self.load not in ('requests', 'conversations', 'tokens'):
            _fail('--load', self.load, 'unknown kind of load', 'use requests, conversations or tokens')
        if not self.keys:
            raise SettingError('--key is missing: without one no conversation can be told; give header:, cookie:, body: or messages')
        names = [name for name, _ in self.routers]
        if len(set(names)) != len(names):
            _fail('--router', ' '.join(names), 'a router is named twice', 'give each its own name')
        if self.self_name and self.self_name not in names:
            _fail('--self', self.self_name, f'not among the routers ({", ".join(names) or "none given"})',
                  'name one of the --router options')
        if len(self.routers) > 1 and not self.self_name:
            _fail('--router', ' '.join(names), 'several routers, and it is not said which one this is', 'add --self NAME')
        if self.user and not USER.match(self.user):
            _fail('--user', self.user, 'not the name of a user', 'name one, for example haproxy')
        for option, value in (('--socket', self.socket), ('the Lua action', self.lua_path)):
            if value and (not value.startswith('/') or re.search(r'[\s"\'\\#]', value)):
                _fail(option, value, 'not a plain absolute path', 'use an absolute path without blanks and quotes')

    @property
    def uses_lua(self):
        return self.load != 'requests'

    @property
    def reads_body(self):
        return any(key.kind in ('body', 'messages') for key in self.keys)


def parse_router(text):
    name, equals, address = text.partition('=')
    if not equals or not NAME.match(name):
        _fail('--router', text, 'no valid name before =', 'write NAME=HOST:PORT, the address where the routers meet')
    return name, check_address('--router', address)


def check_uri(option, value):
    if not URI.match(value):
        _fail(option, value, 'not a path', 'write a path such as /health')
    return value
