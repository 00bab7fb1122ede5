# SPDX-License-Identifier: Apache-2.0
"""Requests/s through the proxy with the policy on, and beside plain leastconn, measured with wrk on loopback."""
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

from .proxy import Proxy, free_ports

VARIANTS = {
    'plain leastconn': None,
    'requests, header key': ('--load', 'requests'),
    'requests, messages key': ('--load', 'requests', '--key', 'messages'),
    'conversations, header key': ('--load', 'conversations'),
    'tokens, header key': ('--load', 'tokens'),
}

# Conversations come back in no particular order; the body is a small chat request.
SCRIPT = '''
local n, id = 0, 0
local function body(key)
  return '{"model":"m","messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"Question '
    .. key .. ' ' .. string.rep("lorem ipsum ", 20) .. '"}]}'
end
local made = {}
for i = 1, %(conversations)d do
  made[i] = wrk.format("POST", "/v1/chat/completions", {["x-conversation-id"] = "conversation-" .. i, ["content-type"] = "application/json"}, body(i))
end
function request()
  n = (n * 1103515245 + 12345) %% 2147483648
  return made[n %% #made + 1]
end
function setup(thread) end
function init(args) n = tonumber(args[1]) or 1 end
'''


class Sink:
    """Nodes that answer at once: the same proxy program, one thread, a constant answer."""

    def __init__(self, count):
        self.directory = tempfile.TemporaryDirectory(prefix='tidepool-sink-')
        self.ports = free_ports(count)
        path = os.path.join(self.directory.name, 'sink.cfg')
        with open(path, 'w') as file:
            file.write('global\n  maxconn 4000\n  nbthread 1\ndefaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n'
                       '  timeout connect 2s\n  timeout http-keep-alive 60s\nfrontend sink\n')
            file.writelines(f'  bind 127.0.0.1:{port}\n' for port in self.ports)
            file.write('  http-request return status 200 content-type application/json string "{\\"ok\\": true}"\n')
        self.process = subprocess.Popen(['haproxy', '-db', '-f', path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.directory.cleanup()


def plain(text):
    """The same configuration without the policy."""
    kept, inside = [], False
    for line in text.splitlines():
        if line.startswith(('frontend', 'backend', 'global', 'defaults', 'peers')):
            inside = line == 'backend nodes'
        if inside and re.match(r'  (http-request|http-response|stick )', line):
            continue
        kept.append(line)
    return '\n'.join(kept) + '\n'


def measure(variant, ports, seconds, connections=64, conversations=5000):
    """{'rate': requests/s, 'cpu_us': the proxy's own time for a request, 'p50_ms', 'p99_ms', 'errors', 'decisions'}"""
    options = VARIANTS[variant] or ()
    with tempfile.NamedTemporaryFile('w', suffix='.lua') as script:
        script.write(SCRIPT % {'conversations': conversations})
        script.flush()
        nodes = {f'n{i}': port for i, port in enumerate(ports, 1)}
        with Proxy(nodes, *options, explain=False, edit=None if VARIANTS[variant] else plain) as proxy:
            time.sleep(.3)
            before = cpu_seconds(proxy.worker())
            run = subprocess.run(['wrk', '-t1', f'-c{connections}', f'-d{seconds}s', '--latency', '-s', script.name,
                                  f'http://127.0.0.1:{proxy.port}', '--', '7'], capture_output=True, text=True)
            cpu = cpu_seconds(proxy.worker()) - before
            decisions = proxy.decisions()
    rate = re.search(r'Requests/sec:\s+([\d.]+)', run.stdout)
    if run.returncode or not rate:
        raise RuntimeError(f'wrk failed: {run.stdout}{run.stderr}')

    def percentile(name):
        value, unit = re.search(rf'{name}%\s+([\d.]+)(us|ms|s)', run.stdout).groups()
        return float(value) * {'us': .001, 'ms': 1, 's': 1000}[unit]
    failed = re.search(r'Non-2xx or 3xx responses: (\d+)', run.stdout)
    broken = re.search(r'Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)', run.stdout)
    count = int(re.search(r'(\d+) requests in', run.stdout)[1])
    return {'rate': float(rate[1]), 'cpu_us': cpu / count * 1e6, 'p50_ms': percentile('50'), 'p99_ms': percentile('99'),
            'errors': (int(failed[1]) if failed else 0) + (sum(map(int, broken.groups())) if broken else 0), 'decisions': decisions}


def cpu_seconds(pid):
    with open(f'/proc/{pid}/stat') as file:
        fields = file.read().rsplit(')', 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def missing():
    return '' if shutil.which('wrk') else 'wrk is not installed; install the package wrk'
