"""Dummy clients, whose transfers mooncake_client does for them, work as before, with the library in either process or in
both; and what they put is what engines get the short way."""

import pytest
from harness import actions_store as actions
from harness.cluster import MIB
from harness.mounts import segment_folder

pytestmark = pytest.mark.stores

SIZES = [1, 4096, 65537, 3 * MIB]
KEYS = [f"key{index}" for index in range(len(SIZES))]


def dummy(cluster, client, environment):
    made = cluster.process("dummy", environment)
    assert made.call(actions.setup_dummy, server=f"127.0.0.1:{client.port}") == 0, made.log
    return made


def exchange(cluster, made, engine):
    """What the dummy puts an engine gets, the short way; and what the engine puts, the dummy."""
    assert made.call(actions.write_plain, keys=KEYS, sizes=SIZES, seed=1) == [0] * len(KEYS)
    before = cluster.counters(engine)
    assert engine.call(actions.read_keys, keys=KEYS, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}
    cluster.assert_local(engine, before, read=sum(SIZES))
    theirs = [f"engine-{key}" for key in KEYS]
    assert engine.call(actions.write_keys, keys=theirs, sizes=SIZES, seed=2) == [0] * len(KEYS)
    assert made.call(actions.read_plain, keys=theirs, sizes=SIZES, seed=2) == []


@pytest.mark.wheels
@pytest.mark.parametrize("loaded", [True, False], ids=["tidepool", "plain"])
def test_what_a_dummy_puts_engines_get(cluster, loaded):
    client = cluster.client()
    made = dummy(cluster, client, cluster.engine_environment() if loaded else {})
    engine = cluster.engine()
    cluster.warm(engine)
    exchange(cluster, made, engine)
    assert made.call(actions.close) == 0
    assert made.finish() == 0
    assert client.terminate() == 143


@pytest.mark.parametrize("mode", ["tmpfs", "hugetlbfs", "cumem"])
def test_whatever_segments_are_made_of(newest, mode):
    with segment_folder(mode, 64) as where:
        newest.use_segments(where)
        client = newest.client(segment="64MB")
        made = dummy(newest, client, {})
        engine = newest.engine()
        newest.warm(engine)
        exchange(newest, made, engine)
        assert (made.call(actions.close), made.finish(), client.terminate()) == (0, 0, 143)
        newest.assert_no_rule_broken()


def test_a_dummy_of_one_reads_what_lies_in_another(cluster):
    """mooncake_client's own transfers cannot be taken: they stay Mooncake's, and right."""
    both = cluster.both_environment()
    near, far = cluster.client("near", environment=both, segment="64MB"), cluster.client("far", environment=both, segment="64MB")
    made = dummy(cluster, near, {})
    keys = [f"k{index}" for index in range(64)]
    sizes = [65537] * len(keys)
    assert made.call(actions.write_plain, keys=keys, sizes=sizes, seed=5) == [0] * len(keys)
    assert made.call(actions.read_plain, keys=keys, sizes=sizes, seed=5) == []
    if not cluster.stock:
        # They were spread over both, and nobody claims to have carried what it did not.
        assert [cluster.counters(store)["local_write_bytes"] for store in (near, far)] == [0, 0]
        assert [cluster.counters(store).roles for store in (near, far)] == [1, 1]


def test_a_dummy_ends_while_others_work(cluster):
    client = cluster.client()
    made = dummy(cluster, client, {})
    assert made.call(actions.write_plain, keys=["k"], sizes=[MIB], seed=5) == [0]
    engine = cluster.engine()
    cluster.warm(engine)
    running = engine.start(actions.hammer, key_prefix="a", size=MIB, seconds=1.5, seed=1)
    made.kill()
    result = running.result(20)
    assert result["lies"] == 0 and result["good"] == result["count"] > 0
    assert client.popen.poll() is None
