"""Few file descriptors (ulimit -n): wherever stock Mooncake works, its process works with Tidepool too, which stays off with
one line where there are too few for both."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import actions_store as actions
from harness.cluster import MIB, Cluster
from harness.process import CallFailed, CallTooLong, ProcessEnded

pytestmark = [pytest.mark.stores, pytest.mark.timeout(180)]

# From what stock just works with to what is enough for both.
LIMITS = [26, 30, 40, 56, 72]
SIZES = [65536] * 4


def works(cluster, process, limit, segment_bytes):
    keys = [f"{process.name}-{index}" for index in range(len(SIZES))]
    try:
        process.call(actions.limit_files, count=limit)
        setup = dict(master=cluster.master_address, segment_bytes=segment_bytes, local_bytes=16 * MIB)
        if process.call(actions.setup, **setup) != 0:
            return False
        written = process.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1)
        read = process.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1)
    except (CallFailed, CallTooLong, ProcessEnded):
        return False
    return written == [0] * len(SIZES) and read == {"results": SIZES, "wrong": []}


def try_one(wheel, folder, stock, role, limit):
    """Does it work, and what has Tidepool said? In a cluster of its own, where nobody's death is in the way."""
    folder.mkdir()
    with Cluster(wheel, folder, stock=stock) as cluster:
        cluster.start_master()
        if role != "store":
            cluster.store("plenty", segment_bytes=64 * MIB)
        environment = getattr(cluster, f"{role}_environment")()
        process = cluster.process(role, {} if stock else environment)
        return works(cluster, process, limit, 0 if role == "engine" else 16 * MIB), process.warnings


@pytest.mark.parametrize("role", ["store", "engine", "both"])
def test_what_works_without_works_with(wheel, tmp_path, request, role):
    stock = request.config.getoption("--stock")

    def drive(limit):
        well, said = try_one(wheel, tmp_path / str(limit), stock, role, limit)
        if not well and not stock:
            assert not try_one(wheel, tmp_path / f"stock-{limit}", True, role, limit)[0], f"stock works with {limit}: {said}"
        return well, said

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(drive, LIMITS))
    assert all(well for well, _ in results[1:]), "too few for Mooncake alone: the test shows little"
    for limit, (well, said) in zip(LIMITS, results):
        assert len(said) == (1 if well and limit <= 40 and not stock else 0) or limit == 56, (limit, said)
        assert all("ulimit -n" in line and "runs as stock" in line for line in said)
