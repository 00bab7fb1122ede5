"""Who may use a store's memory: root, the store's own user, and users that are listed; others go by stock."""

import os

import pytest
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB

NOBODY = 65534


@pytest.fixture
def open_directory(cluster):
    """A directory that every user can enter, so that only the store's own check is between them."""
    if cluster.stock:
        pytest.skip("there is no shared memory")
    cluster.directory = cluster.common_directory()
    return cluster


def put(cluster, engine, key):
    assert engine.call(actions.write_keys, keys=[key], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.read_keys, keys=[key], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}


def engine_of(cluster, user, **extra):
    made = cluster.process(f"engine-{user}", cluster.engine_environment(**extra), user)
    cluster.set_up(made, segment_bytes=0, local_bytes=64 * MIB)
    return made


def test_another_user_is_refused_and_works_as_stock(open_directory):
    store = open_directory.store()
    engine = engine_of(open_directory, NOBODY)
    for index in range(3):
        put(open_directory, engine, f"k{index}")
    assert open_directory.counters(store).clients == []
    assert any("denied" in line.lower() or "TIDEPOOL_ALLOW_UIDS" in line for line in engine.tidepool_lines)


def test_the_store_itself_refuses_another_user(open_directory):
    """Also where a socket's mode lets everybody connect."""
    store = open_directory.store()
    for path in status.sockets(open_directory.directory):
        os.chmod(path, 0o777)
    engine = engine_of(open_directory, NOBODY)
    for index in range(3):
        put(open_directory, engine, f"k{index}")
    counters = open_directory.counters(store)
    assert counters.clients == []
    assert counters["clients_refused"] >= 1


def test_a_listed_user_is_served(open_directory):
    open_directory.store(environment=open_directory.store_environment(TIDEPOOL_ALLOW_UIDS=str(NOBODY)))
    engine = engine_of(open_directory, NOBODY)
    put(open_directory, engine, "k")
    # An engine of another user cannot bind its own socket here, so its store tells how much it was given.
    store = open_directory.processes[0]
    status.until(lambda: open_directory.counters(store).clients, "the store has a client")
    assert open_directory.counters(store).clients[0]["uid"] == NOBODY
    assert open_directory.counters(store)["clients_refused"] == 0


def test_a_store_of_an_untrusted_user_is_not_used(open_directory):
    """A store of somebody else could lie about its contents; root's engine leaves it alone."""
    os.chown(open_directory.directory, NOBODY, NOBODY)
    open_directory.start_master()
    store = open_directory.process("store", open_directory.store_environment(), NOBODY)
    open_directory.set_up(store, segment_bytes=256 * MIB, local_bytes=16 * MIB)
    engine = open_directory.engine()
    for index in range(3):
        put(open_directory, engine, f"k{index}")
    assert open_directory.counters(store).clients == []
