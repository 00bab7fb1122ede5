"""Mooncake's local hot cache (MC_STORE_LOCAL_HOT_CACHE_SIZE) works in a process with a store half as it does without
Tidepool: the memory that it registers stays Mooncake's, and engines are told of segments only."""

import pytest
from harness import actions_store as actions
from harness.cluster import MIB
from test_allocators import ALLOCATORS

pytestmark = pytest.mark.stores

SEGMENT = 64 * MIB
SIZES = [4096, 65537, 3 * MIB]
KEYS = ["a", "b", "c"]
# Blocks of 16 MiB: malloc's address is not a multiple of a page, tcmalloc's is, and the third form is a memfd.
FORMS = {"malloc": {}, "tcmalloc": {}, "shm": {"MC_STORE_LOCAL_HOT_CACHE_USE_SHM": "1"}}


@pytest.mark.wheels
@pytest.mark.parametrize("form", FORMS)
def test_a_store_with_a_hot_cache(cluster, form):
    environment = {**cluster.both_environment(), **FORMS[form], "MC_STORE_LOCAL_HOT_CACHE_SIZE": str(48 * MIB)}
    if form == "tcmalloc":
        if ALLOCATORS[form] is None:
            pytest.skip("no tcmalloc on this machine")
        environment["LD_PRELOAD"] = ":".join(filter(None, [environment.get("LD_PRELOAD"), ALLOCATORS[form]]))
    cached = cluster.store(segment_bytes=SEGMENT, environment=environment)
    assert "transfer engine registered=on" in cached.log
    assert not [line for line in cached.log.splitlines() if "Failed to" in line and "hot cache" in line]
    other = cluster.engine()
    assert other.call(actions.write_keys, keys=KEYS, sizes=SIZES, seed=1) == [0, 0, 0]
    # The first reads fill the cache, later ones are served by it.
    for process in (cached, cached, cached, other):
        assert process.call(actions.read_keys, keys=KEYS, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}
    if not cluster.stock:
        assert [segment["bytes"] for segment in cluster.counters(cached).segments] == [SEGMENT]
        assert cached.warnings == []
        (line,) = [line for line in cached.tidepool_lines if "hot cache" in line]
        assert "] info: 48 MiB at" in line
    assert (cached.call(actions.close), cached.finish()) == (0, 0)
