# SPDX-License-Identifier: Apache-2.0
"""The manual and the help texts say what the programs do."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools_support import BUILD, ENGINE, STORE, FakeProcess, counter_names, miss_row, page, peer_row, segment_row, status_json, tidepool

ROOT = Path(__file__).resolve().parents[2]
MANUAL = BUILD / "docs" / "tidepool.1"


def plain(text):
    return re.sub(r"\\f[BRI]", "", text).replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")


@pytest.fixture(scope="module")
def manual():
    return plain(MANUAL.read_text())


def test_every_setting_is_in_the_manual_as_the_library_has_it(manual):
    settings = json.loads(tidepool("settings", "--json").stdout)
    assert len(settings) > 15 and {"MC_TENT_CONF", "transports.shm.enable"} <= {s["name"] for s in settings}
    section = manual.split(".SH ENVIRONMENT AND SETTINGS")[1].split(".SH ")[0]
    assert re.findall(r"^\.TP\n\.B (.*)$", section, re.M) == [setting["name"] for setting in settings]
    for setting in settings:
        assert f"Takes {setting['expected']}; default: {setting['default']}." in section
        assert setting["meaning"] in section


def test_the_tables_of_the_readme_have_every_setting_and_no_other():
    section = (ROOT / "README.md").read_text().split("## Settings")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    named = [name for row in rows for name in re.findall(r"`([A-Za-z_]+)[^`]*`", row)]
    settings = json.loads(tidepool("settings", "--json").stdout)
    # Those of Mooncake's that are only read stand where their modes do.
    ours = {s["name"].removeprefix("transports.shm.") for s in settings if not s["meaning"].startswith("Mooncake's")}
    assert sorted(set(named)) == sorted(ours - {"MC_TENT_CONF"})


def test_the_list_as_text_is_the_same():
    text = tidepool("settings").stdout
    names = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert names == [setting["name"] for setting in json.loads(tidepool("settings", "--json").stdout)]


def test_every_counter_is_in_the_manual(manual):
    section = manual.split(".SS Counters")[1].split(".SH ")[0]
    assert re.findall(r"^\.B (\w+) ", section, re.M) == counter_names()


def keys(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key != "counters":
                yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_every_key_of_the_status_is_in_the_manual(manual, tmp_path):
    raw = page(
        roles=STORE | ENGINE,
        segments=[segment_row()],
        clients=[(2, 0, 1, 1, 1)],
        peers=[peer_row()],
        events=[(1, b"text")],
        misses=[miss_row(b"10.0.0.9:1")],
        conditions=1,
    )
    tmp_path.chmod(0o700)
    with FakeProcess(tmp_path, "s", raw=raw):
        _, report = status_json(tmp_path)
    section = manual.split(".SH STATUS AS JSON")[1].split(".SS Counters")[0]
    found = set(keys(report))
    assert {"segments", "peers", "events", "clients", "pieces_mapped", "misses", "target", "conditions"} <= found
    assert [key for key in sorted(found) if not re.search(rf"\b{key}\b", section)] == []


def test_every_option_of_the_help_is_in_the_manual(manual):
    for command in ("run", "status", "doctor"):
        options = set(re.findall(r"^  (--[a-z-]+)", tidepool(command, "--help").stdout, re.M))
        section = manual.split(f".SS tidepool {command}")[1].split(".SS ")[0].split(".SH ")[0]
        assert options and [option for option in sorted(options) if option not in section] == []


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
def test_the_manual_is_well_formed():
    result = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", MANUAL], capture_output=True, text=True)
    assert result.stdout + result.stderr == ""


def test_version_and_help():
    version = tidepool("--version")
    assert version.returncode == 0 and re.fullmatch(r"tidepool \d+\.\d+\.\d+\n", version.stdout)
    overview = tidepool("--help")
    assert overview.returncode == 0
    for command in ("run", "status", "doctor", "settings"):
        assert f"  {command} " in overview.stdout
        own = tidepool(command, "--help")
        assert own.returncode == 0 and own.stdout.startswith(f"usage: tidepool {command}") and own.stderr == ""
        assert tidepool("help", command).stdout == own.stdout
        assert all(len(line) <= 120 for line in own.stdout.splitlines())


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("--nonsense",), ("settings", "extra"), ("settings", "--manual")])
def test_wrong_usage(arguments):
    result = tidepool(*arguments)
    assert result.returncode == 2 and result.stdout == "" and result.stderr
