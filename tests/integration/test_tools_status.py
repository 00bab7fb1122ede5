# SPDX-License-Identifier: Apache-2.0
"""`tidepool status` says at a glance whether it works, finds the dead and the stopped, and believes nobody."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import time

import pytest
from harness import machine
from harness import status as shared
from tools_support import (
    ENGINE,
    LENDS_UNSHARED,
    LIVE,
    MAGIC,
    PAGE,
    PAGE_BYTES,
    SEVERAL_STORES,
    STORE,
    TOOL,
    UNNAMED,
    WELCOME,
    FakeProcess,
    RealProcess,
    clean_environment,
    client_row,
    counter_names,
    message,
    miss_row,
    page,
    peer_row,
    refused,
    sealed,
    segment_row,
    send,
    status_json,
    tidepool,
)

GIB = 1 << 30
LIMIT_S = 4  # it waits for one second; the rest is for machines that are busy with other tests


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    return path


def store_page(**more):
    return page(**{"roles": STORE, "name": b"10.0.0.1:15000", "segments": [segment_row()], **more})


def engine_page(**more):
    return page(**{"roles": ENGINE, "name": b"10.0.0.1:16000", "peers": [peer_row()], **more})


def first_line(directory):
    result = tidepool("status", directory)
    return result.returncode, result.stdout.splitlines()[0]


# ---- what there is


def test_nothing_there(directory):
    code, line = first_line(directory)
    assert code == 1 and line == f"NOTHING: no Tidepool process has an entry in {directory}"
    code, report = status_json(directory)
    assert code == 1 and report["verdict"] == "empty" and report["processes"] == []


def test_all_is_well(directory):
    counters = {"local_read_bytes": 8 * GIB, "local_write_bytes": 4 * GIB + 3 * GIB // 10}
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=engine_page(counters=counters)):
        with FakeProcess(directory, raw=engine_page()):
            assert first_line(directory) == (
                0,
                "OK: 1 store, 2 engines attached, 12.3 GiB through shared memory, 0 B left to Mooncake",
            )


def test_an_engine_that_is_still_importing_is_attached(directory):
    importing = [peer_row(state=1, pieces=32, mapped=16)]
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=engine_page(peers=importing)):
        assert first_line(directory) == (
            0,
            "OK: 1 store, 1 engine attached (importing 16/32 pieces), 0 B through shared memory, 0 B left to Mooncake",
        )
        assert ": importing 16/32 pieces, read" in tidepool("status", directory).stdout


def test_real_processes_are_shown_as_they_are(directory):
    with RealProcess(directory, "store") as store, RealProcess(directory, "engine") as engine:
        code, report = status_json(directory)
        shown = {process["pid"]: process for process in report["processes"]}
        assert set(shown) == {store.pid, engine.pid}
        assert shown[store.pid]["roles"] == ["store"] and shown[engine.pid]["roles"] == ["engine"]
        assert shown[store.pid]["name"] == "test-store:1"
        assert shown[store.pid]["uid"] == os.getuid() and shown[store.pid]["own_pid"] == store.pid
        assert [segment["bytes"] for segment in shown[store.pid]["segments"]] == [8 << 20]
        assert shown[engine.pid]["counters"]["local_read_bytes"] == 3 * GIB
        assert "started for a test" in [event["text"] for event in shown[store.pid]["events"]]
        assert report["totals"]["stores"] == 1 and report["totals"]["engines"] == 1
        assert code == 0 and report["totals"]["attached_engines"] == 0
        text = tidepool("status", directory).stdout
        assert "test-store:1" in text and "publishes 8.0 MiB" in text and "started for a test" in text


def test_every_counter_is_in_the_json(directory):
    counters = {name: index + 1 for index, name in enumerate(counter_names())}
    with FakeProcess(directory, raw=engine_page(counters=counters)):
        _, report = status_json(directory)
    assert report["processes"][0]["counters"] == counters


def test_the_hello_is_for_status_only(directory):
    with FakeProcess(directory, raw=engine_page()) as process:
        status_json(directory)
        assert len(process.hellos) == 1 and len(process.hellos[0]) == 512
        assert process.hellos[0][8:12] == (2).to_bytes(4, "little")


def test_a_process_with_both_sockets_is_shown_once(directory):
    both = store_page(roles=STORE | ENGINE)
    with FakeProcess(directory, "s", raw=both) as process:
        twin = f"{directory}/e-{process.id}.sock"
        os.link(f"{directory}/s-{process.id}.sock", twin)
        _, report = status_json(directory)
        assert len(report["processes"]) == 1 and report["processes"][0]["roles"] == ["store", "engine"]
        assert report["totals"]["stores"] == report["totals"]["engines"] == 1


def test_an_engine_that_could_lend_memory_but_does_not_is_no_store(directory):
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=engine_page(roles=STORE | ENGINE)):
        code, report = status_json(directory)
        assert code == 0
        assert [process["roles"] for process in report["processes"]] == [["store"], ["engine"]]


# ---- what needs attention


@pytest.mark.parametrize(
    "counter", ["copy_failed", "fallback_unknown_layout", "fallback_bad_request", "peers_refused", "fallback_device_memory"]
)
def test_counters_that_are_alarms(directory, counter):
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=engine_page(counters={counter: 7})):
        code, line = first_line(directory)
        assert code == 1 and line.startswith("ATTENTION: engine 10.0.0.1:16000") and ": 7 " in line


@pytest.mark.parametrize("counter", ["fallback_no_peer", "fallback_not_imported", "fallback_peer_gone", "peers_lost"])
def test_ordinary_fallbacks_are_shown_but_no_alarm(directory, counter):
    raw = engine_page(counters={counter: 7, "forward_bytes": 4096})
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=raw):
        result = tidepool("status", directory)
        assert result.returncode == 0 and "4.0 KiB left to Mooncake" in result.stdout.splitlines()[0]
        assert ("left to Mooncake 7 requests" in result.stdout) == counter.startswith("fallback")


@pytest.mark.parametrize("calls", [0, 7])
def test_calls_in_parts_are_shown_where_there_are_some(directory, calls):
    raw = engine_page(counters={"calls_divided": calls})
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=raw):
        result = tidepool("status", directory)
    assert result.returncode == 0
    assert ("    7 batched calls that several threads carried out in parts\n" in result.stdout) == (calls == 7)


STORE_NAME = b"10.0.0.1:15000"


def fell_back(directory, store, engine):
    """The reasons, and the misses by name, of an engine whose requests for these names fell back."""
    with FakeProcess(directory, "s", raw=store), FakeProcess(directory, raw=engine):
        code, report = status_json(directory)
        text = tidepool("status", directory).stdout
    (shown,) = [process for process in report["processes"] if process["roles"] == ["engine"]]
    assert (code == 1) == bool(report["reasons"])
    return report["reasons"], {miss["name"]: miss for miss in shown["misses"]}, text


def test_requests_for_a_store_of_this_directory_that_fell_back(directory):
    elsewhere = [peer_row(name=b"10.0.0.1:15001")]
    engine = engine_page(peers=elsewhere, misses=[miss_row(STORE_NAME)], counters={"fallback_no_peer": 7})
    (reason,), misses, text = fell_back(directory, store_page(), engine)
    assert reason.startswith("engine 10.0.0.1:16000") and ": 7 requests for the store 10.0.0.1:15000 of this directory" in reason
    assert "it is not attached" in reason
    assert misses == {"10.0.0.1:15000": {"name": "10.0.0.1:15000", "target": "store", "requests": 7, "bytes": 4096}}
    assert "of these 7, 4.0 KiB, for 10.0.0.1:15000: a store in this directory\n" in text


def test_two_stores_of_one_name(directory):
    engine = engine_page(peers=[peer_row(name=b"10.0.0.1:15001")], misses=[miss_row(STORE_NAME)])
    with FakeProcess(directory, "s", raw=store_page()):
        (reason,), _, _ = fell_back(directory, store_page(), engine)
    assert "several processes bear this name" in reason


@pytest.mark.parametrize("case", ["attached by now", "a new engine", "a new store"])
def test_requests_before_an_engine_was_attached_are_ordinary(directory, case):
    peers = [peer_row(state=1 if case == "attached by now" else LIVE, name=STORE_NAME if case == "attached by now" else b"x:1")]
    engine = engine_page(peers=peers, misses=[miss_row(STORE_NAME)], age=1 if case == "a new engine" else 100)
    reasons, _, _ = fell_back(directory, store_page(age=1 if case == "a new store" else 100), engine)
    assert reasons == []


def test_requests_for_others_are_told_apart_and_no_alarm(directory):
    """Transfers between engines, with other hosts, and with processes of this host that are not in the directory."""
    names = {b"10.0.0.1:16000": "engine", b"192.0.2.7:1": "other_host", b"10.0.0.1:9": "unknown", b"127.0.0.1:9": "unknown"}
    rows = [miss_row(name) for name in names]
    engine = engine_page(misses=rows, counters={"fallback_no_peer": 7 * len(rows)})
    reasons, misses, text = fell_back(directory, store_page(), engine)
    assert reasons == []
    assert {miss["name"].encode(): miss["target"] for miss in misses.values()} == names
    assert "for 192.0.2.7:1: not an address of this host\n" in text
    assert "for 10.0.0.1:16000: an engine of this host that shares no memory" in text


@pytest.mark.parametrize(
    "bit, word, said",
    [
        (UNNAMED, "unnamed", "the name by which peers open it is not known"),
        (SEVERAL_STORES, "several_stores", "use a process for each store"),
        (LENDS_UNSHARED, "lends_unshared", "a global segment size of 0"),
    ],
)
def test_conditions_of_a_process(directory, bit, word, said):
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, raw=engine_page(conditions=bit | 1 << 31)):
        code, report = status_json(directory)
    (reason,) = report["reasons"]
    assert code == 1 and reason.startswith("engine 10.0.0.1:16000") and said in reason
    assert [process["conditions"] for process in report["processes"]] == [[], [word]]


def test_engines_whose_counters_are_missing(directory):
    serving = store_page(instance=b"\x22" * 16, clients=[client_row(), client_row(), client_row(age=1)])
    with FakeProcess(directory, "s", raw=serving), FakeProcess(directory, raw=engine_page()) as one:
        code, line = first_line(directory)
        assert code == 1 and "serves 2 engines, and the counters of 1 of them are missing here" in line
        with FakeProcess(directory, raw=engine_page()):
            assert first_line(directory)[0] == 0
        # One that answers without its counters has a reason of its own.
        with FakeProcess(directory, answer=answer_with(message(WELCOME))) as silent:
            _, report = status_json(directory)
            assert len(report["reasons"]) == 1 and silent.id in report["reasons"][0] and one.id not in report["reasons"][0]


def test_engines_without_a_store_and_stores_without_memory(directory):
    with FakeProcess(directory, raw=engine_page(peers=())):
        assert "there is no store" in first_line(directory)[1]
    with FakeProcess(directory, "s", raw=store_page(segments=())):
        assert "publishes no memory" in first_line(directory)[1]


def test_an_engine_that_is_attached_to_nobody(directory):
    with FakeProcess(directory, "s", raw=store_page()):
        with FakeProcess(directory, raw=engine_page(peers=())):
            assert "engine 10.0.0.1:16000" in first_line(directory)[1] and "no store" in first_line(directory)[1]
        with FakeProcess(directory, raw=engine_page(peers=(), age=1)):
            assert first_line(directory)[0] == 0
        with FakeProcess(directory, raw=engine_page(peers=[peer_row(state=3)])):
            assert first_line(directory)[0] == 1


def test_a_directory_that_the_library_would_refuse(directory):
    with FakeProcess(directory, "s", raw=store_page()):
        directory.chmod(0o777)
        code, line = first_line(directory)
        assert code == 1 and str(directory) in line


# ---- the dead and the stopped


def test_a_stopped_process_is_shown_and_does_not_hold_us_up(directory):
    with RealProcess(directory, "store") as stopped, FakeProcess(directory, "s", raw=store_page()):
        stopped.stop()
        start = time.monotonic()
        code, report = status_json(directory)
        assert machine.ran_s(start) < LIMIT_S
        assert code == 1 and report["totals"]["not_answering"] == 1 and report["totals"]["stores"] == 1
        assert [p["pid"] for p in report["processes"] if p["state"] == "not_answering"] == [stopped.pid]
        assert f"pid {stopped.pid}" in first_line(directory)[1] and "not answering" in first_line(directory)[1]
        os.kill(stopped.pid, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while status_json(directory)[0] != 0:
            assert time.monotonic() < deadline


def test_a_stopped_process_with_a_full_backlog(directory):
    with RealProcess(directory, "store") as stopped:
        stopped.stop()
        waiting = []
        name = next(entry for entry in shared.names(directory) if entry.endswith(".sock"))
        for _ in range(200):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)
            try:
                connection.connect(f"{directory}/{name}")
            except BlockingIOError:
                break
            waiting.append(connection)
        start = time.monotonic()
        _, report = status_json(directory)
        assert machine.ran_s(start) < LIMIT_S
        assert [process["state"] for process in report["processes"]] == ["not_answering"]


def test_a_killed_process_is_stale_and_removed(directory):
    with RealProcess(directory, "store") as dead, FakeProcess(directory, "s", raw=store_page()) as living:
        dead.process.kill()
        dead.process.wait()
        result = tidepool("status", directory)
        assert result.returncode == 0, result.stdout
        assert "stale" in result.stdout and "removed" in result.stdout
        assert shared.names(directory) == [f"s-{living.id}.lock", f"s-{living.id}.sock"]
        assert "stale" not in tidepool("status", directory).stdout


def test_a_held_lock_is_never_removed(directory):
    name = "s-" + "0" * 32
    (directory / f"{name}.lock").touch()
    with open(directory / f"{name}.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _, report = status_json(directory)
        assert [process["state"] for process in report["processes"]] == ["starting"]
        assert shared.names(directory) == [f"{name}.lock"]
    _, report = status_json(directory)
    assert [(process["state"], process["removed"]) for process in report["processes"]] == [("stale", True)]
    assert shared.names(directory) == []


def test_other_files_are_left_alone(directory):
    names = ["notes.txt", "s-123.sock", "s-" + "0" * 31 + "G.lock", "x-" + "0" * 32 + ".lock"]
    for name in names:
        (directory / name).touch()
    assert status_json(directory)[1]["processes"] == []
    assert shared.names(directory) == sorted(names)


# ---- the hostile

ESCAPE = b"\x1b]0;owned\x07\x1b[2J\r\nOK: all is well\xc2\x9b\xff"


def test_strings_cannot_move_the_cursor_or_forge_a_line(directory):
    raw = page(
        roles=STORE | ENGINE,
        name=(ESCAPE * 10)[:128],
        program=(ESCAPE * 10)[:64],
        hostname=(ESCAPE * 10)[:64],
        library_version=ESCAPE[:16],
        counters={"local_read_bytes": 2**64 - 1, "copy_failed": 1},
        segments=[(LIVE, 99, 1, 2**64 - 1, 2**63, 0, 2**32 - 1, 2**32 - 1, (ESCAPE * 10)[:64])],
        peers=[peer_row(name=(ESCAPE * 10)[:128], path=(ESCAPE * 10)[:128], read=2**64 - 1)],
        events=[(2**64 - 1, (ESCAPE * 10)[:248])] * 16,
        misses=[miss_row((ESCAPE * 10)[:128], requests=2**64 - 1, size=2**64 - 1), (99, 0, 1, 1, b"x" * 128)],
        conditions=2**32 - 1,
    )
    with FakeProcess(directory, "s", raw=raw), FakeProcess(directory, answer=lambda c: send(c, refused(ESCAPE))):
        result = tidepool("status", directory)
        assert result.returncode == 1
        assert all(character == "\n" or " " <= character <= "~" for character in result.stdout)
        assert not any(line.lstrip().startswith("OK") for line in result.stdout.splitlines())
        code, report = status_json(directory)
        assert code == 1 and report["processes"][0]["segments"][0]["kind"] == "unknown"


def unsealed(raw):
    fd = os.memfd_create("page")
    os.write(fd, raw)
    return fd


def regular_file(raw):
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, raw)
    return fd


def pipe_end(_):
    return os.pipe()[0]


def answer_with_page(make, raw):
    def answer(connection):
        send(connection, message(WELCOME))
        send(connection, message(PAGE), [make(raw)])

    return answer


def answer_with(*messages):
    def answer(connection):
        for one in messages:
            send(connection, one)

    return answer


def flood(connection):
    while True:
        send(connection, message(WELCOME))


def hang_up(connection):
    connection.close()


def fds_with_welcome(connection):
    send(connection, message(WELCOME), [0])


def many_fds(connection):
    send(connection, message(PAGE), [0] * 20)


BAD = {
    "short page": answer_with_page(sealed, page()[:100]),
    "empty page": answer_with_page(sealed, b""),
    "other magic": answer_with_page(sealed, page(magic=1)),
    "other version": answer_with_page(sealed, page(version=99)),
    "other size": answer_with_page(sealed, page(size=PAGE_BYTES * 2)),
    "a regular file": answer_with_page(regular_file, page()),
    "a pipe": answer_with_page(pipe_end, page()),
    "page without fd": answer_with(message(PAGE)),
    "fds with another message": fds_with_welcome,
    "too many fds": many_fds,
    "wrong message magic": answer_with(message(WELCOME, magic=MAGIC + 1)),
    "wrong message version": answer_with(message(WELCOME, version=7)),
    "unknown message": answer_with(message(4711)),
    "short message": answer_with(b"hello"),
    "long message": answer_with(b"\0" * 2000),
    "endless messages": flood,
    "end of file": hang_up,
}


@pytest.mark.parametrize("case", BAD)
def test_a_server_that_breaks_the_protocol_is_named_and_harms_nobody(directory, case):
    with FakeProcess(directory, "s", raw=store_page()), FakeProcess(directory, answer=BAD[case]) as bad:
        start = time.monotonic()
        code, report = status_json(directory)
        assert machine.ran_s(start) < LIMIT_S
        states = {process["instance"]: process for process in report["processes"]}
        assert states.pop(bad.id)["state"] == "broken"
        assert [process["state"] for process in states.values()] == ["live"]
        assert code == 1 and report["totals"]["stores"] == 1


def test_a_refusal_is_shown_in_its_own_words(directory):
    with FakeProcess(directory, "s", answer=answer_with(refused(b"only on Sundays"))):
        code, line = first_line(directory)
        assert code == 1 and "refused" in line and "only on Sundays" in line


def test_a_server_that_says_half(directory):
    with FakeProcess(directory, "s", answer=answer_with(message(WELCOME))):
        start = time.monotonic()
        _, report = status_json(directory)
        assert time.monotonic() - start > 0.5 and machine.ran_s(start) < LIMIT_S
        assert [process["state"] for process in report["processes"]] == ["not_answering"]


# ---- usage


def test_where_the_directory_comes_from(directory, tmp_path):
    with FakeProcess(directory, "s", raw=store_page()):
        conf = json.dumps({"transports": {"shm": {"enable": True, "socket_dir": str(directory)}}})
        assert tidepool("status", TIDEPOOL_SOCKET_DIR=str(directory)).returncode == 0
        assert tidepool("status", MC_TENT_CONF=conf).returncode == 0
        assert tidepool("status", MC_STORE_SHM_SEGMENT_DIR=str(directory)).returncode == 0
        assert tidepool("status", str(directory), TIDEPOOL_SOCKET_DIR="/elsewhere").returncode == 0
        assert tidepool("status", directory.name, cwd=directory.parent).returncode == 0
    result = tidepool("status")
    assert result.returncode == 2 and "TIDEPOOL_SOCKET_DIR" in result.stderr


@pytest.mark.parametrize("arguments", [("/no/such/dir",), ("a", "b"), ("--nonsense",), ("--watch", "often"), ("--watch",)])
def test_wrong_usage(arguments):
    result = tidepool("status", *arguments)
    assert result.returncode == 2 and result.stderr.startswith("tidepool status: ") and result.stdout == ""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_permission_denied_names_path_uid_and_mode():
    import tempfile

    # pytest's own folders keep others out before ours does.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        result = subprocess.run(
            ["/proc/self/fd/99", "status", directory],
            env=clean_environment(),
            capture_output=True,
            text=True,
            user=65534,
            preexec_fn=None,
            pass_fds=(tool_fd(),),
        )
    assert result.returncode == 2
    assert directory in result.stderr and "0700" in result.stderr and "65534" in result.stderr


def tool_fd():
    fd = os.open(TOOL, os.O_RDONLY)
    return os.dup2(fd, 99)  # pytest holds low ones


def test_watch_goes_on_until_interrupted(directory):
    with FakeProcess(directory, "s", raw=store_page()):
        watching = subprocess.Popen(
            [TOOL, "status", directory, "--json", "--watch", "0.1"],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            text=True,
            # A shell that runs the tests in the background has had it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        reports = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(5) in (-signal.SIGINT, 0)
        watching.stdout.close()
    assert [report["verdict"] for report in reports] == ["ok"] * 3


def test_output_that_cannot_be_written_is_an_error(directory):
    with open("/dev/full", "w") as full:
        result = subprocess.run([TOOL, "status", directory], env=clean_environment(), stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 2 and b"cannot write" in result.stderr
