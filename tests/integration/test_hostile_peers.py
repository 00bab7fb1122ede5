"""Whatever arrives at a socket, or stands in the directory, costs its sender the connection and nobody else anything."""

import array
import os
import random
import socket
import struct
import threading
import time
from collections import Counter

import pytest
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB
from harness.process import open_files

WANT, SEGMENT, PIECES = 7, 6, 8
ATTACH = 1


@pytest.fixture
def pair(cluster):
    if cluster.stock:
        pytest.skip("there is no socket")
    cluster.store_process = cluster.store()
    cluster.engine_process = cluster.engine()
    cluster.warm(cluster.engine_process)
    (cluster.socket,) = [path for path in status.sockets(cluster.directory) if "/s-" in path]
    return cluster


def message(kind, body=b"", magic=status.MAGIC_WIRE, version=status.VERSION_WIRE):
    return (struct.pack("<IHH", magic, version, kind) + body).ljust(status.MESSAGE_BYTES, b"\0")


def identity(pid):
    """What a process of this host says of itself: learned from nothing but /proc and /etc."""
    boot = open("/proc/sys/kernel/random/boot_id").read().strip()
    try:
        machine = open("/etc/machine-id").read().strip()
    except OSError:
        machine = ""
    return f"{boot}:{machine}"


def attach():
    body = struct.pack("<IIQ", ATTACH, 0, 0) + os.urandom(16) + identity(os.getpid()).encode().ljust(96, b"\0")
    return message(status.HELLO, body + b"test".ljust(64, b"\0"))


def garbage(number):
    chance = random.Random(number)
    return [
        b"",
        b"x",
        os.urandom(7),
        os.urandom(status.MESSAGE_BYTES),
        os.urandom(status.MESSAGE_BYTES - 1),
        os.urandom(60000),
        message(status.HELLO, magic=0),
        message(status.HELLO, version=999),
        message(0),
        message(999),
        message(SEGMENT, os.urandom(56)),
        message(PIECES, os.urandom(16)),
        message(WANT, struct.pack("<QII", chance.getrandbits(64), 0, 0xFFFFFFFF)),
    ][number % 13]


def send_and_close(path, *packets, fds=()):
    try:
        with status.connect(path) as connection:
            for packet in packets:
                if fds:
                    rights = array.array("i", fds).tobytes()
                    connection.sendmsg([packet or b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                else:
                    connection.send(packet)
            connection.settimeout(0.05)
            try:
                while connection.recv(1024):
                    pass
            except OSError:
                pass
    except OSError:
        pass


def left_open(pid):
    """What the process has open that a client can have sent it or be: neither TCP sockets, nor event polls and timers, which
    Mooncake opens when it is busy or some seconds after its start."""
    tcp = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            tcp.update(f"socket:[{line.split()[9]}]" for line in list(file)[1:])
    return [target for target in open_files(pid) if target not in tcp and not target.startswith("anon_inode:")]


def under_fire(pair, attack, seconds=3.0, clients=1):
    """Run transfers while the attack goes on; all of them must be right, and the store must be as it was."""
    store = pair.store_process.pid
    before_fire = left_open(store)
    running = pair.engine_process.start(actions.hammer, key_prefix="h", size=MIB, seconds=seconds, seed=1)
    over = threading.Event()

    def repeat():
        number = 0
        while not over.is_set():
            attack(number)
            number += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        result = running.result(30)
    finally:
        over.set()
        thread.join(20)
    assert result["lies"] == 0
    assert result["good"] == result["count"] > 0
    before = pair.counters(pair.engine_process)
    assert pair.engine_process.call(actions.write_keys, keys=["after"], sizes=[MIB], seed=2) == [0]
    pair.assert_local(pair.engine_process, before, written=MIB)
    assert len(pair.counters(pair.store_process).clients) == clients

    def more():
        return sorted((Counter(left_open(store)) - Counter(before_fire)).elements())

    status.until(lambda: len(more()) <= clients, lambda: f"the store closes what it was sent: {more()}", 5)
    # A newcomer is still served.
    pair.warm(pair.engine("late"))


def test_garbage(pair):
    under_fire(pair, lambda number: send_and_close(pair.socket, garbage(number)))
    assert pair.counters(pair.store_process)["clients_misbehaved"] > 0


def test_garbage_after_a_right_greeting(pair):
    under_fire(pair, lambda number: send_and_close(pair.socket, attach(), garbage(number)))
    assert pair.counters(pair.store_process)["clients_misbehaved"] > 0


def test_fds_where_none_belong(pair):
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        under_fire(pair, lambda number: send_and_close(pair.socket, garbage(number), fds=[null] * (1 + number % 100)))
    finally:
        os.close(null)


def test_floods_of_connections(pair):
    """Hundreds of connections that say nothing, half a word, or do not read their answers."""

    def attack(number):
        held = []
        try:
            for index in range(150):
                connection = status.connect(pair.socket)
                held.append(connection)
                if index % 3 == 0:
                    connection.send(attach())
                if index % 3 == 1:
                    connection.send(b"half")
            time.sleep(0.2)
        except OSError:
            pass
        finally:
            for connection in held:
                connection.close()

    under_fire(pair, attack)


def test_a_client_that_asks_for_everything_and_reads_nothing(pair):
    with status.connect(pair.socket) as greedy:
        greedy.send(attach())
        greedy.settimeout(0.2)
        asked = 0
        try:
            for _ in range(100_000):
                greedy.send(message(WANT, struct.pack("<QII", 1, 0, 1)))
                asked += 1
        except OSError:
            pass
        assert asked < 100_000, "the store reads on without being read"
        under_fire(pair, lambda number: time.sleep(0.1), seconds=1, clients=2)
        status.until(
            lambda: len(pair.counters(pair.store_process).clients) == 2, "the greedy client is dropped", limit_s=15
        )


def fake_store(directory, behaviour):
    """A socket of the right name in the directory, whose owner is no store. Returns a function that ends it."""
    path = os.path.join(directory, f"s-{os.urandom(16).hex()}.sock")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(directory, os.O_PATH)
    server.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    os.close(folder)
    server.listen(16)
    server.settimeout(0.2)
    over = threading.Event()

    def serve():
        held = []
        while not over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                continue
            held.append(connection)
            try:
                behaviour(connection)
            except OSError:
                pass
        for connection in held:
            connection.close()
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()

    def end():
        over.set()
        thread.join(10)

    return end


def segment_of(base, size, pieces):
    return message(SEGMENT, struct.pack("<5Q2IQ", 1, base, size, 4096, size // pieces, pieces, 1, size))


BEHAVIOURS = {
    "says-nothing": lambda connection: None,
    "closes": lambda connection: connection.close(),
    "garbage": lambda connection: connection.send(os.urandom(512)),
    "short": lambda connection: connection.send(b"x"),
    "impossible-segment": lambda connection: [
        connection.send(message(2, os.urandom(16) + struct.pack("<IIQ", 1, 0, 0) + identity(0).encode())),
        connection.send(message(5, b"127.0.0.1:1")),
        connection.send(segment_of((1 << 64) - 4096, 1 << 40, 1 << 20)),
    ],
    "pieces-unasked": lambda connection: connection.sendmsg(
        [message(PIECES, struct.pack("<QII", 1, 0, 1))],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]).tobytes())],
    ),
}


@pytest.mark.parametrize("behaviour", sorted(BEHAVIOURS))
def test_a_false_store_in_the_directory(cluster, behaviour):
    if cluster.stock:
        pytest.skip("there is no directory")
    end = fake_store(cluster.directory, BEHAVIOURS[behaviour])
    try:
        store = cluster.store()
        engine = cluster.engine()
        cluster.warm(engine)
        before = cluster.counters(engine)
        assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
        assert engine.call(actions.read_keys, keys=["k"], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
        cluster.assert_local(engine, before, written=MIB, read=MIB)
        assert (engine.call(actions.close), store.call(actions.close)) == (0, 0)
        assert (engine.finish(), store.finish()) == (0, 0)
    finally:
        end()


@pytest.mark.parametrize("leftover", ["empty-file", "dangling-lock", "folder", "symlink"])
def test_leftovers_in_the_directory(cluster, leftover):
    if cluster.stock:
        pytest.skip("there is no directory")
    name = os.path.join(cluster.directory, f"s-{os.urandom(16).hex()}")
    outside = os.path.join(cluster.folder, "outside")
    with open(outside, "w") as file:
        file.write("kept")
    if leftover == "empty-file":
        open(f"{name}.sock", "w").close()
    elif leftover == "dangling-lock":
        open(f"{name}.lock", "w").close()
    elif leftover == "folder":
        os.mkdir(f"{name}.sock")
    else:
        os.symlink(outside, f"{name}.sock")
        os.symlink(outside, f"{name}.lock")
    cluster.store()
    engine = cluster.engine()
    cluster.warm(engine)
    with open(outside) as file:
        assert file.read() == "kept"
