"""A process that closes its store and opens another shares the new one's memory, and nothing of the old one is left."""

import pytest
from harness import actions_process
from harness import actions_store as actions
from harness import status
from harness.cluster import MIB

SIZES = [1, 65537, 17 * MIB]


def shared_mappings(process):
    """Those of segments: the library itself, its counters and its lease page stay."""
    names = process.call(actions_process.mapped_files)
    return [name for name in names if "tidepool" in name and not any(word in name for word in ("libtidepool", "stats", "lease"))]


@pytest.mark.wheels
@pytest.mark.timeout(180)
def test_close_and_setup_in_one_process(cluster):
    store = cluster.store()
    for round_ in range(2):
        engine = cluster.engine(f"engine{round_}")
        cluster.warm(engine)
        before = cluster.counters(engine)
        keys = [f"{round_}-{size}" for size in SIZES]
        assert engine.call(actions.write_keys, keys=keys, sizes=SIZES, seed=round_) == [0, 0, 0]
        assert engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=round_) == {"results": SIZES, "wrong": []}
        cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
        assert (engine.call(actions.close), engine.finish()) == (0, 0)
        if not cluster.stock:
            assert shared_mappings(store) != []
        assert store.call(actions.close) == 0
        if not cluster.stock:
            # The memory is the kernel's again: neither mapped nor held by an fd.
            status.until(lambda: shared_mappings(store) == [], lambda: f"no mapping: {shared_mappings(store)}", 5)
            assert cluster.counters(store).segments == []
        if round_ == 0:
            cluster.set_up(store, segment_bytes=256 * MIB, local_bytes=16 * MIB)
    assert store.finish() == 0
