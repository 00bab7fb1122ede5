"""The stock wheels that the tests run on, and where things of this repository are."""

import functools
import glob
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("TIDEPOOL_BUILD", ROOT / "build")).resolve()
LIBRARY = BUILD / "libtidepool.so"
TOOL = BUILD / "tidepool"
SCARCE = BUILD / "tests" / "scarce" / "libscarce.so"  # a preload by which things run out


@dataclass(frozen=True)
class Wheel:
    name: str
    venv: Path
    # Folders with CUDA's libraries, or their double; None: stand-ins for those that this machine lacks.
    library_path: str | None = ""
    # Chosen by the caller: an older version may lack what the pinned ones have, and its tests are skipped.
    any_version: bool = False
    # What this version of Mooncake needs to work at all in these tests, with or without Tidepool: NAME=VALUE.
    settings: tuple = ()

    @property
    def python(self):
        return str(self.venv / "bin" / "python")

    @property
    def folder(self):
        found = glob.glob(str(self.venv / "lib/python3*/site-packages/mooncake"))
        return found[0] if found else None

    @property
    def present(self):
        return self.folder is not None

    def python_for(self, user):
        """An interpreter that this user may run, and the folders with the wheel's modules. The one of the virtual
        environment may lie where only its owner can go; the system's does as well if it is of the same version."""
        site = os.path.dirname(self.folder)
        version = os.path.basename(os.path.dirname(site))
        for python in (self.python, f"/usr/bin/{version}"):
            try:
                done = subprocess.run([python, "-c", "import ctypes"], user=user, group=user, extra_groups=[])
            except OSError:
                continue
            if done.returncode == 0:
                return python, [site]
        pytest.skip(f"no {version} here that user {user} may run")

    def environment(self):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MC_", "TIDEPOOL_", "MOONCAKE_", "LD_", "GLOG_", "PYTHONPATH"))
        }
        library_path = stand_ins() if self.library_path is None else self.library_path
        if library_path:
            environment["LD_LIBRARY_PATH"] = library_path
        environment.update(setting.split("=", 1) for setting in self.settings)
        # Mooncake's own transfers must not leave the machine, and its lines must not be lost.
        environment["GLOG_logtostderr"] = "1"
        environment["PYTHONUNBUFFERED"] = "1"
        return environment


@functools.cache
def stand_ins():
    """The folders of stand-ins for CUDA libraries that are missing here. Sanitized builds have the same."""
    found = []
    for library, folder in (("libcuda.so.1", "cuda-1"), ("libcudart.so.12", "cudart-12"), ("libcudart.so.13", "cudart-13")):
        if subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({library!r})"], capture_output=True).returncode:
            found.append(str(ROOT / "build" / "stubs" / folder))
    return os.pathsep.join(found)


CPU = Wheel("cpu", ROOT / ".venv")
CUDA13 = Wheel("cuda13", ROOT / ".venv-cuda13", None)


def from_environment():
    """A wheel of the caller's choice (scripts/check-upstream): its virtual environment."""
    venv = os.environ.get("TIDEPOOL_TEST_VENV")
    settings = tuple(os.environ.get("TIDEPOOL_TEST_SETTINGS", "").split())
    return Wheel("given", ROOT / venv, None, True, settings) if venv else None
