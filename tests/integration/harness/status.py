"""The counters of the processes of a directory, read from outside: a small independent reader of the page that
each process hands out on its socket (segment/wire.h, env/stats.h). That `tidepool status` says the same is a test
of its own.
"""

import array
import mmap
import os
import re
import socket
import struct
import time

from . import machine
from .wheels import ROOT

MAGIC_WIRE, VERSION_WIRE, MESSAGE_BYTES = 0x4C504454, 2, 512
HELLO, PAGE, STATUS_PURPOSE = 1, 4, 2
MAGIC_PAGE = 0x3153544154535054
COUNTERS_AT = 8 + 4 + 4 + 16 + 4 + 4 + 8 + 4 + 4 + 16 + 64 + 64 + 128
SEGMENTS_AT = COUNTERS_AT + 128 * 8
SEGMENT = struct.Struct("<II4QII64s")
CLIENT = struct.Struct("<IIiIQ")
PEER = struct.Struct("<4I2QQ16s128s128s")
CLIENTS_AT = SEGMENTS_AT + 64 * SEGMENT.size
PEERS_AT = CLIENTS_AT + 64 * CLIENT.size
LIVE = 2


def counter_names():
    text = (ROOT / "env" / "counters.def").read_text()
    return re.findall(r'^TP_COUNTER\(\w+, "(\w+)"', text, re.M)


class ProcessStatus(dict):
    """Counters by name, and segments, clients and peers that are there now."""

    def __init__(self, page):
        magic, self.version = struct.unpack_from("<QI", page, 0)
        assert magic == MAGIC_PAGE, f"not a page of counters: {magic:#x}"
        self.pid, self.uid = struct.unpack_from("<iI", page, 32)
        (self.roles,) = struct.unpack_from("<I", page, 48)
        names = counter_names()
        super().__init__(zip(names, struct.unpack_from(f"<{len(names)}Q", page, COUNTERS_AT)))
        name_at = 56 + 16 + 64 + 64
        self.name = text(page[name_at : name_at + 128])
        self.segments = [
            dict(base=s[2], bytes=s[3], pieces=s[6], nodes=s[7], detail=text(s[8]))
            for s in entries(page, SEGMENT, SEGMENTS_AT)
        ]
        self.clients = [dict(uid=c[1], pid=c[2], pieces=c[3]) for c in entries(page, CLIENT, CLIENTS_AT)]
        self.peers = [
            dict(pieces=p[1], pieces_mapped=p[2], segments=p[3], read=p[4], write=p[5], name=text(p[8]), path=text(p[9]))
            for p in entries(page, PEER, PEERS_AT)
        ]


def text(raw):
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def entries(page, layout, offset):
    found = (layout.unpack_from(page, offset + index * layout.size) for index in range(64))
    return [entry for entry in found if entry[0] == LIVE]


def hello(purpose=STATUS_PURPOSE):
    body = struct.pack("<IIQ", purpose, 0, 0)
    return (struct.pack("<IHH", MAGIC_WIRE, VERSION_WIRE, HELLO) + body).ljust(MESSAGE_BYTES, b"\0")


def connect(path, limit_s=0.5):
    """Connect to a socket of the directory, whatever its path's length."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.settimeout(limit_s)
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        return connection
    finally:
        os.close(folder)


def read_socket(path):
    with connect(path) as connection:
        connection.send(hello())
        while True:
            message, control, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(16 * 4))
            if len(message) != MESSAGE_BYTES:
                raise ConnectionError(f"{path}: {len(message)} bytes instead of its counters")
            fds = array.array("i")
            for _, _, data in control:
                fds.frombytes(data[: len(data) // 4 * 4])
            try:
                if struct.unpack_from("<H", message, 6)[0] == PAGE and fds:
                    with mmap.mmap(fds[0], 0, prot=mmap.PROT_READ) as page:
                        return ProcessStatus(page[:])
            finally:
                for fd in fds:
                    os.close(fd)


def names(directory):
    """What processes have put there, without the record of addresses, which stays."""
    return sorted(name for name in os.listdir(directory) if name != "addresses")


def sockets(directory):
    return sorted(
        os.path.join(directory, entry)
        for entry in os.listdir(directory)
        if re.fullmatch(r"[se]-[0-9a-f]{32}\.sock", entry)
    )


def read(directory):
    """The status of every process of the directory that answers, by pid."""
    found = {}
    for path in sockets(directory):
        try:
            status = read_socket(path)
        except OSError:
            continue
        found[status.pid] = status
    return found


def of(directory, process):
    status = read(directory).get(process.pid)
    assert status is not None, f"{process.name} (pid {process.pid}) does not answer in {directory}: {os.listdir(directory)}"
    return status


def until(condition, what, limit_s=10.0):
    start = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        assert machine.ran_s(start) < limit_s, f"not within {limit_s} s: {what() if callable(what) else what}"
        time.sleep(0.02)


def until_attached(directory, process, peers=1, limit_s=10.0):
    """Until every piece of memory of that many stores is mapped by this engine."""

    def attached():
        status = read(directory).get(process.pid)
        if status is None:
            return False
        whole = [peer for peer in status.peers if peer["pieces"] and peer["pieces_mapped"] == peer["pieces"]]
        return len(whole) >= peers

    until(attached, f"{process.name} has attached {peers} store(s)", limit_s)
