"""C++ programs that use Mooncake's RealClient without python, as LMCache's multi-process server does: the wheel's own code,
loaded under another name by a program without an interpreter, is served in every role."""

import pytest
from harness import actions_store as actions
from harness import real_client, status
from harness.cluster import MIB

pytestmark = pytest.mark.stores

SIZES = [8, 4096, 65536, 3 * MIB, 20 * MIB]


@pytest.fixture
def program(cluster, tmp_path):
    return real_client.starter(cluster, tmp_path)


def until_used(cluster, one, stores=1):
    """Its first transfers make it attach; then every byte goes the short way."""
    if not cluster.stock:
        one.put([f"warm-{one.name}-{index}" for index in range(4 * stores)], SIZES, seed=9)
        status.until_attached(cluster.directory, one, stores)


def round_trip(engine):
    """One key of each size put and got; returns the keys."""
    keys = [f"key{index}" for index in range(len(SIZES))]
    assert engine.put(keys, SIZES, seed=1) == ["0"] * len(SIZES)
    assert engine.get(keys, SIZES, seed=1) == [f"{size} equal" for size in SIZES]
    return keys


@pytest.mark.wheels
@pytest.mark.parametrize("mode", ["memfd", "cumem"])
def test_store_and_engine(cluster, program, mode):
    cluster.use_segments(mode)
    store = program("cxx-store", cluster.store_environment(), 256 * MIB)
    engine = program("cxx-engine", cluster.engine_environment())
    until_used(cluster, engine)
    before = cluster.counters(engine)
    keys = round_trip(engine)
    assert engine.get(keys[:2], SIZES, seed=2) == [f"{size} other" for size in SIZES[:2]], "the comparison compares"
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES) + sum(SIZES[:2]))
    # What it wrote is what everybody gets.
    python = cluster.engine("python")
    cluster.warm(python)
    before = cluster.counters(python)
    assert python.call(actions.get_sizes, keys=keys, sizes=SIZES) == SIZES
    cluster.assert_local(python, before, read=sum(SIZES))
    assert (engine.close(), store.close()) == (0, 0)
    cluster.assert_no_rule_broken()
    if not cluster.stock:
        assert all("/s-" not in path for path in status.sockets(cluster.directory))


def test_with_mooncake_client(cluster, program):
    cluster.client()
    engine = program("cxx-engine", cluster.engine_environment())
    until_used(cluster, engine)
    before = cluster.counters(engine)
    round_trip(engine)
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
    assert engine.close() == 0


def test_store_and_engine_at_once(cluster, program):
    both = [program(f"cxx-{index}", cluster.both_environment(), 128 * MIB) for index in range(2)]
    for one in both:
        until_used(cluster, one)
    before = [cluster.counters(one) for one in both]
    for number, one in enumerate(both):
        for index in range(4):
            keys = [f"key{number}-{index}-{size}" for size in SIZES]
            assert one.put(keys, SIZES, seed=index) == ["0"] * len(SIZES)
            for reader in both:
                assert reader.get(keys, SIZES, seed=index) == [f"{size} equal" for size in SIZES]
    if not cluster.stock:
        for one, counted in zip(both, before):
            after = cluster.counters(one)
            assert after["local_read_bytes"] > counted["local_read_bytes"]
            assert after["forward_requests"] == counted["forward_requests"]
    assert [one.close() for one in both] == [0, 0]
