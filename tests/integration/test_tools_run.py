# SPDX-License-Identifier: Apache-2.0
"""`tidepool run` sets the environment that it promises, or starts nothing and says why."""

import json
import os
import shutil
import signal
import subprocess

import pytest
from tools_support import LIBRARY, TOOL, tidepool

# /usr/bin/env is harmless with and without the library; what is preloaded is not what is tested here.
ENV = ("/usr/bin/env", "-0")


def environment_of(result):
    assert result.returncode == 0, result.stderr
    return dict(line.split("=", 1) for line in result.stdout.split("\0") if line)


@pytest.fixture
def shared(tmp_path):
    return tmp_path / "shared"


def test_a_store_gets_memfd_segments_and_the_directory(shared):
    # What it chooses where there is a CUDA driver: tests/cumem/test_run.py.
    result = tidepool("run", "--store", shared, "--", *ENV, CUDA_VISIBLE_DEVICES="")
    assert result.stderr == "tidepool run: store memory: memfd (CUDA_VISIBLE_DEVICES is empty)\n"
    seen = environment_of(result)
    assert seen["LD_PRELOAD"] == str(LIBRARY)
    assert seen["TIDEPOOL_SOCKET_DIR"] == str(shared)
    assert seen["MC_STORE_SHM_SEGMENT_DIR"] == "memfd"
    assert "TIDEPOOL_HUGEPAGES" not in seen and "MC_TENT_CONF" not in seen
    assert shared.stat().st_mode & 0o7777 == 0o700


def test_hugepages_and_a_segment_directory(shared):
    seen = environment_of(tidepool("run", "--store", shared, "--hugepages", "--", *ENV))
    assert seen["TIDEPOOL_HUGEPAGES"] == "1"
    seen = environment_of(tidepool("run", "--store", shared, "--segment", "/dev/shm", "--", *ENV))
    assert seen["MC_STORE_SHM_SEGMENT_DIR"] == "/dev/shm"


def test_an_engine_gets_the_json(shared):
    seen = environment_of(tidepool("run", "--engine", shared, "--", *ENV))
    assert json.loads(seen["MC_TENT_CONF"]) == {"transports": {"shm": {"enable": True, "socket_dir": str(shared)}}}
    assert "MC_STORE_SHM_SEGMENT_DIR" not in seen
    assert (seen["MC_STORE_BATCHED_GET"], seen["MC_STORE_BATCHED_PUT"]) == ("1", "1")
    seen = environment_of(tidepool("run", "--engine", shared, "--", *ENV, MC_STORE_BATCHED_GET="0"))
    assert (seen["MC_STORE_BATCHED_GET"], seen["MC_STORE_BATCHED_PUT"]) == ("0", "1")


def test_both_halves_may_have_different_directories(tmp_path):
    seen = environment_of(tidepool("run", "--store", tmp_path / "a", "--engine", tmp_path / "b", "--", *ENV))
    assert seen["TIDEPOOL_SOCKET_DIR"] == str(tmp_path / "a")
    assert json.loads(seen["MC_TENT_CONF"])["transports"]["shm"]["socket_dir"] == str(tmp_path / "b")


USERS = {
    "rpc_server_hostname": "10.0.0.1",
    "transports": {"tcp": {"enable": True}, "shm": {"enable": False, "device_copy": False, "unknown": [1, 2.5, None]}},
}


@pytest.mark.parametrize("as_file", [False, True], ids=["inline", "file"])
def test_the_users_json_is_kept(shared, tmp_path, as_file):
    given = json.dumps(USERS)
    if as_file:
        (tmp_path / "tent.json").write_text(given)
        given = str(tmp_path / "tent.json")
    seen = environment_of(tidepool("run", "--engine", shared, "--", *ENV, MC_TENT_CONF=given))
    expected = json.loads(json.dumps(USERS))
    expected["transports"]["shm"].update(enable=True, socket_dir=str(shared))
    assert json.loads(seen["MC_TENT_CONF"]) == expected
    if as_file:
        assert json.loads((tmp_path / "tent.json").read_text()) == USERS


@pytest.mark.parametrize(
    "given, said",
    [
        ("{not json", "not JSON"),
        ("/no/such/file.json", "/no/such/file.json"),
        ('{"transports": 3}', "transports is not an object"),
        ('{"transports": {"shm": "on"}}', "transports.shm is not an object"),
        ('{"transports": {"shm": {"copy_engine": "magic"}}}', "magic"),
        ('{"transports": {"shm": {"cumem_socket_dir": "/elsewhere"}}}', "/elsewhere"),
    ],
)
def test_json_that_cannot_be_used_starts_nothing(shared, given, said):
    result = tidepool("run", "--engine", shared, "--", *ENV, MC_TENT_CONF=given)
    assert result.returncode == 125
    assert said in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_relative_directory_becomes_absolute(tmp_path):
    seen = environment_of(tidepool("run", "--store", "here", "--engine", "here", "--", *ENV, cwd=tmp_path))
    assert seen["TIDEPOOL_SOCKET_DIR"] == str(tmp_path / "here")
    assert json.loads(seen["MC_TENT_CONF"])["transports"]["shm"]["socket_dir"] == str(tmp_path / "here")


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    result = tidepool("run", "--store", tmp_path, "--", *ENV)
    assert result.returncode == 125 and str(tmp_path) in result.stderr and result.stdout == ""


def test_the_preload_goes_before_what_is_there(shared):
    seen = environment_of(tidepool("run", "--store", shared, "--", *ENV, LD_PRELOAD="libm.so.6"))
    assert seen["LD_PRELOAD"] == f"{LIBRARY}:libm.so.6"
    for there in (str(LIBRARY), f"libm.so.6:{LIBRARY}", f"{LIBRARY} libm.so.6"):
        assert environment_of(tidepool("run", "--store", shared, "--", *ENV, LD_PRELOAD=there))["LD_PRELOAD"] == there


def library_in(folder, name="libtidepool.so"):
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.copy(LIBRARY, folder / name)


def test_another_library_may_be_named(shared, tmp_path):
    other = library_in(tmp_path, "libother.so")
    assert environment_of(tidepool("run", "--store", shared, "--lib", other, "--", *ENV))["LD_PRELOAD"] == str(other)
    result = tidepool("run", "--store", shared, "--lib", tmp_path / "none.so", "--", *ENV)
    assert result.returncode == 125 and "none.so" in result.stderr


@pytest.mark.parametrize("name", ["with space", "with:colon", "with$dollar"])
def test_a_path_that_ld_so_would_split_is_refused(shared, tmp_path, name):
    result = tidepool("run", "--store", shared, "--lib", library_in(tmp_path / name), "--", *ENV)
    assert result.returncode == 125 and "LD_PRELOAD" in result.stderr


@pytest.mark.parametrize("place", ["lib/x86_64-linux-gnu", "lib64", "lib", "bin"])
def test_the_library_is_found_where_it_is_installed(shared, tmp_path, place):
    (tmp_path / "bin").mkdir(exist_ok=True)
    tool = shutil.copy(TOOL, tmp_path / "bin" / "tidepool")
    library = library_in(tmp_path / place)
    assert environment_of(tidepool("run", "--store", shared, "--", *ENV, tool=tool))["LD_PRELOAD"] == str(library)


def test_a_missing_library_names_the_places(shared, tmp_path):
    tool = shutil.copy(TOOL, tmp_path / "tidepool")
    result = tidepool("run", "--store", shared, "--", *ENV, tool=tool)
    assert result.returncode == 125
    assert f"{tmp_path}/libtidepool.so" in result.stderr and "lib64" in result.stderr and "--lib" in result.stderr
    assert not shared.exists()


def test_exit_statuses_are_those_of_env(shared, tmp_path):
    run = ("run", "--store", shared, "--")
    assert tidepool(*run, "/bin/sh", "-c", "exit 7").returncode == 7
    assert tidepool(*run, "/bin/sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    missing = tidepool(*run, "no-such-command-here")
    assert missing.returncode == 127 and "no-such-command-here" in missing.stderr
    (tmp_path / "plain").write_text("not a program")
    assert tidepool(*run, tmp_path / "plain").returncode == 126


def test_arguments_and_options_of_the_command_are_its_own(shared):
    result = tidepool("run", "--store", shared, "/bin/echo", "--engine", "a b", "--help")
    assert result.stdout == "--engine a b --help\n"


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "no command"),
        (("--store",), "--store"),
        (("--nonsense", "--", "true"), "--nonsense"),
        (("--store", "", "--", "true"), "--store is empty"),
        (("--segment", "memfd", "--", "true"), "--store"),
        (("--hugepages", "--", "true"), "--store"),
        (("--", "true"), "nothing is configured"),
    ],
)
def test_wrong_usage_starts_nothing(arguments, said):
    result = tidepool("run", *arguments)
    assert result.returncode == 125 and said in result.stderr


def test_hugepages_go_with_memfd_only(shared):
    result = tidepool("run", "--store", shared, "--segment", "/dev/shm", "--hugepages", "--", "true")
    assert result.returncode == 125 and "--hugepages" in result.stderr
    result = tidepool("run", "--store", shared, "--segment", "/no/such/mount", "--", "true")
    assert result.returncode == 125 and "/no/such/mount" in result.stderr


def test_settings_in_the_environment_are_checked_as_the_library_would(shared, tmp_path):
    other = tidepool("run", "--store", shared, "--", "true", MC_STORE_CUMEM_SOCKET_DIR=str(tmp_path))
    assert other.returncode == 125 and "different directories" in other.stderr
    both = tidepool("run", "--store", shared, "--segment", "memfd", "--", "true", MC_STORE_CUMEM_SOCKET_DIR=str(tmp_path))
    assert both.returncode == 125
    assert "MC_STORE_CUMEM_SOCKET_DIR" in both.stderr and "MC_STORE_SHM_SEGMENT_DIR" in both.stderr
    wrong = tidepool("run", "--store", shared, "--", "true", MC_STORE_CUMEM_PIECE_BYTES="many")
    assert wrong.returncode == 125 and "MC_STORE_CUMEM_PIECE_BYTES" in wrong.stderr and "many" in wrong.stderr


def test_without_options_the_environments_settings_do(shared):
    seen = environment_of(tidepool("run", "--", *ENV, MC_STORE_SHM_SEGMENT_DIR="memfd", TIDEPOOL_SOCKET_DIR=str(shared)))
    assert seen["LD_PRELOAD"] == str(LIBRARY)


def test_print_is_what_a_shell_can_read_and_changes_nothing(tmp_path):
    odd = tmp_path / "it's $HOME; odd"
    result = tidepool("run", "--store", odd, "--engine", odd, "--print", MC_TENT_CONF='{"log": "a\'b"}')
    assert result.returncode == 0 and not odd.exists()
    shell = subprocess.run(
        ["/bin/sh", "-c", result.stdout.replace("export LD_PRELOAD", "export SEEN_PRELOAD") + "\nexec env -0"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    seen = environment_of(shell)
    assert seen["TIDEPOOL_SOCKET_DIR"] == str(odd) and seen["SEEN_PRELOAD"] == str(LIBRARY)
    conf = json.loads(seen["MC_TENT_CONF"])
    assert conf["log"] == "a'b" and conf["transports"]["shm"]["socket_dir"] == str(odd)
