# SPDX-License-Identifier: Apache-2.0
"""What `meson install` puts where is found from there, under any prefix."""

import glob
import shutil
import subprocess

import pytest
from tools_support import BUILD, tidepool


@pytest.mark.skipif(not shutil.which("meson"), reason="meson is not on PATH")
def test_an_installed_tool_finds_the_installed_library(tmp_path):
    subprocess.run(
        ["meson", "install", "-C", BUILD, "--no-rebuild", "--destdir", tmp_path], check=True, capture_output=True, timeout=60
    )
    (tool,) = tmp_path.rglob("bin/tidepool")
    (library,) = tmp_path.rglob("libtidepool.so")
    (manual,) = tmp_path.rglob("man1/tidepool.1*")
    assert tool.parent.parent in library.parents and tool.parent.parent in manual.parents
    result = tidepool("run", "--store", tmp_path / "shared", "--print", tool=tool)
    assert result.returncode == 0, result.stderr
    assert f"export LD_PRELOAD={library}\n" in result.stdout
    stubs = library.parent / "tidepool" / "stubs"
    assert sorted(path.name for path in stubs.rglob("*.so*")) == ["libcuda.so.1", "libcudart.so.12", "libcudart.so.13"]
    # For images that lack it: a copy that is preloaded before the library stands for the system's.
    (jansson,) = glob.glob("/usr/lib/*/libjansson.so.4")[:1]
    beside = shutil.copy(jansson, library.parent)
    trace = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_PRELOAD": f"{beside}:{library}", "PATH": "/usr/bin:/bin"}
    loaded = subprocess.run(["/bin/true"], env=trace, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in loaded.splitlines() if "libjansson" in line] == [str(beside)], loaded
    result = tidepool("run", "--store", tmp_path / "shared", "--print", tool=tool, MC_TENT_PLATFORM="cpu")
    assert result.returncode == 0 and result.stderr == "tidepool run: store memory: memfd (MC_TENT_PLATFORM=cpu is set)\n"
    missing = [path for path in result.stdout.partition("LD_LIBRARY_PATH=")[2].partition("\n")[0].split(":") if path]
    assert all(path.startswith(f"{stubs}/") for path in missing), result.stdout
