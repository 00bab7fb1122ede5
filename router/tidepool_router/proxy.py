# SPDX-License-Identifier: Apache-2.0
"""Runs the real proxy with a generated configuration, for tests and benchmarks."""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROUTER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def free_ports(count):
    held = [socket.socket() for _ in range(count)]
    for s in held:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(('127.0.0.1', 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


class Proxy:
    def __init__(self, nodes, *options, routers=None, self_name='', edit=None, explain=True):
        """nodes: {name: port}. Without routers there is nobody to learn homes from, and no wait for it. edit changes the configuration's text, to break it on purpose."""
        self.directory = tempfile.TemporaryDirectory(prefix='tidepool-router-')
        self.port, self.metrics_port = free_ports(2)
        self.routers = routers or {}
        self.self_name = self_name or next(iter(self.routers), '')
        self.config = os.path.join(self.directory.name, 'haproxy.cfg')
        self.log = os.path.join(self.directory.name, 'log')
        self.socket = os.path.join(self.directory.name, 'admin')
        self.options, self.edit, self.process = (*options, *(('--explain',) if explain else ())), edit, None
        self.configure(nodes)

    def configure(self, nodes):
        command = [sys.executable, os.path.join(ROUTER, 'generate'), '--listen', f'127.0.0.1:{self.port}',
                   '--metrics', f'127.0.0.1:{self.metrics_port}', '--socket', self.socket, '--output', self.config,
                   '--max-connections', '2000', *self.options]
        if '--check-interval' not in self.options:     # also a check's timeout: a busy machine is no dead node
            command += ['--check-interval', '10s']
        if self.self_name:
            command += ['--self', self.self_name]
        for name, port in self.routers.items():
            command += ['--router', f'{name}=127.0.0.1:{port}']
        for name, port in nodes.items():
            command += ['--node', f'{name}=127.0.0.1:{port}']
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr)
        if self.edit:
            with open(self.config) as file:
                text = file.read()
            changed = self.edit(text)
            if changed == text:
                raise RuntimeError('the edit changed nothing: the configuration no longer has what it looks for')
            with open(self.config, 'w') as file:
                file.write(changed)

    def start(self):
        with open(self.log, 'w') as log:
            self.process = subprocess.Popen(['haproxy', '-W', '-f', self.config],
                                            stdout=log, stderr=log, start_new_session=True)
        self.wait_until(lambda: self.metrics() is not None, 'answer on its metrics port')
        return self

    def wait_until(self, condition, what, seconds=10):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if condition():
                    return
            except OSError:
                pass
            time.sleep(.02)
        raise RuntimeError(f'the proxy did not {what} within {seconds} s; it said:\n{open(self.log).read()}')

    def reload(self):
        """Returns when the new worker serves and the old one has handed over."""
        before, said = self.worker(), self.reloads_said()
        for _ in range(3):     # HAProxy's master misses a signal that comes while it still starts over
            self.process.send_signal(signal.SIGUSR2)
            try:
                self.wait_until(lambda: self.reloads_said() > said, 'begin to reload', 3)
                break
            except RuntimeError:
                if self.process.poll() is not None:
                    raise
        self.wait_until(lambda: self.worker() not in (None, before), 'start a new worker')

    def reloads_said(self):
        with open(self.log) as file:
            return file.read().count('Reloading HAProxy')

    def in_step(self):
        """Whether this worker has all that it could learn at its start. One that has not hands nothing on when it is reloaded;
        alone, it takes the proxy ten seconds to conclude that there is nobody to learn from."""
        flags = re.search(r'id=routers .*?flags=0x([0-9a-f]+)', self.admin('show peers'))
        return bool(flags) and int(flags[1], 16) & 3 == 3

    def worker(self):
        try:
            found = re.search(r'^Pid: (\d+)', self.admin('show info'), re.M)
        except OSError:
            return None
        return int(found[1]) if found else None

    def stop(self):
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.directory.cleanup()

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_):
        self.stop()

    def admin(self, command):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(self.socket)
            s.sendall(command.encode() + b'\n')
            answer = b''
            while True:
                data = s.recv(65536)
                if not data:
                    return answer.decode()
                answer += data

    def page(self, path='/metrics'):
        with urllib.request.urlopen(f'http://127.0.0.1:{self.metrics_port}{path}', timeout=5) as answer:
            return answer.read().decode()

    def metrics(self, path='/metrics'):
        return parse_metrics(self.page(path))

    def decisions(self):
        return {labels['decision']: int(value) for name, labels, value in self.metrics() if name == 'tidepool_router_decisions_total'}

    def loads(self):
        return {labels['node']: int(value) for name, labels, value in self.metrics() if name == 'tidepool_router_node_load'}

    def total(self, name):
        """The sum of one of the proxy's own counters."""
        return sum(value for found, _, value in self.metrics('/metrics/proxy') if found == name)


def parse_metrics(text):
    """[(name, labels, value)]; a line that is no Prometheus text raises."""
    rows = []
    for line in text.splitlines():
        if not line or line.startswith('#'):
            continue
        match = re.fullmatch(r'([A-Za-z_:][A-Za-z0-9_:]*)(?:\{([^}]*)\})? (\S+)', line)
        if not match:
            raise ValueError(f'no line of Prometheus text: {line!r}')
        labels = dict(re.findall(r'([A-Za-z_]\w*)="([^"]*)"', match[2] or ''))
        rows.append((match[1], labels, float(match[3])))
    return rows
