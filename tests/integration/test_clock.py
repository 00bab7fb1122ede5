"""The time of day jumps, forwards and backwards, for Tidepool in stores and engines: nothing of it waits longer or shorter.
Mooncake's own waits depend on the time of day, so it goes on seeing the right one."""

import itertools
import os
import signal
import struct
import threading
import time

import pytest
from harness import actions_store as actions
from harness import machine, mounts, status
from harness.cluster import FORGETTING, FORGOTTEN_S, MIB
from harness.wheels import BUILD

pytestmark = [pytest.mark.stores, pytest.mark.timeout(90)]

DAY = 86400
CLOCK = BUILD / "tests" / "clock" / "libclock.so"


class Clock:
    def __init__(self, path):
        self.path = str(path)
        self.set(0)

    def set(self, seconds):
        """In place: processes have the file mapped."""
        with open(self.path, "r+b" if os.path.exists(self.path) else "wb") as file:
            file.write(struct.pack("<q", seconds))

    def jumping(self):
        """A day forwards, a day backwards, four times a second, until the event is set."""
        stop = threading.Event()

        def jump():
            for seconds in itertools.cycle((DAY, -DAY, 0)):
                if stop.wait(0.25):
                    break
                self.set(seconds)
            self.set(0)

        threading.Thread(target=jump, daemon=True).start()
        return stop


@pytest.fixture
def clock(cluster, tmp_path):
    return Clock(tmp_path / "clock")


def wrong(cluster, clock, environment, **extra):
    preload = ":".join(filter(None, [str(CLOCK), environment.get("LD_PRELOAD")]))
    return {**environment, "LD_PRELOAD": preload, "CLOCK_AT": clock.path, **extra}


def test_transfers_and_comings_and_goings(cluster, clock):
    cluster.start_master(*FORGETTING)
    store = cluster.store(environment=wrong(cluster, clock, cluster.store_environment()))
    engine = cluster.engine(environment=wrong(cluster, clock, cluster.engine_environment()))
    cluster.warm(engine)
    stop = clock.jumping()
    before = cluster.counters(engine)
    result = engine.call(actions.hammer, key_prefix="a", size=MIB, seconds=2, seed=1)
    assert result["lies"] == 0 and result["good"] == result["count"] > 20, result
    assert machine.longest_s(result) < 1
    cluster.assert_local(engine, before, written=result["count"] * MIB, read=result["count"] * MIB)
    store.kill()
    if not cluster.stock:
        status.until(lambda: not cluster.counters(engine).peers, "it lets go of the dead store", 1.5)
    fresh = cluster.store("fresh", environment=wrong(cluster, clock, cluster.store_environment()))
    if not cluster.stock:
        status.until(lambda: cluster.counters(engine).peers, "it finds the new one", 3)
    late = cluster.engine("late", environment=wrong(cluster, clock, cluster.engine_environment()))
    machine.sleep(FORGOTTEN_S)  # the master's time, until it has forgotten the dead one
    for user in (engine, late):
        cluster.warm(user)
        assert user.call(actions.read_keys, keys=[f"warm-{user.name}-0"], sizes=[4096], seed=1) == {
            "results": [4096],
            "wrong": [],
        }
    stop.set()
    assert [process.finish() for process in (late, engine, fresh)] == [0, 0, 0]


def test_a_wait_for_room_takes_its_time(cluster, clock):
    """MC_STORE_SHM_SEGMENT_WAIT_S is in seconds that pass."""
    if cluster.stock:
        pytest.skip("stock does not wait")
    cluster.start_master()
    with mounts.mounted("tmpfs", "mode=0700,size=64m") as where:
        with open(f"{where}/other", "wb") as other:
            os.posix_fallocate(other.fileno(), 0, 48 * MIB)
            stop = clock.jumping()
            settings = dict(MC_STORE_SHM_SEGMENT_DIR=where, MC_STORE_SHM_SEGMENT_WAIT_S="3")
            store = cluster.process("store", wrong(cluster, clock, cluster.store_environment(**settings)))
            start = time.monotonic()
            result = store.call(actions.setup, master=cluster.master_address, segment_bytes=32 * MIB, local_bytes=16 * MIB)
            assert result != 0
            assert time.monotonic() - start >= 3 and machine.ran_s(start) < 6
            stop.set()
        assert "others still hold" in store.warnings[-1]


def test_a_stopped_engine_is_not_forgotten(cluster, clock):
    """A store that stands still over a jump, and goes on."""
    store = cluster.store(environment=wrong(cluster, clock, cluster.store_environment()))
    engine = cluster.engine(environment=wrong(cluster, clock, cluster.engine_environment()))
    cluster.warm(engine)
    for seconds in (7 * DAY, -7 * DAY):
        store.signal(signal.SIGSTOP)
        engine.signal(signal.SIGSTOP)
        clock.set(seconds)
        time.sleep(0.2)
        engine.signal(signal.SIGCONT)
        store.signal(signal.SIGCONT)
        before = cluster.counters(engine)
        key = f"after{seconds}"
        assert engine.call(actions.write_keys, keys=[key], sizes=[MIB], seed=1) == [0]
        assert engine.call(actions.read_keys, keys=[key], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
        cluster.assert_local(engine, before, written=MIB, read=MIB)
    if not cluster.stock:
        assert len(cluster.counters(store).clients) == 1
