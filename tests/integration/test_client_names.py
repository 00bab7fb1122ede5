"""The name by which peers open mooncake_client is learned, however it was told what it is: an engine finds it by that
name, and its bytes go the short way."""

import pytest
from harness import actions_store as actions
from harness.cluster import MIB, free_port

pytestmark = pytest.mark.stores


def served(cluster, store, engine):
    cluster.warm(engine)
    before = cluster.counters(engine)
    assert engine.call(actions.write_keys, keys=["k"], sizes=[MIB], seed=1) == [0]
    assert engine.call(actions.read_keys, keys=["k"], sizes=[MIB], seed=1) == {"results": [MIB], "wrong": []}
    cluster.assert_local(engine, before, written=MIB, read=MIB)
    name = engine.call(actions.replicas, key="k")[0]["transport_endpoint"]
    if not cluster.stock:
        assert cluster.counters(store).name == name
    return name


@pytest.fixture
def http(cluster):
    port = free_port()
    cluster.start_master(
        "-enable_http_metadata_server=true", "-http_metadata_server_host=127.0.0.1", f"-http_metadata_server_port={port}"
    )
    return {"metadata": f"http://127.0.0.1:{port}/metadata"}


@pytest.mark.wheels
def test_http_metadata(cluster, http):
    """Without a port Mooncake reserves one, and names itself by it."""
    store = cluster.client(**http)
    served(cluster, store, cluster.engine(**http))


def test_http_metadata_in_a_range_of_ports_of_ones_own(cluster, http):
    low = free_port() & ~63
    ports = {"MC_STORE_CLIENT_MIN_PORT": str(low), "MC_STORE_CLIENT_MAX_PORT": str(low + 60)}
    store = cluster.client(environment=cluster.store_environment(**ports) or ports, **http)
    served(cluster, store, cluster.engine(**http))


def test_http_metadata_and_a_port(cluster, http):
    host = f"127.0.0.1:{free_port()}"
    store = cluster.client(host=host, **http)
    assert served(cluster, store, cluster.engine(**http)) == host


def test_a_port_that_the_handshake_does_not_use(cluster):
    given = free_port()
    store = cluster.client(host=f"localhost:{given}")
    name = served(cluster, store, cluster.engine())
    assert name.startswith("localhost:") and name != f"localhost:{given}"


def test_no_host_at_all(cluster):
    """The flag's default, which nobody gave on the command line."""
    store = cluster.client(host=None)
    assert served(cluster, store, cluster.engine()).startswith("0.0.0.0:")


def test_flags_in_a_file_and_in_the_environment(cluster, tmp_path):
    file = tmp_path / "flags"
    file.write_text("--host=localhost\n")
    fromenv = {"FLAGS_metadata_server": "P2PHANDSHAKE"}
    store = cluster.client(
        environment=cluster.store_environment(**fromenv) or fromenv,
        host=None, metadata=None, flagfile=file, fromenv="metadata_server",
    )
    assert served(cluster, store, cluster.engine()).startswith("localhost:")


def test_ipv6(cluster):
    v6 = {"MC_USE_IPV6": "1"}
    store = cluster.client(environment=cluster.store_environment(**v6) or v6, host="::1")
    engine = cluster.engine(environment=cluster.engine_environment(**v6) or v6, host="[::1]")
    assert served(cluster, store, engine).startswith("::1:")


def test_ipv6_and_http_metadata(cluster, http):
    v6 = {"MC_USE_IPV6": "1"}
    store = cluster.client(environment=cluster.store_environment(**v6) or v6, host="::1", **http)
    engine = cluster.engine(environment=cluster.engine_environment(**v6) or v6, host="[::1]", **http)
    assert served(cluster, store, engine).startswith("[::1]:")
