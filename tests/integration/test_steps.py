"""Processes that end or stop at each step of the protocol: nobody else is hurt, hangs or has to be restarted."""

import signal

import pytest
from harness import actions_store as actions
from harness import machine, status
from harness.cluster import FORGETTING, MIB
from harness.process import open_files
from harness.wheels import BUILD

STEPS = BUILD / "tests" / "steps" / "libsteps.so"
# What each half does for the first peer that it meets, in order (tests/steps/steps.c has the meaning of the words).
STORE = ["bind:1", "accept:1", "receive:1", "send:1", "sent:1", "sent:2", "sent:3", "receive:2", "send:4", "sent:4"]
ENGINE = ["connect:1", "send:1", "sent:1", "receive:1", "receive:2", "receive:3", "sent:2", "receive:4"]
STOCK_RETRY_S = 2.5


@pytest.fixture
def pair(cluster):
    if cluster.stock:
        pytest.skip("Tidepool's protocol")
    cluster.start_master(*FORGETTING)
    cluster.store_process = cluster.store("survivor-store")
    cluster.engine_process = cluster.engine("survivor-engine")
    cluster.warm(cluster.engine_process)
    return cluster


def victims(cluster, role, steps, number):
    """Processes that meet their end in the middle of their setup, all at once."""
    make = cluster.store_environment if role == "store" else cluster.engine_environment
    pieces = {"MC_STORE_CUMEM_PIECE_BYTES": str(MIB)} if role == "store" else {}
    started = []
    for step in steps:
        environment = make(LD_PRELOAD=f"{STEPS}:{cluster.preload}", STEPS_AT=f"{step}:{int(number)}", **pieces)
        victim = cluster.process(f"{role}-{step.replace(':', '-')}", environment)
        size = 16 * MIB if role == "store" else 0
        victim.setup = victim.start(actions.setup, master=cluster.master_address, segment_bytes=size, local_bytes=16 * MIB)
        started.append(victim)
    return started


def state(process):
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def until_in_state(processes, wanted):
    def others():
        return [process.name for process in processes if state(process) != wanted]

    status.until(lambda: not others(), others, 30)


def served_as_before(cluster, fds):
    """The survivors hold nothing of the dead, and newcomers are served."""
    engine, store = cluster.engine_process, cluster.store_process

    def held():
        return {process.name: len(process_fds(process)) - fds[process] for process in (engine, store)}

    status.until(lambda: len(cluster.counters(engine).peers) == 1, "the engine knows the one store that lives", 5)
    status.until(lambda: max(held().values()) <= 2, held, 5)
    # Mooncake goes on to place objects on stores that are dead until their time to live is over.
    keys = [f"after-{index}" for index in range(24)]

    def all_written():
        results = engine.call(actions.write_keys, keys=keys, sizes=[4096] * len(keys), seed=1)
        engine.call(actions.remove_all)
        return not any(results)

    status.until(all_written, "Mooncake forgets the dead", 20)
    cluster.warm(cluster.engine("late"))


def process_fds(process):
    """What Tidepool may leak. Mooncake's own fds come and go."""
    unix = {line.split()[6] for line in open("/proc/net/unix").read().splitlines()[1:]}
    return [link for link in open_files(process.pid) if "memfd:" in link or (link.startswith("socket:[") and link[8:-1] in unix)]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", ["store", "engine"])
def test_killed(pair, role):
    fds = {process: len(process_fds(process)) for process in (pair.engine_process, pair.store_process)}
    dying = victims(pair, role, STORE if role == "store" else ENGINE, signal.SIGKILL)
    running = pair.engine_process.start(actions.hammer, key_prefix="k", size=MIB, seconds=6, seed=1, every_s=0.01)
    for victim in dying:
        assert victim.popen.wait(30) == -signal.SIGKILL, f"{victim.name} did not come to its step\n{victim.log[-2000:]}"
    result = running.result(60)
    assert result["lies"] == 0
    assert machine.longest_s(result) < STOCK_RETRY_S
    if role == "engine":
        assert result["good"] == result["count"] > 0, result
    served_as_before(pair, fds)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("role", ["store", "engine"])
def test_stopped(pair, role):
    """For longer than a greeting may take, then set going again: all find together."""
    stopped = victims(pair, role, STORE if role == "store" else ENGINE, signal.SIGSTOP)
    until_in_state(stopped, "T")
    engine = pair.engine_process
    if role == "engine":
        # Stock transfers to a store that stands still wait for it, so nothing is moved while stores do.
        result = engine.call(actions.hammer, key_prefix="s", size=MIB, seconds=3, seed=1, every_s=0.01)
        assert result["lies"] == 0 and result["good"] == result["count"] > 0
        assert machine.longest_s(result) < 1
    for victim in stopped:
        victim.signal(signal.SIGCONT)
    assert [victim.setup.result(30) for victim in stopped] == [0] * len(stopped)
    if role == "store":
        status.until_attached(pair.directory, engine, 1 + len(stopped), 20)
    else:
        for victim in stopped:
            status.until_attached(pair.directory, victim, 1, 20)
            assert victim.call(actions.write_keys, keys=[victim.name], sizes=[MIB], seed=2) == [0]
