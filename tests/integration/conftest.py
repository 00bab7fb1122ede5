"""Fixtures: a cluster on each stock wheel that the test asks for."""

import os

import pytest
from harness import wheels
from harness.cluster import Cluster


def pytest_addoption(parser):
    parser.addoption("--wheel", action="append", choices=["cpu", "cuda13"], help="run on this wheel only")
    parser.addoption("--stock", action="store_true", help="without Tidepool: what does Mooncake itself do?")


def pytest_generate_tests(metafunc):
    """Tests run on the CPU wheel; those marked `wheels` on the CUDA wheel as well."""
    if "wheel" not in metafunc.fixturenames:
        return
    given = wheels.from_environment()
    if given is not None:
        chosen = [given]
    else:
        chosen = [wheels.CPU]
        if metafunc.definition.get_closest_marker("wheels"):
            chosen.append(wheels.CUDA13)
        only = metafunc.config.getoption("--wheel")
        if only:
            chosen = [wheel for wheel in chosen if wheel.name in only]
    metafunc.parametrize("wheel", chosen, ids=lambda wheel: wheel.name, scope="module")


def pytest_collection_modifyitems(items):
    """The pool of huge pages is the machine's. Tests that use it take turns: on one worker, so that none waits for another."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.get_closest_marker("hugepages") or "hugetlbfs" in parameters:
            item.add_marker(pytest.mark.xdist_group("hugepages"))
            item.add_marker(pytest.mark.timeout(180))


def usable(wheel):
    if not wheel.present:
        pytest.fail(f"no Mooncake wheel in {wheel.venv}: run scripts/setup")
    if not wheels.LIBRARY.exists():
        pytest.fail(f"{wheels.LIBRARY} is missing: run scripts/setup")
    return wheel


@pytest.fixture
def cluster(wheel, tmp_path, request):
    """A cluster of this test's own; it may kill what it likes."""
    with Cluster(usable(wheel), tmp_path, stock=request.config.getoption("--stock")) as made:
        yield made


@pytest.fixture
def newest(tmp_path, request):
    """The same on the newest wheel only, for what older ones do not have."""
    with Cluster(usable(wheels.CUDA13), tmp_path, stock=request.config.getoption("--stock")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(wheel, tmp_path_factory, request):
    """One store and one engine for all tests of a file that leave them as they were."""
    stock = request.config.getoption("--stock")
    with Cluster(usable(wheel), tmp_path_factory.mktemp("cluster"), stock=stock) as made:
        made.store_process = made.store(segment_bytes=1 << 30)
        made.engine_process = made.engine()
        made.warm(made.engine_process)
        yield made


@pytest.fixture(scope="session", autouse=True)
def no_sanitizer_surprises():
    # Child processes say what they do; the tests' own interpreter never carries the library.
    assert "libtidepool" not in os.environ.get("LD_PRELOAD", "")
