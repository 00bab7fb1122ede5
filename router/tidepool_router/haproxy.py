# SPDX-License-Identifier: Apache-2.0
"""Settings to an HAProxy configuration (2.6 or later, with Lua only where the load needs it)."""
import os
import re
import shutil
import subprocess
import tempfile

from .policy import DECISIONS, threshold_in_hundredths

HAPROXY_MINIMUM = (2, 6)
LEADING_MESSAGES = 4     # the first user message is looked for among these


def _usable(node):
    return f'{{ srv_weight(nodes/{node.name}) gt 0 }} {{ srv_is_up(nodes/{node.name}) }}'


def _global(s):
    lines = ['global',
             f'  maxconn {s.max_connections}',
             # The key's field, the leading messages and a request that is to be retried must fit; so must the metrics page.
             f'  tune.bufsize {max(s.max_body + 2048, 16384 + 256 * len(s.nodes))}']
    if s.threads:
        lines.append(f'  nbthread {s.threads}')
    if s.user:
        lines.append(f'  user {s.user}')
    if s.socket:
        lines.append(f'  stats socket {s.socket} mode 600 level admin')
    if s.routers:
        lines.append(f'  localpeer {s.self_name or s.routers[0][0]}')
    if s.uses_lua or s.routers:
        nodes = ','.join(f'{node.name}={node.id}={node.address}' for node in s.nodes)
        source = s.tokens.kind if s.load == 'tokens' else '-'
        # 2.6 hands no arguments to lua-load.
        lines.append(f'  setenv TIDEPOOL_ROUTER "{s.load} {threshold_in_hundredths(s.threshold)} {s.sync_interval_ms} '
                     f'{source} {s.tokens.name or "-"} {s.tokens.number} {"explain" if s.explain else "-"} {("-", "alone", "several")[min(len(s.routers), 2)]} {nodes}"')
        lines.append(f'  lua-load {s.lua_path}')
    return lines


def _peers(s):
    lines = ['peers routers']
    for name, address in s.routers:
        lines.append(f'  peer {name} {address}')
    return lines


def _defaults(s):
    return ['defaults',
            '  mode http',
            '  timeout connect 2s',
            f'  timeout client {s.timeout}',
            f'  timeout server {s.timeout}',
            f'  timeout queue {s.timeout}',
            '  timeout http-request 30s',
            '  timeout http-keep-alive 60s',
            '  option dontlognull',
            '  # An answer is streamed a token at a time; without this the proxy holds each back for up to 200 ms, hoping for more.',
            '  option http-no-delay']


def _key_rules(s):
    lines = ['  # Only what the proxy holds in full before it sends it can be sent again, and clients often send head and body apart.',
             '  http-request wait-for-body time 30s if METH_POST',
             '  # The conversation: the first of the keys that the request has, as a digest of fixed length.']
    if s.reads_body:
        lines += ['  # json_query reads no \\u escapes beyond ASCII; what they say does not matter, only that it is always the same.',
                  r"""  http-request set-var(txn.body) 'req.body,regsub("\\\\\\\\","//",g),regsub("\\\\u","/u",g)'"""]
    for key in s.keys:
        unset = '!{ var(txn.key) -m found }'
        if key.kind == 'messages':
            lines += _messages_rules(unset)
            continue
        fetch = {'header': f'req.fhdr({key.name})', 'cookie': f'req.cook({key.name})',
                 'body': f"var(txn.body),json_query('{key.name}')"}[key.kind]
        # Another kind of key with the same text is another conversation.
        lines.append(f'  http-request set-var(txn.key) {fetch},sha1,hex if {unset} {{ {fetch} -m len gt 0 }}')
    return lines


def _messages_rules(unset):
    """The digest of the first message and the first user message: what each later turn repeats, and `user` where it is given."""
    def texts(index, variable, condition):
        content = f'$.messages[{index}].content'
        # Content in parts: the first text among the first two (a picture may come before it).
        return [f"  http-request set-var(txn.{variable}) var(txn.body),json_query('{path}'),sha1,hex "
                f"if {unset} !{{ var(txn.{variable}) -m found }}{condition}"
                for path in (content, f'{content}[0].text', f'{content}[1].text')]
    lines = texts(0, 'lead', '')
    for index in range(LEADING_MESSAGES):
        lines += texts(index, 'opening', f" {{ var(txn.body),json_query('$.messages[{index}].role') -m str user }}")
    lines += ["  http-request set-var(txn.user) var(txn.body),json_query('$.user'),sha1,hex if " + unset + ' { var(txn.opening) -m found }',
              # A system prompt with no user's message after it names no conversation.
              f'  http-request set-var-fmt(txn.leading) "%[var(txn.user)] %[var(txn.lead)] %[var(txn.opening)]" if {unset} '
              '{ var(txn.opening) -m found }',
              f'  http-request set-var(txn.key) var(txn.leading),sha1,hex if {unset} {{ var(txn.leading) -m found }}']
    return lines


def _home_rules(s, lookup):
    rule = f'  http-request set-var(txn.home) var(txn.key),{lookup} if {{ var(txn.key) -m found }}'
    if not s.routers:
        return [rule]
    # A worker that has just replaced another serves before it has been told the homes.
    unknown = '{ var(txn.key) -m found } !{ var(txn.home) -m int gt 0 }'
    return [rule, f'  http-request lua.await_home if {unknown}', f'{rule} !{{ var(txn.home) -m int gt 0 }}']


def _requests_policy(s):
    """Requests in flight: srv_conn counts them, the configuration does the arithmetic."""
    hundredths = threshold_in_hundredths(s.threshold)
    lines = _home_rules(s, 'table_server_id(nodes)')
    lines += ['  http-request set-var(txn.n) nbsrv(nodes)',
              '  http-request set-var(txn.total) int(0)']
    for node in s.nodes:
        lines.append(f'  http-request set-var(txn.total) srv_conn(nodes/{node.name}),add(txn.total) if {_usable(node)}')
    lines += [f'  http-request set-var(txn.limit) var(txn.total),mul({hundredths})',
              '  # The destination counts with this request on it.',
              f'  http-request set-var(txn.limit_after) var(txn.total),add(1),mul({hundredths})']
    for node in s.nodes:
        lines.append(f'  http-request set-var(txn.home_load) srv_conn(nodes/{node.name}) '
                     f'if {{ var(txn.home) -m int {node.id} }} {{ srv_is_up(nodes/{node.name}) }}')
    lines += ['  http-request set-var(txn.decision) str(unkeyed)',
              '  http-request set-var(txn.decision) str(new) if { var(txn.key) -m found }',
              '  http-request set-var(txn.decision) str(rehomed) if { var(txn.home) -m int gt 0 }',
              '  http-request set-var(txn.decision) str(stay) if { var(txn.home_load) -m found }',
              '  http-request set-var(txn.decision) str(guarded) if { var(txn.decision) -m str stay } '
              '{ var(txn.home_load),mul(txn.n),mul(100),sub(txn.limit) gt 0 }']
    for node in s.nodes:
        lines.append('  http-request set-var(txn.decision) str(moved) if { var(txn.decision) -m str guarded } '
                     f'{_usable(node)} {{ srv_conn(nodes/{node.name}),add(1),mul(txn.n),mul(100),sub(txn.limit_after) le 0 }}')
    if s.explain:
        loads = ' '.join(f'{node.name}=%[srv_conn(nodes/{node.name})]' for node in s.nodes)
        lines.append(f'  http-request set-var-fmt(txn.loads) "{loads}"')
        lines.append('  http-request set-var(txn.weight) int(1)')
        lines.append('  http-request set-var(txn.held) int(0)')
    return lines, ['  stick match var(txn.key) if { var(txn.decision) -m str stay guarded }',
                   '  stick store-request var(txn.key)']


def _lua_policy(s):
    """Open conversations or tokens: the action decides, the configuration remembers the home and sends the request there."""
    lines = _home_rules(s, 'table_gpt0(homes)')
    if s.load == 'tokens':
        size = f'req.fhdr({s.tokens.name})' if s.tokens.kind == 'header' else 'req.body_size'
        lines.append(f'  http-request set-var(txn.size) {size}')
        if s.tokens.kind != 'metric':
            lines.append('  http-request set-var(txn.held) var(txn.key),table_gpt0(sizes) if { var(txn.key) -m found }')
    # Tracked before it is decided: what has no entry has expired, and is not merely on its way.
    lines.append('  http-request track-sc0 var(txn.key) table homes if { var(txn.key) -m found }')
    if s.load == 'tokens' and s.tokens.kind != 'metric':
        lines.append('  http-request track-sc2 var(txn.key) table sizes if { var(txn.key) -m found }')
    lines += ['  http-request lua.route',
              '  http-request sc-set-gpt0(0) var(txn.node_id) if { var(txn.key) -m found } { var(txn.node_id) -m found }']
    if s.load == 'tokens' and s.tokens.kind != 'metric':
        lines += ['  http-request sc-set-gpt0(2) var(txn.weight) if { var(txn.key) -m found } { var(txn.node_id) -m found }']
    return lines, ['  use-server %[var(txn.node)] if { var(txn.node) -m found }',
                   '  # A request that was sent on to another node, because its own had died, has its home there.',
                   '  http-response sc-set-gpt0(0) srv_id if { var(txn.key) -m found } !{ srv_id,sub(txn.node_id) eq 0 }']


def _tables(s):
    peers = ' peers routers' if s.routers else ''
    size = f'type string len 40 size {s.conversations} expire {s.expire}'
    lines = ['backend decisions', '  stick-table type string len 16 size 64 store gpc0']
    if s.uses_lua:
        # The rate tells which homes any router was asked for a moment ago.
        rate = ',http_req_rate(10s)' if len(s.routers) > 1 else ''
        lines += ['backend homes', f'  stick-table {size} store gpt0{rate}{peers}']
        if s.load == 'tokens' and s.tokens.kind != 'metric':
            lines += ['backend sizes', f'  stick-table {size} store gpt0{peers}']
    return lines, f'{size} store server_id{peers}'


def _metrics_page(s):
    load = (lambda node: f'lua.node_load({node.name})') if s.uses_lua else (lambda node: f'srv_conn(nodes/{node.name})')
    table = 'homes' if s.uses_lua else 'nodes'
    rows = ['# HELP tidepool_router_decisions_total Requests by what was decided for them.',
            '# TYPE tidepool_router_decisions_total counter']
    rows += [f'tidepool_router_decisions_total{{decision="{kind}"}} %[str({kind}),table_gpc0(decisions)]'
             for kind in DECISIONS]
    rows += ['# HELP tidepool_router_node_load Load of the node in the chosen kind.', '# TYPE tidepool_router_node_load gauge']
    rows += [f'tidepool_router_node_load{{node="{node.name}",kind="{s.load}"}} %[{load(node)}]' for node in s.nodes]
    rows += ['# HELP tidepool_router_node_up Whether the node is up.', '# TYPE tidepool_router_node_up gauge']
    rows += [f'tidepool_router_node_up{{node="{node.name}"}} %[srv_is_up(nodes/{node.name})]' for node in s.nodes]
    rows += ['# HELP tidepool_router_conversations Conversations that have a home.', '# TYPE tidepool_router_conversations gauge',
             f'tidepool_router_conversations %[table_cnt({table})]']
    # In the file \n stands for a line's end and \" for a quote.
    return ''.join(row.replace('"', '\\"') + '\\n' for row in rows)


def generate(s):
    tables, own_table = _tables(s)
    key = ', '.join(key.kind + (f':{key.name}' if key.name else '') for key in s.keys)
    lines = ['# Generated by router/generate; change the options there, not this file.',
             f'# {len(s.nodes)} nodes, load {s.load}, threshold {s.threshold:g} x average, key {key}.', '']
    lines += _global(s) + ['']
    if s.routers:
        lines += _peers(s) + ['']
    lines += _defaults(s) + ['']
    lines += tables + ['']
    lines += ['frontend metrics', f'  bind {s.metrics}',
              '  http-request use-service prometheus-exporter if { path /metrics/proxy }',
              f'  http-request return status 200 content-type "text/plain; version=0.0.4" lf-string "{_metrics_page(s)}" if {{ path /metrics }}',
              '  http-request return status 404', '']
    lines += ['frontend conversations', f'  bind {s.listen}']
    lines += ['  default_backend nodes', '']
    lines += ['backend nodes', '  balance leastconn']
    if not s.uses_lua:
        lines.append(f'  stick-table {own_table}')
    lines += ['  option httpchk', f'  http-check send meth GET uri {s.health}',
              '  # A node that dies: what it has not begun to answer goes to another one, a POST included.',
              '  option redispatch 1', '  retries 3', '  retry-on conn-failure empty-response',
              '  # A host that vanishes closes nothing: what waits for it is sent on after 25 seconds.',
              '  option srvtcpka', '  srvtcpka-idle 10s', '  srvtcpka-intvl 5s', '  srvtcpka-cnt 3', '']
    lines += _key_rules(s)
    rules, server_rules = _lua_policy(s) if s.uses_lua else _requests_policy(s)
    lines += ['  # The decision.'] + rules
    lines += ['  http-request track-sc1 var(txn.decision) table decisions', '  http-request sc-inc-gpc0(1)']
    lines += server_rules
    if s.explain:
        lines += ['  http-response set-header x-router-decision %[var(txn.decision)]',
                  '  http-response set-header x-router-node %[srv_name]',
                  '  http-response set-header x-router-home %[var(txn.home)]',
                  '  http-response set-header x-router-loads "%[var(txn.loads)]"',
                  '  http-response set-header x-router-weight "%[var(txn.held)] %[var(txn.weight)]"']
    lines += [f'  default-server check inter {s.check_interval} fall 2 rise 2']
    lines += [f'  server {node.name} {node.address} id {node.id}' for node in s.nodes]
    return '\n'.join(lines) + '\n'


def check(text, program='haproxy'):
    """Runs the proxy's own check. Returns '' or what it found."""
    path = shutil.which(program)
    if not path:
        return f'{program} is not installed, so the configuration was not checked; install the package haproxy, or give --no-check'
    version = subprocess.run([path, '-v'], capture_output=True, text=True).stdout
    found = re.search(r'version (\d+)\.(\d+)', version)
    if not found or tuple(map(int, found.groups())) < HAPROXY_MINIMUM:
        return (f'{path} is {version.splitlines()[0] if version else "of an unknown version"}; '
                f'version {".".join(map(str, HAPROXY_MINIMUM))} or later is needed')
    with tempfile.NamedTemporaryFile('w', suffix='.cfg') as file:
        file.write(text)
        file.flush()
        run = subprocess.run([path, '-c', '-dW', '-f', file.name], capture_output=True, text=True)
    if run.returncode:
        return f'{path} refuses the configuration:\n{run.stderr.strip() or run.stdout.strip()}'.replace(os.path.basename(file.name), 'CONFIG')
    return ''
