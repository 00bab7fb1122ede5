"""A store that is killed and started again under its old name while the master still speaks of its old memory: a running
engine never gets the bytes of the new memory for the old, and uses the new store without being started again.
"""

import contextlib
import ctypes
import http.server
import os
import threading
import time

import pytest
from harness import actions_store as actions
from harness import machine, status
from harness.cluster import MIB
from harness.ports import free_port
from harness.preloads import ALLOCATOR, compiled

pytestmark = [pytest.mark.stores]

SEGMENT = 256 * MIB
KEYS, SIZE = 32, 2 * MIB
FORGOTTEN_S = 6
ADDR_NO_RANDOMIZE = 0x0040000  # sys/personality.h
OLD = [f"old{index}" for index in range(KEYS)]


class Metadata(http.server.BaseHTTPRequestHandler):
    """Keeps what it is told, also a name that is there already, as etcd does. (Mooncake's own server refuses that.)"""

    kept: dict

    def answer(self, code, body=b""):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        body = self.kept.get(self.path)
        self.answer(404 if body is None else 200, body or b"metadata not found")

    def do_PUT(self):
        self.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200)

    def do_DELETE(self):
        self.answer(200 if self.kept.pop(self.path, None) is not None else 404)

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    handler = type("Kept", (Metadata,), {"kept": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"metadata": f"http://127.0.0.1:{server.server_port}/metadata"}
        server.shutdown()


@contextlib.contextmanager
def addresses_that_come_back():
    """Processes that are started here have their memory where the one before had it (store_at)."""
    personality = ctypes.CDLL(None).personality
    before = personality(ctypes.c_ulong(0xFFFFFFFF))
    personality(ctypes.c_ulong(before | ADDR_NO_RANDOMIZE))
    try:
        yield
    finally:
        personality(ctypes.c_ulong(before))


def store_at(cluster, place, name, same, **more):
    """Tidepool looks that this does not happen: an allocator before it chooses the addresses, and their record is gone."""
    environment = cluster.store_environment()
    if same and not cluster.stock:
        environment["LD_PRELOAD"] = f"{compiled(cluster, 'allocator', ALLOCATOR)}:{environment['LD_PRELOAD']}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{cluster.directory}/addresses")
    with addresses_that_come_back() if same else contextlib.nullcontext():
        return cluster.store(name, environment=environment, host=place, segment_bytes=SEGMENT, **more)


def segments(cluster, store):
    return [(segment["base"], segment["base"] + segment["bytes"]) for segment in status.of(cluster.directory, store).segments]


def overlap(one, other):
    return any(a < d and c < b for a, b in one for c, d in other)


def old_gets(engine):
    """Gets of the old keys; none may succeed with other bytes."""
    got = engine.call(actions.read_keys, keys=OLD, sizes=[SIZE] * KEYS, seed=1)
    assert not [index for index in got["wrong"] if got["results"][index] >= 0], got


def puts(cluster, engine, reader, prefix):
    """What is reported as stored can be read by somebody who has never known the old store."""
    keys = [f"{prefix}{index}" for index in range(4)]
    results = engine.call(actions.write_keys, keys=keys, sizes=[SIZE] * len(keys), seed=2)
    for index, key in enumerate(keys):
        if results[index] == 0:
            assert reader.call(actions.read_keys, keys=[key], sizes=[SIZE], seed=2 + index) == {"results": [SIZE], "wrong": []}
    return results


@pytest.mark.parametrize("where", ["at the same addresses", "elsewhere"])
def test_old_memory_is_never_answered_with_new(cluster, metadata, where):
    """At the same addresses the engine then gets what a stock one gets, which has the dead store's port in its cache: -800.
    Elsewhere it is better off than that."""
    same = where == "at the same addresses"
    cluster.start_master("-client_ttl", str(FORGOTTEN_S))
    name = f"127.0.0.1:{free_port()}"
    store = store_at(cluster, name, "store", same, **metadata)
    engine = cluster.engine(host=f"127.0.0.1:{free_port()}", **metadata)
    reader = cluster.engine("reader", environment={}, host=f"127.0.0.1:{free_port()}", **metadata)
    cluster.warm(engine)
    assert engine.call(actions.write_keys, keys=OLD, sizes=[SIZE] * KEYS, seed=1) == [0] * KEYS
    before = [] if cluster.stock else segments(cluster, store)
    store.kill()
    killed = time.monotonic()
    fresh = store_at(cluster, name, "fresh", same, **metadata)
    if not cluster.stock:
        assert overlap(before, segments(cluster, fresh)) == same, "or this test shows nothing"
        status.until(lambda: cluster.counters(engine)["peers_attached"] == 2, "the engine knows the new store")
    for number in range(2):
        old_gets(engine)
        puts(cluster, engine, reader, f"new{number}-")
    while machine.ran_s(killed) < FORGOTTEN_S + 2:
        time.sleep(0.1)
    old_gets(engine)
    local = 0 if cluster.stock else cluster.counters(engine)["local_write_bytes"]
    results = puts(cluster, engine, reader, "after")
    assert results == [-800 if same or cluster.stock else 0] * 4
    if not cluster.stock:
        assert (cluster.counters(engine)["local_write_bytes"] > local) != same
        assert ("an earlier instance of this name" in engine.log) == same
