"""A process with several clients shares its memory under the right name, and says what it cannot share."""

import json
import subprocess

import pytest
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB
from harness.wheels import TOOL

SIZES = [1, 65537, 3 * MIB]


def read_from_outside(cluster, process, engine, key):
    """What `process` has put into its own store is read by another process through shared memory."""
    keys = [f"{key}-{size}" for size in SIZES]
    assert process.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1) == [0, 0, 0]
    before = cluster.counters(engine)
    assert engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}
    return before


@pytest.mark.parametrize("order", ["client-last", "client-first"])
def test_a_store_and_a_client_in_one_process(cluster, order):
    cluster.start_master()
    process = cluster.process("store", cluster.store_environment())
    if order == "client-first":
        cluster.set_up(process, local_bytes=16 * MIB)
        process.call(actions.set_aside)
    cluster.set_up(process, segment_bytes=128 * MIB, local_bytes=16 * MIB)
    if order == "client-last":
        process.call(actions.set_aside)
        cluster.set_up(process, local_bytes=16 * MIB)
    engine = cluster.engine()
    cluster.warm(engine)
    before = read_from_outside(cluster, process, engine, order)
    cluster.assert_local(engine, before, read=sum(SIZES))


def test_two_stores_in_one_process(cluster):
    """One of them has the name; when it closes, the other one gets it."""
    if cluster.stock:
        pytest.skip("Tidepool's names")
    cluster.start_master()
    process = cluster.process("store", cluster.store_environment())
    cluster.set_up(process, segment_bytes=64 * MIB, local_bytes=16 * MIB)
    first = cluster.counters(process).name
    process.call(actions.set_aside)
    cluster.set_up(process, segment_bytes=64 * MIB, local_bytes=16 * MIB)
    assert len([line for line in process.tidepool_lines if "2 stores with memory" in line]) == 1
    engine = cluster.engine()

    def known():
        return [peer["name"] for peer in cluster.counters(engine).peers]

    status.until(lambda: len(known()) == 1, known)
    assert known() != [first]
    assert process.call(actions.close) == 0
    status.until(lambda: known() == [first], known)
    process.call(actions.take_back)
    before = read_from_outside(cluster, process, engine, "left")
    cluster.assert_local(engine, before, read=sum(SIZES))
    assert (process.call(actions.close), engine.call(actions.close)) == (0, 0)
    assert (process.finish(), engine.finish()) == (0, 0)


@pytest.mark.wheels
def test_a_store_on_an_engine_of_another_module(cluster):
    """setup(engine=...): engine.so has made the engine, and the store's module publishes memory on it."""
    cluster.start_master()
    process = cluster.process("store", cluster.store_environment())
    assert process.call(actions.setup_on_engine, master=cluster.master_address, segment_bytes=128 * MIB) == 0
    engine = cluster.engine()
    cluster.warm(engine)
    before = read_from_outside(cluster, process, engine, "key")
    cluster.assert_local(engine, before, read=sum(SIZES))
    assert process.warnings == []
    assert (process.call(actions.close), engine.call(actions.close)) == (0, 0)


def status_json(cluster):
    done = subprocess.run([TOOL, "status", cluster.directory, "--json"], capture_output=True, text=True, timeout=20)
    return json.loads(done.stdout)


def test_the_one_of_three_stores_that_is_reached(cluster):
    """The line and `tidepool status` name the one whose name is told."""
    if cluster.stock:
        pytest.skip("Tidepool's names")
    cluster.start_master()
    process = cluster.process("store", cluster.store_environment())
    names = []
    for number in range(1, 4):
        cluster.set_up(process, segment_bytes=32 * MIB, local_bytes=16 * MIB)
        if number < 3:
            process.call(actions.set_aside, name=f"store{number}")
        names.append(cluster.counters(process).name)
        lines = [line for line in process.warnings if "stores with memory" in line]
        assert len(lines) == number - 1
        if number > 1:
            assert f"{number} stores with memory: engines reach {names[-1]} through" in lines[-1]
    assert len(set(names)) == 3
    (shown,) = status_json(cluster)["processes"]
    assert (shown["name"], shown["conditions"]) == (names[-1], ["several_stores"])
    # The last closes, then one more: the line says who is reached now, and with one left nothing is wrong.
    assert process.call(actions.close) == 0
    left = cluster.counters(process).name
    assert left in names[:2] and f"2 stores with memory: engines reach {left} through" in process.warnings[-1]
    process.call(actions.take_back, name=f"store{names.index(left) + 1}")
    assert process.call(actions.close) == 0
    (shown,) = status_json(cluster)["processes"]
    assert (shown["name"], shown["conditions"]) == (names[1 - names.index(left)], [])


@pytest.mark.wheels
def test_an_engine_that_lends_memory_and_is_no_store(cluster):
    """What inference engines do by default is said in their log and by `tidepool status`, with the cure."""
    if cluster.stock:
        pytest.skip("Tidepool's lines")
    cluster.store(segment_bytes=64 * MIB)
    lends = cluster.process("lends", cluster.engine_environment())
    cluster.set_up(lends, segment_bytes=64 * MIB, local_bytes=16 * MIB)
    cached = cluster.engine("cached", {**cluster.engine_environment(), "MC_STORE_LOCAL_HOT_CACHE_SIZE": str(32 * MIB)})
    (line,) = lends.warnings
    assert "lends 64 MiB to Mooncake's store but is set up as an engine only" in line and "segment size of 0" in line
    assert cached.warnings == []
    report = status_json(cluster)
    assert {process["pid"]: process["conditions"] for process in report["processes"] if process["conditions"]} == {
        lends.pid: ["lends_unshared"]
    }
    assert [reason for reason in report["reasons"] if f"pid {lends.pid}" in reason and "segment size of 0" in reason]
    # Both halves are the cure.
    both = cluster.process("both", cluster.both_environment())
    cluster.set_up(both, segment_bytes=64 * MIB, local_bytes=16 * MIB)
    assert both.warnings == []
