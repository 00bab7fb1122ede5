"""The soak test: stock Mooncake with Tidepool under random traffic and random faults, every byte compared. See scripts/soak.

The time is divided into rounds, each with a master, stores and engines of its own. In a round, processes are killed, stopped
for a while, terminated, closed and started again under the same name, and stores mount and unmount memory; engines call
whatever a wheel has (traffic.py) and judge what they get (blocks.py). At the end of a round the faults cease, every engine has
to work again, and every process has to end by itself.
"""

import argparse
import collections
import contextlib
import ctypes
import http.server
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

import traffic  # noqa: E402
from blocks import Table  # noqa: E402
from harness import actions_store, machine, mounts, status, wheels  # noqa: E402
from harness.cluster import MIB, Cluster, fakecuda  # noqa: E402
from harness.ports import free_port  # noqa: E402

KEYS, CALLERS = 240, 2  # callers: threads of one engine that call
CLIENT_TTL_S = 5
SEGMENT = 96 * MIB
EMBEDDED = 64 * MIB
# Mooncake's own patience with a store that does not answer is below a minute.
CALL_LIMIT_S = 90
SETUP_LIMIT_S = 120
SETTLE_S = 40
KINDS = ["memfd", "tmpfs", "hugetlbfs", "cumem"]
# What may grow in a process that lives through a round, before it is a finding: threads and connections of Mooncake come and
# go with its peers.
GROWTH = {"fds": 40, "threads": 24, "maps": 150}
# A python process that is terminated, with and without a handler of Mooncake's.
TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM, 0)


class Metadata:
    """A metadata server that takes every PUT, as etcd does: a store that comes back replaces what the dead one left."""

    def __init__(self):
        entries, lock = {}, threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, code, body=b""):
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def key(self):
                return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["key"][0]

            def do_GET(self):
                with lock:
                    body = entries.get(self.key())
                self.answer(404 if body is None else 200, body or b"metadata not found")

            def do_PUT(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    entries[self.key()] = body
                self.answer(200, b"metadata updated")

            def do_DELETE(self):
                with lock:
                    found = entries.pop(self.key(), None)
                self.answer(404 if found is None else 200, b"metadata deleted")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a process that was killed in the middle of a request
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/metadata"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Member:
    """A store, an engine, or one that is both, through all its lives."""

    def __init__(self, round_, name, role, kind, numbers, keeper):
        self.round, self.name, self.role, self.kind, self.numbers = round_, name, role, kind, numbers
        self.keeper = keeper  # never ended: what grows in it is seen
        self.lives = 0
        self.process = self.pending = None
        self.state, self.since, self.until = "away", time.monotonic(), 0.0
        self.calls = []  # under way: (what, pending)
        self.mounted = []
        self.samples = []
        self.host = f"127.0.0.1:{free_port()}" if round_.http else "127.0.0.1"

    @property
    def engine(self):
        return bool(self.numbers)

    def environment(self):
        cluster = self.round.cluster
        made = {}
        if not cluster.stock:
            cluster.use_segments(self.kind)
            if self.role != "engine":
                made.update(cluster.store_environment())
            if self.role != "store":
                made.update(cluster.engine_environment())
        made["PYTHONPATH"] = str(HERE)
        if self.round.http:
            made["MC_TE_METADATA_REFRESH_INTERVAL_SECONDS"] = "2"
        return made

    def start(self):
        self.lives += 1
        name = f"{self.name}-{self.lives}"
        cluster = self.round.cluster
        self.process = cluster.process(name, self.environment())
        self.round.names.append(name)
        segment = {"store": SEGMENT, "both": EMBEDDED, "engine": 0}[self.role]
        self.pending = self.process.start(
            actions_store.setup, master=cluster.master_address, segment_bytes=segment, local_bytes=(96 if self.engine else 16) * MIB,
            host=self.host, metadata=self.round.metadata,
        )
        self.state, self.since = "starting", time.monotonic()
        self.calls, self.mounted, self.samples = [], [], []

    def answered(self, pending):
        """The result of a call that has come, or None."""
        process = self.process
        while pending.number not in process.answers:
            if not select.select([process.replies], [], [], 0)[0]:
                return None
            chunk = os.read(process.replies, 1 << 16)
            if not chunk:
                return None
            process.buffered += chunk
            *lines, process.buffered = process.buffered.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                process.answers[answer["number"]] = answer
        answer = process.answers.pop(pending.number)
        if "error" in answer:
            self.round.find("a call raised", member=self.process.name, error=answer["error"][-1500:])
        return answer

    def traffic(self):
        plan = dict(
            seed=self.round.seed, name=self.round.name, engine=self.process.name, life=self.lives, numbers=self.numbers,
            keys=KEYS, threads=self.round.threads, table=self.round.table_path, findings=self.round.findings_path,
        )
        for number in self.numbers:
            self.round.table.threads[number, Table.LEAVE] = 0
            self.round.table.threads[number, Table.CALL_SINCE] = 0
        self.calls.append(("traffic", self.process.start(traffic.run, plan=plan)))

    def tick(self, now):
        """What has come to its time, and what has ended by itself."""
        if self.state == "away":
            if now >= self.until:
                self.start()
            return
        code = self.process.popen.poll()
        if code is not None:
            self.ended(code, now)
        elif self.state == "stopped" and now >= self.until:
            self.process.signal(signal.SIGCONT)
            self.state = "up" if self.pending is None else "starting"
        elif self.state == "starting":
            self.starting(now)
        elif self.state in ("up", "leaving"):
            self.up(now)

    def ended(self, code, now):
        if self.state == "killed":
            expected = code == -signal.SIGKILL
        elif self.state == "terminated":
            expected = code in TERMINATED
        else:
            expected = self.state == "finishing" and code == 0
        if not expected:
            log = self.process.log
            self.round.find("ended by itself", member=self.process.name, state=self.state, status=code, log=log[-3000:])
        self.process.dispose()
        self.round.cluster.processes.remove(self.process)
        self.state, self.since = "away", now

    def starting(self, now):
        answer = self.answered(self.pending)
        if answer is None:
            if machine.ran_s(self.since) > SETUP_LIMIT_S:
                self.round.find("setup hangs", member=self.process.name, log=self.process.log[-3000:])
                self.end("killed", 0.5)
            return
        self.pending = None
        if answer.get("result") == 0:
            self.state, self.since, self.refused_since = "up", now, None
            if self.engine:
                self.traffic()
            return
        # A name that the dead one still has, or addresses that others use: again, as an operator's supervisor would.
        self.round.count(f"setup gave {answer.get('result')}")
        if not hasattr(self, "refused_since") or self.refused_since is None:
            self.refused_since = now
        if machine.ran_s(self.refused_since) > 60:
            self.round.find("setup fails for a minute", member=self.process.name, log=self.process.log[-3000:])
            self.refused_since = now
        self.end("killed", 2.0)

    def up(self, now):
        for what, pending in list(self.calls):
            answer = self.answered(pending)
            if answer is None:
                continue
            self.calls.remove((what, pending))
            result = answer.get("result")
            if what == "traffic" and result:
                self.round.results.update(result)
            elif what == "mount" and result:
                self.mounted.append(result)
            elif what == "unmount" and result != 0:
                self.round.count(f"unmount gave {result}")
            elif what == "close":
                if result != 0:
                    self.round.find("close failed", member=self.process.name, result=result)
                self.process.popen.stdin.close()
                self.state, self.since = "finishing", now
                return
        if self.state == "leaving" and not self.calls:
            self.calls.append(("close", self.process.start(actions_store.close)))
            self.state = "up"
        for number in self.numbers:
            since = int(self.round.table.threads[number, Table.CALL_SINCE])
            if since and machine.ran_s(max(since / 1e9, self.since)) > CALL_LIMIT_S:
                way = list(traffic.WAYS)[int(self.round.table.threads[number, Table.WAYS])]
                self.round.find("a call hangs", member=self.process.name, way=way, log=self.process.log[-3000:])
                self.round.table.threads[number, Table.CALL_SINCE] = 0

    def away_until(self, away_s):
        # One that is store and engine must not come back under its name before the master has forgotten it: Mooncake itself
        # then copies from and to the addresses of its former life, in its own process, and stock ends with SIGSEGV.
        if self.role == "both" and self.round.http:
            away_s += CLIENT_TTL_S + 2
        return time.monotonic() + away_s

    def end(self, how, away_s):
        self.until = self.away_until(away_s)
        self.state, self.since = how, time.monotonic()
        if how == "killed":
            self.process.signal(signal.SIGKILL)
        elif how == "terminated":
            self.process.signal(signal.SIGTERM)

    def leave(self):
        """Ends its traffic, closes, and exits."""
        for number in self.numbers:
            self.round.table.threads[number, Table.LEAVE] = 1
        self.state, self.since = "leaving", time.monotonic()

    def sample(self):
        try:
            with open(f"/proc/{self.process.pid}/maps") as file:
                maps = sum(1 for _ in file)
            found = dict(
                fds=len(os.listdir(f"/proc/{self.process.pid}/fd")), threads=len(os.listdir(f"/proc/{self.process.pid}/task")), maps=maps
            )
        except OSError:
            return
        self.samples.append(found)

    def growth(self):
        """The last quarter of its samples against the second; the first is its start."""
        quarter = len(self.samples) // 4
        if quarter < 3:
            return
        for what, allowed in GROWTH.items():
            numbers = [sample[what] for sample in self.samples]
            before, after = (sorted(part)[len(part) // 2] for part in (numbers[quarter : 2 * quarter], numbers[-quarter:]))
            if after > before + allowed:
                self.round.find("grows", member=self.process.name, what=what, before=before, after=after, all=numbers)


class Round:
    def __init__(self, soak, number, plan, folder):
        self.soak, self.number, self.plan = soak, number, plan
        self.seed = soak.options.seed * 1000 + number
        self.dice = random.Random(self.seed)
        self.name, self.http = f"r{number}", plan["metadata"] != "P2PHANDSHAKE"
        self.folder = folder
        self.results, self.counts = collections.Counter(), collections.Counter()
        self.findings_path = os.path.join(folder, "findings")
        open(self.findings_path, "w").close()
        self.findings_read = 0
        self.members, self.names, number_of = [], [], 0
        for name, role, kind, keeper in plan["members"]:
            numbers = []
            if role != "store":
                numbers = list(range(number_of, number_of + CALLERS))
                number_of += CALLERS
            self.members.append((name, role, kind, numbers, keeper))
        self.threads = number_of
        self.table_path = os.path.join(folder, "table")
        self.table = Table(self.table_path, KEYS, self.threads, create=True)

    def count(self, what):
        self.counts[what] += 1

    def find(self, kind, **about):
        self.soak.found({"kind": kind, "round": self.number, "at": round(time.time(), 3), **about})

    def read_findings(self):
        with open(self.findings_path) as file:
            lines = file.read().splitlines()
        for line in lines[self.findings_read :]:
            self.soak.found({"round": self.number, **json.loads(line)})
        self.findings_read = len(lines)

    def run(self, seconds):
        with contextlib.ExitStack() as stack:
            self.cluster = stack.enter_context(Cluster(wheels.CPU, self.folder, stock=self.soak.options.stock))
            kinds = {kind for _, _, kind, *_ in self.members}
            self.cluster.double = "cumem" in kinds and not self.cluster.stock
            self.metadata = "P2PHANDSHAKE"
            flags = ["-client_ttl", str(CLIENT_TTL_S), "-default_kv_lease_ttl", str(self.plan["lease_ms"])]
            if self.plan["metadata"] == "http":
                server = Metadata()
                stack.callback(server.close)
                self.metadata = server.url
            elif self.plan["metadata"] == "master":
                port = free_port()
                flags += [
                    "-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1", f"-http_metadata_server_port={port}",
                    "-enable_metadata_cleanup_on_timeout=true",
                ]
                self.metadata = f"http://127.0.0.1:{port}/metadata"
            where = {"memfd": "memfd", "cumem": "cumem"}
            if "tmpfs" in kinds:
                where["tmpfs"] = tempfile.mkdtemp(prefix="tidepool-soak-", dir="/dev/shm")
                stack.callback(shutil.rmtree, where["tmpfs"], True)
            if "hugetlbfs" in kinds:
                where["hugetlbfs"] = stack.enter_context(mounts.mounted("hugetlbfs", "pagesize=2M,mode=0700"))
            self.cluster.start_master(*flags)
            self.members = [Member(self, name, role, where[kind], numbers, keeper) for name, role, kind, numbers, keeper in self.members]
            try:
                self.live(seconds)
                self.settle()
                self.finish()
            finally:
                self.read_findings()
                for member in self.members:
                    if member.state == "stopped":
                        with contextlib.suppress(ProcessLookupError):
                            member.process.signal(signal.SIGCONT)

    def tick(self, until):
        """Let members do what is due until that time or condition."""
        while not until():
            now = time.monotonic()
            for member in self.members:
                member.tick(now)
            self.soak.tick(self)
            if self.cluster.master.poll() is not None:
                self.find("the master ended", status=self.cluster.master.returncode)
                raise SystemExit(1)
            time.sleep(0.03)

    def live(self, seconds):
        self.tick(lambda: all(member.state == "up" for member in self.members))
        end = time.monotonic() + seconds
        sampled = 0.0
        while time.monotonic() < end:
            pause = time.monotonic() + self.dice.expovariate(1 / self.soak.options.pause)
            self.tick(lambda: time.monotonic() >= min(pause, end))
            self.fault()
            if time.monotonic() - sampled > 2:
                sampled = time.monotonic()
                for member in self.members:
                    if member.state == "up":
                        member.sample()

    def fault(self):
        """One fault at a random member. The dice are thrown in the same order whatever the processes do meanwhile."""
        member = self.dice.choice(self.members)
        what = self.dice.choices(["stop", "kill", "terminate", "leave", "mount", "unmount"], [5, 3, 1, 1, 3, 3])[0]
        amount, away = self.dice.random(), self.dice.random() * 4
        if member.state != "up":
            return
        if what in ("mount", "unmount") and (member.engine or member.calls):
            what = "stop"
        if what in ("kill", "terminate", "leave") and member.keeper:
            what = "stop"
        if what == "unmount" and not member.mounted:
            what = "mount"
        if what == "mount" and len(member.mounted) >= 2:
            what = "unmount"
        if what == "stop":
            member.process.signal(signal.SIGSTOP)
            member.state, member.until = "stopped", time.monotonic() + 0.1 * 80**amount
        elif what == "leave":
            member.leave()
            member.until = member.away_until(away)
        elif what == "mount":
            member.calls.append(("mount", member.process.start(actions_store.mount, size=32 * MIB)))
        elif what == "unmount":
            member.calls.append(("unmount", member.process.start(actions_store.unmount, segments=member.mounted.pop(0))))
        else:
            member.end({"kill": "killed", "terminate": "terminated"}[what], away)
        self.count(f"fault {what} {member.role}")
        self.soak.log(f"{what} {member.process.name} in round {self.number}")

    def settle(self):
        """Faults cease. Once the master has forgotten the dead, everything has to work."""
        self.tick(lambda: all(member.state == "up" and not [c for c in member.calls if c[0] != "traffic"] for member in self.members))
        calm = time.monotonic()
        self.tick(lambda: machine.ran_s(calm) > CLIENT_TTL_S + 1)
        self.table.flags[Table.STOP] = 1
        self.tick(lambda: not any(member.calls for member in self.members if member.state != "away"))
        for member in self.members:
            if not member.engine or member.state != "up":
                continue
            took = member.process.call(traffic.settle, limit_s=3 * SETTLE_S, prefix=f"{self.name}-{member.process.name}", bound_s=SETTLE_S)
            if took is None:
                self.find("does not work again", member=member.process.name, log=member.process.log[-3000:])
            elif not self.cluster.stock:
                self.goes_short(member)
            member.growth()
        for member in self.members:
            if not member.engine and member.state == "up":
                member.growth()

    def goes_short(self, member):
        """What it moves now goes through shared memory again."""
        before = self.cluster.counters(member.process)

        def moves():
            member.process.call(traffic.settle, limit_s=3 * SETTLE_S, prefix=f"{self.name}-{member.process.name}-{time.monotonic()}", bound_s=SETTLE_S)
            after = self.cluster.counters(member.process)
            return after["local_write_bytes"] > before["local_write_bytes"]

        try:
            status.until(moves, "shared memory is used", SETTLE_S)
        except AssertionError:
            counters = {name: value for name, value in self.cluster.counters(member.process).items() if value}
            self.find("does not use shared memory again", member=member.process.name, counters=counters, log=member.process.log[-3000:])

    def finish(self):
        """All close and exit by themselves: engines first."""
        for engines in (True, False):
            chosen = [member for member in self.members if member.engine == engines and member.state == "up"]
            start = time.monotonic()
            for member in chosen:
                member.leave()
                member.until = float("inf")
            self.tick(lambda: all(member.state == "away" for member in chosen) or machine.ran_s(start) > 60)
            for member in chosen:
                if member.state != "away":
                    self.find("does not end", member=member.process.name, state=member.state, log=member.process.log[-3000:])
        for member in self.members:
            member.until = float("inf")
        for name in self.names if self.cluster.double else []:
            broken = fakecuda.broken_rules(self.cluster.driver_log(name))
            if broken:
                self.find("a rule of the driver was broken", member=name, first=broken[0])

    def totals(self):
        rows = self.table.threads
        return {name: int(rows[:, column].sum()) for name, column in (("calls", Table.CALLS), ("blocks", Table.OK), ("bytes", Table.BYTES))}


class Soak:
    def __init__(self, options):
        self.options = options
        self.findings, self.counts, self.results = [], collections.Counter(), collections.Counter()
        self.sum = collections.Counter()
        self.begin = self.said = time.monotonic()
        self.folder = tempfile.mkdtemp(prefix="tp-soak.", dir="/tmp")
        self.log_file = open(os.path.join(self.folder, "faults"), "w")

    def log(self, line):
        self.log_file.write(f"{time.time():.3f} {line}\n")
        self.log_file.flush()

    def found(self, finding):
        self.findings.append(finding)
        self.log(json.dumps(finding))
        if len(self.findings) <= 20:
            print("FINDING " + json.dumps(finding)[:2000], flush=True)

    def tick(self, round_):
        now = time.monotonic()
        if now - self.said < 10:
            return
        self.said = now
        round_.read_findings()
        total = self.sum + collections.Counter(round_.totals())
        faults = sum(count for what, count in (self.counts + round_.counts).items() if what.startswith("fault"))
        states = collections.Counter(member.state for member in round_.members)
        print(
            f"{now - self.begin:5.0f} s  round {round_.number} ({round_.plan['what']}): {total['calls']} calls, "
            f"{total['bytes'] / 1e9:.1f} GB, {faults} faults, {len(self.findings)} findings; "
            + ", ".join(f"{count} {state}" for state, count in sorted(states.items())),
            flush=True,
        )

    def plans(self):
        """What the rounds are made of, in turn."""
        kinds = self.options.kinds
        number = 0
        while True:
            metadata = self.options.metadata or ["P2PHANDSHAKE", "http", "P2PHANDSHAKE", "master"][number % 4]
            lease_ms = [2000, 500][number // 2 % 2]
            # Two kinds a round, the first of a store that lives through it.
            first, second = (kinds[(number + step) % len(kinds)] for step in range(2))
            members = [
                ("keeper", "store", first, True), ("store", "store", second, False), ("lasting", "engine", first, True),
                ("engine", "engine", first, False), ("both", "both", second, False),
            ]
            what = f"{metadata}, lease {lease_ms} ms, {first} and {second}"
            yield dict(metadata=metadata, lease_ms=lease_ms, members=members, what=what)
            number += 1

    def run(self):
        seconds = self.options.minutes * 60
        rounds = self.options.rounds or max(2, round(seconds / 180))
        plans = self.plans()
        for number in range(rounds):
            folder = os.path.join(self.folder, f"r{number}")
            os.mkdir(folder)
            made = Round(self, number, next(plans), folder)
            # What a round needs to come up, to calm down and to end.
            left = self.begin + seconds - time.monotonic()
            try:
                made.run(max(5, left / (rounds - number) - 22))
            finally:
                self.sum.update(made.totals())
                self.counts.update(made.counts)
                self.results.update(made.results)
        return self.report()

    def report(self):
        print(f"{time.monotonic() - self.begin:.0f} s, seed {self.options.seed}{', stock' if self.options.stock else ''}")
        print(f"{self.sum['calls']} calls, {self.sum['blocks']} blocks put or compared, {self.sum['bytes'] / 1e9:.1f} GB")
        for what, count in sorted(self.counts.items()):
            print(f"  {what}: {count}")
        if self.options.verbose:
            for what, count in sorted(self.results.items()):
                print(f"  {what}: {count}")
        print(f"findings {len(self.findings)}")
        if self.findings or self.options.keep:
            print(f"logs, faults and findings are in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        for kind, count in collections.Counter(finding["kind"] for finding in self.findings).items():
            print(f"  {kind}: {count}")
        return 1 if self.findings or not self.sum["bytes"] else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], prog="scripts/soak")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stock", action="store_true", help="without Tidepool: what Mooncake itself does")
    parser.add_argument("--kinds", help=f"what stores' memory is made of, from {','.join(KINDS)}; default: what this machine has")
    parser.add_argument("--metadata", choices=["P2PHANDSHAKE", "http", "master"], help="always this; default: in turn")
    parser.add_argument("--rounds", type=int, help="default: one for three minutes, two at least")
    parser.add_argument("--pause", type=float, default=0.7, help="seconds between faults on average")
    parser.add_argument("--keep", action="store_true", help="keep the logs in any case")
    parser.add_argument("--verbose", action="store_true", help="show how often each call gave each result")
    options = parser.parse_args()
    if options.kinds:
        options.kinds = options.kinds.split(",")
        if not set(options.kinds) <= set(KINDS):
            parser.error(f"--kinds: {','.join(KINDS)}")
    else:
        # Pages of the machine's pool are used if they are there: others may need it.
        pages = mounts.number(mounts.FREE) if os.geteuid() == 0 and os.path.exists(mounts.FREE) else 0
        options.kinds = [kind for kind in KINDS if kind != "hugetlbfs" or pages > 4 * SEGMENT // (2 * MIB)]
    # Nothing outlives this program, whoever ends it.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(Soak(options).run())


main()
