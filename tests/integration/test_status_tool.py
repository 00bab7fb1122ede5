"""`tidepool status --json` says what the processes' own pages say."""

import json
import subprocess

import pytest
from harness import actions_engine, status
from harness import actions_store as actions
from harness.cluster import MIB
from harness.wheels import TOOL


def test_it_agrees_with_the_pages(shared):
    if shared.stock:
        pytest.skip("nothing to show")
    engine = shared.engine_process
    assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.read_keys, keys=["k"], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
    done = subprocess.run([TOOL, "status", shared.directory, "--json"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    processes = {process["pid"]: process for process in json.loads(done.stdout)["processes"]}
    assert set(processes) == {shared.store_process.pid, engine.pid}
    for process in (shared.store_process, engine):
        page = shared.counters(process)
        assert processes[process.pid]["counters"] == dict(page)
    (peer,) = processes[engine.pid]["peers"]
    assert peer["pieces"] == peer["pieces_mapped"] > 0
    assert peer["write_bytes"] >= MIB and peer["read_bytes"] >= MIB
    assert peer["name"] == processes[shared.store_process.pid]["name"] != ""
    (client,) = processes[shared.store_process.pid]["clients"]
    assert client["pid"] == engine.pid


def test_transfers_between_engines_are_told_from_others(shared):
    """Two transfer engines that move their own memory: the names whose requests fell back are known, and no alarm."""
    if shared.stock:
        pytest.skip("nothing to show")
    one, _ = shared.transfer_engine("one")
    other, name = shared.transfer_engine("other")
    address = other.call(actions_engine.register, name="there", size=MIB)
    one.call(actions_engine.register, name="here", size=MIB, seed=1)
    assert one.call(actions_engine.transfer, way="batch_sync", target=name, name="here", address=address, size=MIB, count=5) == 0

    def missed():
        done = subprocess.run([TOOL, "status", shared.directory, "--json"], capture_output=True, text=True, timeout=20)
        (shown,) = [process for process in json.loads(done.stdout)["processes"] if process["pid"] == one.pid]
        return shown["misses"]

    expected = [{"name": name, "target": "engine", "requests": 5, "bytes": MIB}]
    status.until(lambda: missed() == expected, lambda: f"{name} is shown: {missed()}")
