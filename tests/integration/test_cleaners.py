"""Claim: a store whose directory somebody removes (cleaners of /tmp and /run) keeps its engines, is back within seconds, and is
found by new engines and by `tidepool status`.
"""

import os
import shutil

import pytest
from harness import actions_store as actions
from harness import status


def shown(cluster):
    """What there is to see; while the directory is away, nothing."""
    try:
        return set(status.read(cluster.directory))
    except FileNotFoundError:
        return set()


def test_a_removed_directory_comes_back_with_all_who_were_in_it(cluster):
    if cluster.stock:
        pytest.skip("Mooncake has no such directory")
    store, engine = cluster.store(), cluster.engine()
    cluster.warm(engine)
    before = cluster.counters(engine)
    os.chmod(cluster.directory, 0o711)
    shutil.rmtree(cluster.directory)
    status.until(lambda: shown(cluster) >= {store.pid, engine.pid}, "both are there again")
    assert os.stat(cluster.directory).st_mode & 0o7777 == 0o711
    assert len(status.names(cluster.directory)) == 4
    late = cluster.engine("late")
    cluster.warm(late)
    assert engine.call(actions.write_keys, keys=["one", "two"], sizes=[8192] * 2, seed=1) == [0, 0]
    cluster.assert_local(engine, before, written=2 * 8192)
    assert cluster.counters(engine)["peers_attached"] == before["peers_attached"]
    for process in (store, engine):
        assert len([line for line in process.tidepool_lines if "put back" in line]) == 1
