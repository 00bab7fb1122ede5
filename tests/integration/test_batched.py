"""With MC_STORE_BATCHED_GET and MC_STORE_BATCHED_PUT on, the batch calls pass the brackets and move what they moved before."""

import itertools
import os

import pytest
from harness import actions_store as actions

pytestmark = pytest.mark.wheels

SIZES = [1, 4096, 4097, 65537, (1 << 20) + 3]
GATHERS = {
    "get": "MC_STORE_BATCHED_GET: GPU copies of one call gather",
    "put": "MC_STORE_BATCHED_PUT: GPU copies of one call gather",
}
serial = itertools.count()


@pytest.fixture(scope="module")
def batched(wheel, shared):
    """An engine with both settings on, beside one without."""
    if shared.stock:
        pytest.skip("stock has no such settings")
    environment = shared.engine_environment(MC_STORE_BATCHED_GET="1", MC_STORE_BATCHED_PUT="1", TIDEPOOL_LOG="debug")
    made = shared.engine("batched", environment=environment)
    shared.warm(made)
    return made


def log_of(cluster, process):
    with open(os.path.join(cluster.folder, f"{process.name}.log")) as file:
        return file.read()


@pytest.mark.parametrize("get", ["batch_get_into", "batch_get_into_multi_buffers", "batch_get_buffer"])
@pytest.mark.parametrize("put", ["batch_put_from", "batch_put_from_multi_buffers", "batch_upsert_from"])
def test_same_results(shared, batched, put, get):
    if put not in actions.PUTS or get not in actions.GETS:
        pytest.fail(f"the harness does not know {put} or {get}")
    number = next(serial)
    keys = [f"batched-{number}-{index}" for index in range(len(SIZES))]
    before = shared.counters(batched)
    assert batched.call(actions.write_keys, keys=keys, sizes=SIZES, seed=number, way=put) == [0] * len(keys)
    got = batched.call(actions.read_keys, keys=keys, sizes=SIZES, seed=number, way=get)
    assert got == {"results": SIZES, "wrong": []}
    shared.assert_local(batched, before, written=sum(SIZES), read=sum(SIZES))
    log = log_of(shared, batched)
    assert GATHERS["get"] in log and GATHERS["put"] in log


def test_a_missing_key_has_its_own_result(shared, batched):
    """Results are Mooncake's, key by key."""
    keys = ["batched-there", "batched-missing", "batched-there-too"]
    sizes = [4096] * 3
    assert batched.call(actions.write_keys, keys=keys[::2], sizes=sizes[::2], seed=7) == [0, 0]
    got = batched.call(actions.read_keys, keys=keys, sizes=sizes, seed=7, way="batch_get_into")
    assert got["results"][0] == got["results"][2] == 4096 and got["results"][1] < 0


def test_not_taken_unless_asked_for(shared, batched):
    assert "gather" not in log_of(shared, shared.engine_process)
