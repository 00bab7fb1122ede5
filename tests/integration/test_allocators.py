"""Beside other preloaded allocators, in either order, and under a sanitizer that checks who frees what."""

import glob

import pytest
from harness import actions_store as actions
from harness.cluster import MIB
from harness.wheels import LIBRARY


def find(*patterns):
    for pattern in patterns:
        found = sorted(glob.glob(f"/usr/lib/x86_64-linux-gnu/{pattern}"))
        if found:
            return found[0]
    return None


ALLOCATORS = {
    "jemalloc": find("libjemalloc.so.2"),
    "tcmalloc": find("libtcmalloc_minimal.so.4*", "libtcmalloc.so.4*"),
}


@pytest.mark.parametrize("first", [True, False], ids=["tidepool-first", "tidepool-last"])
@pytest.mark.parametrize("allocator", sorted(ALLOCATORS))
def test_put_get_and_close(cluster, allocator, first):
    other = ALLOCATORS[allocator]
    if other is None:
        pytest.skip(f"no {allocator} on this machine")
    preload = f"{LIBRARY}:{other}" if first else f"{other}:{LIBRARY}"
    alone = {"LD_PRELOAD": other}
    store = cluster.store(environment=cluster.store_environment(LD_PRELOAD=preload) or alone)
    engine = cluster.engine(environment=cluster.engine_environment(LD_PRELOAD=preload) or alone)
    cluster.warm(engine)
    sizes = [1, 65537, 17 * MIB]
    keys = ["a", "b", "c"]
    for round_ in range(3):
        before = cluster.counters(engine)
        assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=round_) == [0, 0, 0]
        assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=round_) == {"results": sizes, "wrong": []}
        cluster.assert_local(engine, before, written=sum(sizes), read=sum(sizes))
        engine.call(actions.remove_all)
    assert (engine.call(actions.close), store.call(actions.close)) == (0, 0)
    assert (engine.finish(), store.finish()) == (0, 0)


def test_memory_is_freed_by_the_allocator_that_made_it(cluster):
    """AddressSanitizer ends the process when memory of one operator new goes to another's delete, or is used after."""
    sanitizer = find("libasan.so.8", "libasan.so.6")
    if sanitizer is None or cluster.stock:
        pytest.skip("no AddressSanitizer, or nothing of ours to check")
    # What python and Mooncake do not free at exit is theirs.
    extra = {"LD_PRELOAD": f"{sanitizer}:{LIBRARY}", "ASAN_OPTIONS": "detect_leaks=0"}
    store = cluster.store(segment_bytes=64 * MIB, environment=cluster.store_environment(**extra))
    engine = cluster.engine(environment=cluster.engine_environment(**extra), local_bytes=32 * MIB)
    cluster.warm(engine)
    sizes = [1, 65537, 3 * MIB]
    for way in ("batch_put_from", "put_parts"):
        keys = [f"{way}-{size}" for size in sizes]
        assert engine.call(actions.write_keys, keys=keys, sizes=sizes, seed=1, way=way) == [0, 0, 0]
        assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=1) == {"results": sizes, "wrong": []}
    # Ranges: the vector that grows in the module's own memory.
    assert engine.call(actions.read_keys, keys=keys, sizes=sizes, seed=1, way="get_into_ranges")["wrong"] == []
    assert "AddressSanitizer" not in engine.log + store.log
