# SPDX-License-Identifier: Apache-2.0
"""`tidepool doctor` finds what is not fit, says what to do, and survives any Mooncake."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import machine
from tools_support import ROOT, TOOL, clean_environment, tidepool

# The interpreter under the tests' own: it has no Mooncake but the one that a test makes.
PYTHON = Path(sys.base_prefix) / "bin" / "python3"
VENV = Path(os.environ.get("TIDEPOOL_VENV", ROOT / ".venv"))
RESERVE = "_ZNSt6vectorIN8mooncake9Transport15TransferRequestESaIS2_EE7reserveEm"


def doctor(*arguments, **environment):
    """(exit status, {what: [findings]})"""
    result = tidepool("doctor", "--json", *arguments, **environment)
    report = json.loads(result.stdout)
    assert report["fit"] == (result.returncode == 0) and result.returncode in (0, 1)
    found = {}
    for finding in report["findings"]:
        assert set(finding) == {"level", "what", "value", "advice"}
        found.setdefault(finding["what"], []).append(finding)
    return result.returncode, found


def levels(found, what):
    return [finding["level"] for finding in found.get(what, [])]


def hooks():
    """identifier -> (mangled, role, since), as shim/hooks.def has them."""
    text = (ROOT / "shim" / "hooks.def").read_text()
    pattern = r'HOOK\((\w+),.*?\n\s*"(\w+)",\n\s*(\w+), "([^"]*)"'
    return {match[0]: match[1:] for match in re.findall(pattern, text)}


class FakeMooncake:
    """A package with native modules that export what we like. (Packages hide modules of the same name: nothing is run.)"""

    def __init__(self, folder):
        self.site = folder / "site"
        self.package = self.site / "mooncake"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").touch()

    def module(self, name, symbols, element=None, importing=""):
        (self.package / name).mkdir()
        (self.package / name / "__init__.py").write_text(importing)
        lines = [f'void f{i}(void) __asm__("{symbol}"); void f{i}(void) {{}}' for i, symbol in enumerate(symbols)]
        if element:
            lines.append(
                f'void reserve(char **v, unsigned long n) __asm__("{RESERVE}");'
                f"void reserve(char **v, unsigned long n) {{ v[0] = v[1] = (char *)4096; v[2] = v[0] + n * {element}; }}"
            )
        source = self.site / f"{name}.c"
        source.write_text("\n".join(lines) + "\n")
        library = self.package / f"{'_' if name == 'store' else ''}{name}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)

    def version(self, text, name="mooncake-transfer-engine"):
        info = self.site / f"{name.replace('-', '_')}-{text}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {text}\n")

    def examine(self, **environment):
        return doctor("--python", PYTHON, PYTHONPATH=str(self.site), **environment)


@pytest.fixture
def mooncake(tmp_path):
    return FakeMooncake(tmp_path)


def mangled(*but, roles=("TRANSFER", "TRANSFER13", "LINK", "STORE")):
    return [symbol for name, (symbol, role, _) in hooks().items() if role in roles and name not in but]


# ---- the Mooncake of a Python


@pytest.mark.parametrize("element", [56, 72])
def test_a_mooncake_with_all_hooks_fits(mooncake, element):
    mooncake.version("0.3.14")
    mooncake.module("store", mangled(), element)
    mooncake.module("engine", mangled(roles=("TRANSFER", "TRANSFER13", "LINK")))
    code, found = mooncake.examine()
    assert levels(found, "mooncake.store") == ["OK", "OK"] and levels(found, "mooncake.engine") == ["OK", "OK"]
    assert f"{element} bytes" in found["mooncake.store"][0]["value"]
    assert "learned at run time" in found["mooncake.engine"][0]["value"]
    assert "0.3.14" in found["mooncake"][0]["value"]


@pytest.mark.parametrize("missing", ["mt_submit3", "mt_free", "mt_task_status", "te_open", "te_init"])
def test_a_missing_hook_is_named(mooncake, missing):
    mooncake.version("0.3.13.post1")
    mooncake.module("store", mangled(missing), 56)
    code, found = mooncake.examine()
    assert code == 1
    assert [missing in finding["value"] for finding in found["mooncake.store"] if finding["level"] == "FAIL"] == [True]


def test_what_works_without_is_a_warning(mooncake):
    mooncake.version("0.3.13")
    mooncake.module("store", mangled("te_close"), 56)
    _, found = mooncake.examine()
    assert levels(found, "mooncake.store") == ["OK", "WARN", "OK"] and "te_close" in found["mooncake.store"][1]["value"]


def test_old_versions_need_only_their_own_hooks(mooncake):
    mooncake.version("0.3.12.post1")
    mooncake.module("store", mangled("mt_submit3", "allocate_plain", "free_plain", "allocate_dma", "free_dma"), 48)
    _, found = mooncake.examine()
    assert levels(found, "mooncake.store") == ["OK", "OK"]


def test_a_store_without_a_known_allocator(mooncake):
    mooncake.module("store", mangled(roles=("TRANSFER", "TRANSFER13", "LINK")), 56)
    code, found = mooncake.examine()
    assert code == 1 and "allocator" in found["mooncake.store"][1]["value"]


@pytest.mark.parametrize("element", [40, 64, 80])
def test_an_unknown_element_size_fails(mooncake, element):
    mooncake.module("store", mangled(), element)
    code, found = mooncake.examine()
    assert code == 1
    assert "FAIL" in levels(found, "mooncake.store")
    assert f"{element} bytes: unknown version, Tidepool leaves this module alone" in found["mooncake.store"][0]["value"]


def test_tent_hooks_are_needed_only_when_tent_is_on(mooncake):
    mooncake.module("store", [*mangled(), "_ZN8mooncake4tent12getMachineIDB5cxx11Ev"], 56)
    assert "FAIL" not in levels(mooncake.examine()[1], "mooncake.store")
    code, found = mooncake.examine(MC_USE_TENT="1")
    assert "FAIL" in levels(found, "mooncake.store") and "te_submit" in found["mooncake.store"][1]["value"]


def test_a_missing_driver_library_is_a_clear_finding(mooncake):
    error = "libcuda.so.1: cannot open shared object file: No such file or directory"
    mooncake.module("store", mangled(), 56, importing=f"raise ImportError({error!r})")
    code, found = mooncake.examine()
    assert code == 1
    (finding,) = found["mooncake.store"]
    assert "libcuda.so.1" in finding["value"] and "driver" in finding["advice"]


def test_a_crash_on_import_is_a_finding(mooncake):
    crash = "import os, sys; print('going down', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    mooncake.module("store", mangled(), 56, importing=crash)
    code, found = mooncake.examine()
    assert code == 1
    value = found["python"][-1]["value"]
    assert "signal 11" in value and "_store.so" in value and "going down" in value


def test_noise_and_left_over_children_do_not_disturb(mooncake):
    noise = "import os, subprocess; print('{\"module\": 3}' * 10000); os.write(2, b'x\\n' * 100000); subprocess.Popen(['sleep', '50'])"
    mooncake.module("store", mangled(), 56, importing=noise)
    start = time.monotonic()
    _, found = mooncake.examine()
    assert levels(found, "mooncake.store") == ["OK", "OK"]
    assert machine.ran_s(start) < 15


def test_two_wheels_in_one_environment(mooncake):
    mooncake.version("0.3.14", "mooncake-transfer-engine-cuda13")
    mooncake.version("0.3.13.post1", "mooncake-transfer-engine-non-cuda")
    mooncake.module("store", mangled(), 56)
    assert levels(mooncake.examine()[1], "mooncake") == ["WARN"]


def test_a_python_without_mooncake():
    code, found = doctor("--python", PYTHON)
    assert code == 1 and levels(found, "mooncake") == ["FAIL"] and "--python" in found["mooncake"][0]["advice"]


def test_no_such_python():
    code, found = doctor("--python", "/no/such/python")
    assert code == 1 and levels(found, "python") == ["FAIL"] and "/no/such/python" in found["python"][0]["value"]


def test_the_real_wheel_fits():
    python = VENV / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no stock wheel: {python} does not exist (scripts/setup makes it; TIDEPOOL_VENV names another)")
    _, found = doctor("--python", python)
    for module in ("mooncake.store", "mooncake.engine"):
        assert set(levels(found, module)) == {"OK"}, found[module]
    assert re.search(r"TransferRequest of (48|56|72) bytes", found["mooncake.store"][0]["value"])


# ---- settings and directories


def test_a_right_configuration(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    conf = json.dumps({"transports": {"shm": {"enable": True, "socket_dir": str(shared)}}})
    _, found = doctor("--no-python", MC_STORE_SHM_SEGMENT_DIR="memfd", TIDEPOOL_SOCKET_DIR=str(shared), MC_TENT_CONF=conf)
    assert levels(found, "store settings") == levels(found, "engine settings") == levels(found, "store directory") == ["OK"]
    assert "0700" in found["store directory"][0]["value"] and "takes sockets" in found["store directory"][0]["value"]
    assert os.listdir(shared) == []


def test_a_wrong_setting_names_the_variable():
    code, found = doctor("--no-python", MC_STORE_SHM_SEGMENT_DIR="memfd")
    assert code == 1 and "TIDEPOOL_SOCKET_DIR" in found["store settings"][0]["value"]
    code, found = doctor("--no-python", MC_TENT_CONF="{")
    assert code == 1 and "MC_TENT_CONF" in found["engine settings"][0]["value"]


def test_a_directory_that_others_may_write(tmp_path):
    tmp_path.chmod(0o777)
    code, found = doctor("--no-python", MC_STORE_SHM_SEGMENT_DIR="memfd", TIDEPOOL_SOCKET_DIR=str(tmp_path))
    assert code == 1 and levels(found, "store directory") == ["FAIL"] and str(tmp_path) in found["store directory"][0]["value"]


def test_a_directory_that_does_not_exist_yet_is_fine(tmp_path):
    _, found = doctor("--no-python", MC_STORE_SHM_SEGMENT_DIR="memfd", TIDEPOOL_SOCKET_DIR=str(tmp_path / "new"))
    assert levels(found, "store directory") == ["OK"] and not (tmp_path / "new").exists()


def test_segments_on_a_disk(tmp_path):
    code, found = doctor("--no-python", MC_STORE_SHM_SEGMENT_DIR="/proc", TIDEPOOL_SOCKET_DIR=str(tmp_path))
    assert code == 1 and "neither hugetlbfs nor tmpfs" in found["segment directory"][0]["value"]


@pytest.mark.parametrize(
    "kib, settings",
    [
        (2048, {"TIDEPOOL_HUGEPAGES": "1"}),
        (2048, {"MC_STORE_USE_HUGEPAGE": "1"}),
        (1 << 20, {"MC_STORE_USE_HUGEPAGE": "1", "MC_STORE_HUGEPAGE_SIZE": "1GB"}),
    ],
    ids=["ours", "mooncakes", "mooncakes-1GB"],
)
def test_hugepages_that_are_not_there(tmp_path, kib, settings):
    total = Path(f"/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages")
    if not total.exists() or total.read_text().strip() != "0":
        pytest.skip("this machine has reserved huge pages of this size, or knows none")
    code, found = doctor(
        "--no-python", MC_STORE_SHM_SEGMENT_DIR="memfd", TIDEPOOL_SOCKET_DIR=str(tmp_path), **settings
    )
    assert code == 1 and levels(found, f"hugepages {kib // 1024} MiB") == ["FAIL"]


@pytest.mark.parametrize("value", ["0", "1"])
def test_any_value_of_mooncakes_shm_switch_turns_it_on(value):
    _, found = doctor("--no-python", MC_FORCE_SHM=value)
    assert levels(found, "MC_FORCE_SHM") == ["WARN"]


@pytest.mark.parametrize("store, level", [({}, "WARN"), ({"MC_STORE_CUMEM_SOCKET_DIR": "/run/x"}, "FAIL")])
def test_an_allocator_before_the_library(tmp_path, store, level):
    """It would answer free() for memory that the library has made. Behind the library it is fine."""
    allocator = tmp_path / "libjemalloc.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", allocator], check=True)
    library = TOOL.parent / "libtidepool.so"
    _, found = doctor("--no-python", LD_PRELOAD=f"{allocator} {library}", **store)
    (finding,) = found["LD_PRELOAD"]
    assert finding["level"] == level and finding["advice"] == "name libtidepool.so first in LD_PRELOAD"
    for fine in (f"{library} {allocator}", f"{allocator}"):
        _, found = doctor("--no-python", LD_PRELOAD=fine, **store)
        assert levels(found, "LD_PRELOAD") == ["OK"]


def test_boot_id_only_identity():
    _, found = doctor("--no-python", MC_TENT_MACHINE_ID="boot_id")
    (finding,) = found["host identity"]
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert finding["level"] == "OK" and finding["value"].startswith(boot_id)


def test_the_limit_of_open_files(tmp_path):
    result = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n 64; exec {TOOL} doctor --no-python --json"],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    (finding,) = [f for f in json.loads(result.stdout)["findings"] if f["what"] == "open files limit"]
    assert finding["level"] == "WARN" and "ulimit -n" in finding["advice"]


# ---- the library


def test_a_library_that_cannot_be_loaded(tmp_path):
    import shutil

    tool = shutil.copy(TOOL, tmp_path / "tidepool")
    (tmp_path / "libtidepool.so").write_text("no ELF")
    result = tidepool("doctor", "--no-python", tool=tool)
    # The dynamic linker only complains about a file that is no library, and stops for one whose dependency is missing.
    source = tmp_path / "a.c"
    source.write_text("")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libgone.so", source], check=True)
    (tmp_path / "libtidepool.so").unlink()
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", tmp_path / "libtidepool.so", source, "-L", tmp_path, "-lgone"],
        check=True,
    )
    (tmp_path / "libgone.so").unlink()
    result = tidepool("doctor", "--no-python", tool=tool)
    assert result.returncode == 1
    assert re.search(r"^FAIL +library .*cannot be loaded", result.stdout, re.M)


def test_no_library_at_all(tmp_path):
    import shutil

    result = tidepool("doctor", "--no-python", tool=shutil.copy(TOOL, tmp_path / "tidepool"))
    assert result.returncode == 1 and re.search(r"^FAIL +library .*none of", result.stdout, re.M)


# ---- form


def test_one_line_a_finding_and_a_verdict():
    result = tidepool("doctor", "--no-python")
    lines = result.stdout.splitlines()
    assert all(re.match(r"(OK  |WARN|FAIL)  \S", line) for line in lines[:-1])
    assert re.fullmatch(r"(FIT|NOT FIT): \d+ failures?, \d+ warnings?", lines[-1])


def test_values_from_outside_cannot_forge_a_line():
    result = tidepool("doctor", "--no-python", MC_STORE_SHM_SEGMENT_DIR="x\nOK    all\x1b[2J")
    assert result.returncode == 1 and "\x1b" not in result.stdout and "\nOK    all" not in result.stdout


@pytest.mark.parametrize("arguments", [("--nonsense",), ("--python",), ("extra",)])
def test_wrong_usage(arguments):
    result = tidepool("doctor", *arguments)
    assert result.returncode == 2 and result.stderr.startswith("tidepool doctor: ") and result.stdout == ""
