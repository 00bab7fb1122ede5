# SPDX-License-Identifier: Apache-2.0
"""The generator: what it makes passes the proxy's own check; what it refuses, it refuses by name, value and remedy."""
import itertools
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROUTER

from tidepool_router.proxy import Proxy

NODES = ['--node', 'n1=127.0.0.1:9001', '--node', 'n2=127.0.0.1:9002']


def generate(*options, path=None):
    environment = {**os.environ, **({'PATH': path} if path is not None else {})}
    return subprocess.run([sys.executable, os.path.join(ROUTER, 'generate'), *options], capture_output=True, text=True, env=environment)


LOADS = (['--load', 'requests'], ['--load', 'conversations'], ['--load', 'tokens'], ['--load', 'tokens', '--tokens', 'header:x-tokens'],
         ['--load', 'tokens', '--tokens', 'metric:vllm:kv_cache_usage_perc*400000'])
MORE = ([], ['--key', 'header:x-id', '--key', 'cookie:chat', '--key', 'body:$.id', '--key', 'messages', '--explain'],
        ['--router', 'a=127.0.0.1:9500', '--router', 'b=127.0.0.1:9501', '--self', 'b', '--threads', '2', '--user', 'nobody'])


@pytest.mark.parametrize('load, more', list(itertools.product(LOADS, MORE)))
def test_the_proxy_accepts_what_is_generated(load, more):
    run = generate(*NODES, *load, *more)
    assert run.returncode == 0, run.stderr
    assert 'server n2 127.0.0.1:9002' in run.stdout


@pytest.mark.parametrize('count', [1, 128])
def test_numbers_of_nodes(count):
    nodes = [part for i in range(count) for part in ('--node', f'node-{i}=10.0.{i // 250}.{i % 250 + 1}:8000')]
    for load in ('requests', 'tokens'):
        run = generate(*nodes, '--load', load)
        assert run.returncode == 0, run.stderr


def test_the_metrics_page_holds_the_most_nodes():
    with Proxy({f'a-rather-long-name-of-a-node-{i}': 1 + i for i in range(128)}) as proxy:
        assert len(proxy.loads()) == 128
        assert set(proxy.decisions().values()) == {0}


def test_an_id_follows_from_the_name_not_the_position():
    ids = lambda text: {line.split()[1]: line.split()[-1] for line in text.splitlines() if line.startswith('  server ')}  # noqa: E731
    both, one = ids(generate(*NODES).stdout), ids(generate(*NODES[2:]).stdout)
    assert one['n2'] == both['n2'] != both['n1']


@pytest.mark.parametrize('options, parts', [
    ([], ('--node', 'missing', 'NAME=HOST:PORT')),
    (['--node', 'n1'], ("'n1'", 'NAME=HOST:PORT')),
    (['--node', 'n 1=h:1'], ("'n 1=h:1'", 'name')),
    (['--node', 'n1=h'], ("'h'", 'HOST:PORT')),
    (['--node', 'n1=h:70000'], ('70000', '65535')),
    (['--node', 'n1=*:80'], ('wildcard',)),
    ([*NODES, '--user', 'a b'], ("'a b'", 'user')),
    ([*NODES, '--user', 'nobody-of-that-name'], ('nobody-of-that-name',)),
    (['--node', 'n1=h:1,weight=2'], ('weight=2', 'id=N')),
    ([*NODES, '--node', 'n1=h:1'], ("'n1'", 'same name')),
    ([*NODES, '--node', 'n3=127.0.0.1:9002'], ("'n3'", 'same address', "'n2'")),
    (['--node', 'a=h:1,id=5', '--node', 'b=h:2,id=5'], ("'b'", 'same id', 'id=N')),
    ([*NODES, '--threshold', '1'], ("'1'", 'above 1')),
    ([*NODES, '--threshold', 'two'], ("'two'", 'not a number')),
    ([*NODES, '--threshold', 'nan'], ("'nan'", 'out of range')),
    ([*NODES, '--threshold', '1.234'], ("'1.234'", 'hundredths')),
    ([*NODES, '--load', 'cpu'], ("'cpu'", 'requests, conversations or tokens')),
    ([*NODES, '--key', 'query:x'], ("'query:x'", 'header:NAME')),
    ([*NODES, '--key', 'header:a b'], ("'a b'", 'header name')),
    ([*NODES, '--key', "body:$.a'b"], ('$.conversation_id',)),
    ([*NODES, '--key', 'messages:3'], ("'messages:3'",)),
    ([*NODES, '--tokens', 'bytes:0'], ("'0'", 'bytes:N')),
    ([*NODES, '--tokens', 'metric:a b'], ("'a b'", 'metric:NAME')),
    ([*NODES, '--router', 'a=h:1', '--router', 'b=h:2'], ('--self',)),
    ([*NODES, '--router', 'a=h:1', '--self', 'c'], ("'c'", 'among the routers')),
    ([*NODES, '--expire', '30'], ("'30'", 'unit')),
    ([*NODES, '--max-body', '1'], ("'1'", '4096')),
    ([*NODES, '--health', 'health'], ("'health'", '/health')),
    ([*NODES, '--socket', 'x'], ("'x'", 'absolute path')),
    ([*NODES, '--output', '/nonexistent/x'], ("'/nonexistent/x'", 'No such file')),
])
def test_a_bad_parameter_is_a_clear_error(options, parts):
    run = generate(*options)
    assert run.returncode != 0 and not run.stdout
    assert run.stderr.startswith('generate: ') and 'Traceback' not in run.stderr
    assert all(part in run.stderr for part in parts), run.stderr


def test_without_the_proxy_the_check_is_not_skipped_silently(tmp_path):
    os.symlink(sys.executable, tmp_path / 'python3')
    run = generate(*NODES, path=str(tmp_path))
    assert run.returncode != 0 and 'haproxy is not installed' in run.stderr and '--no-check' in run.stderr
    assert generate(*NODES, '--no-check', path=str(tmp_path)).returncode == 0


def test_what_the_proxy_refuses_is_shown(tmp_path):
    fake = tmp_path / 'haproxy'
    fake.write_text('#!/bin/sh\n[ "$1" = -v ] && echo "HAProxy version 2.4.0" && exit\nexit 1\n')
    fake.chmod(0o755)
    run = generate(*NODES, path=f'{tmp_path}:{os.path.dirname(shutil.which("sh"))}')
    assert run.returncode != 0 and '2.6 or later is needed' in run.stderr
