"""mooncake_client under Mooncake's own modes, of which a program's are out of reach: what works does, and where one of the two
wins, one line says which."""

import pytest
from harness import actions_store as actions
from harness import mounts
from harness.cluster import MIB
from test_client import move
from test_ssd_tier import MASTER, OLD, SEGMENT, SIZE, disk, put_and_evict, settings  # noqa: F401 (disk is a fixture)

pytestmark = pytest.mark.stores

PINNED = {"MC_STORE_PIN_MEMORY_MAX_BYTES": str(64 * MIB)}
CPU = {"MC_TENT_PLATFORM": "cpu"}
CONTEXT = "cuDevicePrimaryCtxRetain"


def client(cluster, **more):
    """With what it says aloud beside Mooncake."""
    made = cluster.client(segment="64MB", environment={**cluster.store_environment(), **more})
    return made, made.warnings


@pytest.fixture
def gpus(newest):
    if newest.stock:
        pytest.skip("Tidepool's lines")
    newest.double = True
    return newest


def works(cluster):
    engine = cluster.engine()
    cluster.warm(engine)
    move(cluster, engine)


@pytest.mark.parametrize("where", ["memfd", "cumem"])
def test_mooncakes_own_shared_memory(gpus, where):
    gpus.use_segments(where)
    _, (line,) = client(gpus, MC_FORCE_SHM="1")
    assert "MC_FORCE_SHM: Mooncake's shared-memory transport does not reach a store's segments" in line
    works(gpus)


def test_pinned_segments_are_the_shared_ones(gpus):
    store, said = client(gpus, **PINNED)
    assert said == []
    assert "cudaHostRegister succeeded for Store segment" in store.log
    works(gpus)
    gpus.assert_no_rule_broken()


def test_pinning_wins_over_the_platform(gpus):
    store, (line,) = client(gpus, **PINNED, **CPU)
    assert "it wins over MC_TENT_PLATFORM=cpu" in line
    assert CONTEXT in gpus.driver_calls(store), "the line is wrong"
    works(gpus)


@pytest.mark.parametrize("platform", [{}, CPU], ids=["gpu", "cpu"])
def test_pinning_and_cuda_memory(gpus, platform):
    gpus.use_segments("cumem")
    store, (line,) = client(gpus, **PINNED, **platform)
    assert "segments of MC_STORE_CUMEM_SOCKET_DIR are pinned as they are" in line
    assert "cudaHostRegister failed for Store segment" in store.log and CONTEXT in gpus.driver_calls(store), "the line is wrong"
    works(gpus)


@pytest.mark.parametrize("where", ["memfd", "cumem"])
def test_the_platform_alone_makes_no_context(gpus, where):
    gpus.use_segments(where)
    store, said = client(gpus, **CPU)
    works(gpus)
    assert said == [] and CONTEXT not in gpus.driver_calls(store)


@pytest.mark.hugepages
@pytest.mark.parametrize("value", ["1", "0", ""], ids=["1", "0", "empty"])
def test_huge_pages_are_mooncakes(newest, value):
    """Mooncake looks whether the variable is there, not at its value."""
    with mounts.huge_pages(64):
        store, said = client(newest, MC_STORE_USE_HUGEPAGE=value)
        assert newest.stock or len(said) == 1 and "MC_STORE_USE_HUGEPAGE wins in this program" in said[0], said
        assert "Using hugepage size: 2MB" in store.log
        engine = newest.engine()
        assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
        assert engine.call(actions.read_keys, keys=["k"], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
        if not newest.stock:
            assert newest.counters(engine)["forward_bytes"] == 2 * MIB


@pytest.mark.hugepages
def test_what_it_reads_back_from_its_disk_is_shared_beside_huge_pages(newest, disk):  # noqa: F811
    with mounts.huge_pages(64):
        newest.start_master(*MASTER)
        environment = {**newest.store_environment(), **settings(disk), "MC_STORE_USE_HUGEPAGE": "1"}
        newest.client(segment="64MB", environment=environment, enable_offload="true")
        engine = newest.engine()
        put_and_evict(engine)
        for round_ in range(2):
            before = newest.counters(engine)
            got = engine.call(actions.read_keys, keys=OLD, sizes=[SIZE] * len(OLD), seed=1)
            assert got == {"results": [SIZE] * len(OLD), "wrong": []}
        newest.assert_local(engine, before, read=SIZE * len(OLD))
