# SPDX-License-Identifier: Apache-2.0
"""For the tests of the tools: running them, and processes to look at, honest and hostile."""

import array
import fcntl
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TIDEPOOL_BUILD", ROOT / "build")).resolve()
TOOL = BUILD / "tidepool"
LIBRARY = BUILD / "libtidepool.so"
TEST_PROCESS = BUILD / "tests" / "tools" / "tool-test-process"

# What segment/wire.h and env/stats.h say, a second time: a test that shared the headers could not see them change.
MESSAGE_BYTES = 512
MAGIC = 0x4C504454
HELLO, WELCOME, REFUSED, PAGE = 1, 2, 3, 4
PAGE_MAGIC = 0x3153544154535054
COUNTERS_AT = 8 + 4 + 4 + 16 + 4 + 4 + 8 + 4 + 4 + 16 + 64 + 64 + 128
SEGMENT = struct.Struct("<II4QII64s")
CLIENT = struct.Struct("<IIiIQ")
PEER = struct.Struct("<4I2QQ16s128s128s")
EVENT = struct.Struct("<Q248s")
SEGMENTS_AT = COUNTERS_AT + 128 * 8
CLIENTS_AT = SEGMENTS_AT + 64 * SEGMENT.size
PEERS_AT = CLIENTS_AT + 64 * CLIENT.size
EVENTS_AT = PEERS_AT + 64 * PEER.size
MISSES_AT = EVENTS_AT + 16 * EVENT.size
MISS = struct.Struct("<II2Q128s")
CONDITIONS_AT = MISSES_AT + 64 * MISS.size
PAGE_BYTES = CONDITIONS_AT + 8
UNNAMED, SEVERAL_STORES, LENDS_UNSHARED = 1, 2, 4
STORE, ENGINE = 1, 2
LIVE = 2


def clean_environment(**extra):
    """This environment without settings of Tidepool and Mooncake; values of None are left out."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MC_", "TIDEPOOL_", "MOONCAKE_", "LD_"))
    }
    return {**kept, **{name: value for name, value in extra.items() if value is not None}}


def tidepool(*arguments, tool=TOOL, timeout=20, cwd=None, user=None, input=None, **environment):
    return subprocess.run(
        [str(tool), *map(str, arguments)],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        cwd=cwd,
        user=user,
        input=input,
    )


def status_json(directory, **environment):
    """(exit status, the report)"""
    result = tidepool("status", directory, "--json", **environment)
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def counter_names():
    text = (ROOT / "env" / "counters.def").read_text()
    return [line.split('"')[1] for line in text.splitlines() if line.startswith("TP_COUNTER(")]


def page(roles=ENGINE, name=b"", program=b"test", pid=None, counters=None, segments=(), clients=(), peers=(), events=(), misses=(), **header):
    """The bytes of a page of counters."""
    raw = bytearray(header.get("bytes", PAGE_BYTES))
    struct.pack_into(
        "<QII16siIQII16s64s64s128s",
        raw,
        0,
        header.get("magic", PAGE_MAGIC),
        header.get("version", 2),
        header.get("size", PAGE_BYTES),
        header.get("instance", b"\x11" * 16),
        os.getpid() if pid is None else pid,
        os.getuid(),
        int(time.time()) - header.get("age", 100),
        roles,
        len(counter_names()),
        header.get("library_version", b"0.1.0"),
        program,
        header.get("hostname", b"testhost"),
        name,
    )
    names = counter_names()
    for counter, value in (counters or {}).items():
        struct.pack_into("<Q", raw, COUNTERS_AT + 8 * names.index(counter), value)
    for at, layout, rows in (
        (SEGMENTS_AT, SEGMENT, segments),
        (CLIENTS_AT, CLIENT, clients),
        (PEERS_AT, PEER, peers),
        (EVENTS_AT, EVENT, events),
        (MISSES_AT, MISS, misses),
    ):
        for index, row in enumerate(rows):
            layout.pack_into(raw, at + index * layout.size, *row)
    struct.pack_into("<I", raw, CONDITIONS_AT, header.get("conditions", 0))
    return bytes(raw)


def segment_row(size=1 << 30, state=LIVE, detail=b"memfd, THP"):
    return (state, 1, 0x7F0000000000, size, 4096, 2 << 30, 1, 1, detail)


def peer_row(name=b"10.0.0.1:15000", state=LIVE, path=b"shared memory (memfd)", read=0, write=0, pieces=1, mapped=1):
    return (state, pieces, mapped, 1, read, write, int(time.time()), b"\x22" * 16, name, path)


def miss_row(name, requests=7, size=4096):
    return (LIVE, 0, requests, size, name)


def client_row(age=100):
    return (LIVE, os.getuid(), 4711, 1, int(time.time()) - age)


def sealed(raw):
    """A memfd as the library makes it."""
    fd = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, raw)
    fcntl.fcntl(fd, 1033, 0x0002 | 0x0004)  # F_ADD_SEALS: SHRINK, GROW
    return fd


def message(kind, body=b"", magic=MAGIC, version=2):
    return (struct.pack("<IHH", magic, version, kind) + body).ljust(MESSAGE_BYTES, b"\0")


def refused(text):
    return message(REFUSED, struct.pack("<II", 1, 0) + text[:256])


def send(connection, data, fds=()):
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], control, socket.MSG_NOSIGNAL)


class FakeProcess:
    """An entry in a directory whose server is this test: `answer(connection)` runs for every connection after its HELLO."""

    def __init__(self, directory, kind="e", answer=None, raw=None, lock=True):
        self.id = secrets.token_hex(16)
        self.directory, self.kind = str(directory), kind
        self.fd = None if raw is None else sealed(raw)
        self.answer = answer or self.send_page
        self.lock = os.open(f"{self.directory}/{kind}-{self.id}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC) if lock else None
        if lock:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.bind(f"{self.directory}/{kind}-{self.id}.sock")
        self.socket.listen(64)
        self.hellos = []
        self.open = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def send_page(self, connection):
        send(connection, message(WELCOME, b"\x11" * 16))
        send(connection, message(PAGE), [self.fd])
        connection.close()

    def serve(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.open.append(connection)
            try:
                self.hellos.append(connection.recv(4096))
                self.answer(connection)
            except OSError:
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(5)
        for connection in self.open:
            connection.close()
        for fd in (self.fd, self.lock):
            if fd is not None:
                os.close(fd)


class RealProcess:
    """The library's own server in a process of its own."""

    def __init__(self, directory, kind):
        directory = str(directory)
        if kind == "store":
            settings = {"MC_STORE_SHM_SEGMENT_DIR": "memfd", "TIDEPOOL_SOCKET_DIR": directory}
        else:
            settings = {"MC_TENT_CONF": json.dumps({"transports": {"shm": {"enable": True, "socket_dir": directory}}})}
        self.process = subprocess.Popen(
            [TEST_PROCESS, kind], env=clean_environment(**settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout.readline() == b"ready\n"
        self.pid = self.process.pid

    def stop(self):
        """SIGSTOP, until every thread has stopped: the server's may be slow to on a busy machine."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        deadline = time.monotonic() + 10
        while any(" T " not in (task / "stat").read_text() for task in tasks.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()
