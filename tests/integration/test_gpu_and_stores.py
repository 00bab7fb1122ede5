"""Engines with GPUs and stores of other memory than CUDA's: what an engine has registered of a dead store's huge pages, or stages
copies of, it lets go within a second; and what a store reads back from its disk goes to GPUs the short way.
"""

import time

import pytest
from harness import actions_double, mounts, status
from harness import actions_store as actions
from harness.cluster import MIB
from harness.wheels import ROOT
from test_ssd_tier import OLD, SEGMENT, SIZE, disk, put_and_evict, store_with_disk  # noqa: F401 (disk is a fixture)

pytestmark = pytest.mark.stores


def engine_with_gpu(cluster, **shm):
    """On the double of the CUDA libraries."""
    cluster.double = True
    base = {"enable": True, "socket_dir": cluster.directory, "copy_engine": "dma"}
    environment = cluster.engine_environment({"transports": {"shm": {**base, **shm}}})
    return cluster.engine(environment={**environment, "PYTHONPATH": str(ROOT / "tests" / "fakecuda")})


@pytest.mark.hugepages
@pytest.mark.parametrize("limit", [0, "8M"], ids=["registered", "staged"])
def test_a_dead_stores_pages_come_back(newest, limit):
    if newest.stock:
        pytest.skip("nothing of Mooncake's own lies on hugetlbfs")
    with mounts.segment_folder("hugetlbfs", SEGMENT // MIB) as where:
        pages = mounts.number(mounts.FREE)
        newest.use_segments(where)
        store = newest.store(segment_bytes=SEGMENT)
        engine = engine_with_gpu(newest, register_peer_memory=True, register_max_bytes=limit)
        newest.warm(engine)
        assert mounts.number(mounts.FREE) == pages - SEGMENT // (2 * MIB)
        running = engine.start(actions_double.device_hammer, key_prefix="a", size=6 * MIB + 4097, seconds=2.5, seed=1)
        way = "staged_bytes" if limit else "register_hits"
        status.until(lambda: newest.counters(engine)[way] > (12 * MIB if limit else 4), lambda: newest.counters(engine), 20)
        assert newest.counters(engine)["registered_bytes"] > 0
        store.popen.kill()
        killed = time.monotonic()
        status.until(lambda: mounts.number(mounts.FREE) == pages, lambda: f"{mounts.number(mounts.FREE)} of {pages} are free", 1.0)
        print(f"free after {time.monotonic() - killed:.3f} s")
        result = running.result(30)
        assert result["lies"] == 0 and result["good"] > 1
        after = newest.counters(engine)
        assert after["registered_bytes"] == 0 and after["register_failures"] == 0
        newest.assert_no_rule_broken()


@pytest.mark.parametrize("mode, registered", [("memfd", True), ("cumem", False)])
def test_what_lies_on_disk_goes_to_gpus(newest, disk, mode, registered):  # noqa: F811
    newest.use_segments(mode)
    newest.double = True
    store_with_disk(newest, disk)
    engine = engine_with_gpu(newest, register_peer_memory=registered)
    put_and_evict(engine)
    if not newest.stock:
        status.until_attached(newest.directory, engine)
    # The first copy readies the GPU.
    assert engine.call(actions_double.device_read, keys=OLD, size=SIZE, seed=1)
    before = newest.counters(engine)
    assert engine.call(actions_double.device_read, keys=OLD, size=SIZE, seed=1)
    newest.assert_local(engine, before, read=SIZE * len(OLD))
    if not newest.stock:
        assert newest.counters(engine)["dma_bytes"] - before["dma_bytes"] >= SIZE * len(OLD)
    newest.assert_no_rule_broken()
