"""MC_TENT_PLATFORM=cpu: the store of a wheel built for CUDA starts and serves where there is no CUDA at all, and makes no
context where there is."""

import ctypes
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest
from harness import actions_store as actions
from harness import wheels
from harness.cluster import MIB, Cluster
from harness.wheels import ROOT, TOOL
from test_ssd_tier import disk, put_and_evict, read_back, store_with_disk  # noqa: F401 (disk is a fixture)

pytestmark = pytest.mark.stores

SIZES = [4096, 65537, 3 * MIB]
STUBS = {"libcuda.so.1": "cuda-1", "libcudart.so.12": "cudart-12", "libcudart.so.13": "cudart-13"}
FOLDER = ROOT / "build" / "stubs"
NO_DEVICE = 100
# Without the cache the loader looks into its own directories only: what CUDA's packages install is not found.
HIDDEN = ["unshare", "-m", "sh", "-c", 'mount --bind /dev/null /etc/ld.so.cache && exec "$@"', "sh"]
# What makes a context, in the driver and in the runtime.
CONTEXT = (
    "cuCtxCreate", "cuDevicePrimaryCtxRetain", "cudaSetDevice", "cudaInitDevice", "cudaMalloc", "cudaHost", "cudaFree",
    "cudaMemcpy", "cudaMemset", "cudaStream", "cudaEvent", "cudaDeviceSynchronize", "cudaLaunch",
)  # fmt: skip


def loads(library, *command):
    program = f"import ctypes; ctypes.CDLL({library!r})"
    return subprocess.run([*command, sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.fixture
def hidden():
    """The words that run a command without CUDA's libraries."""
    for words in ([], HIDDEN):
        if not any(loads(library, *words) for library in STUBS):
            return words
    pytest.skip("CUDA's libraries are here and cannot be hidden (no new mount namespace)")


@dataclass(frozen=True)
class Started(wheels.Wheel):
    """A wheel whose processes are started by a script."""

    script: str = ""

    @property
    def python(self):
        return self.script


@pytest.fixture
def bare(hidden, tmp_path, request):
    """A cluster whose processes are started by `tidepool run` in a container without CUDA."""
    if request.config.getoption("--stock"):
        pytest.skip("without Tidepool's stand-ins the wheel cannot be loaded there")
    script = tmp_path / "python"
    words = [*hidden, str(TOOL), "run", "--", wheels.CUDA13.python]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    wheel = Started("bare", wheels.CUDA13.venv, "", script=str(script))
    with Cluster(wheel, tmp_path) as made:
        yield made


def without_preload(environment):
    """As for `tidepool run`, which preloads the library by itself."""
    return {name: value for name, value in environment.items() if name != "LD_PRELOAD"}


def put_and_get(engine, name):
    keys = [f"{name}{index}" for index in range(len(SIZES))]
    assert engine.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1) == [0] * len(keys)
    assert engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}


def test_a_store_where_there_is_no_cuda(bare):
    """It serves engines of its own host and, over TCP, stock ones; and says nothing about what is missing."""
    cpu = {"MC_TENT_PLATFORM": "cpu"}
    store = bare.store(environment={**without_preload(bare.store_environment()), **cpu})
    engine = bare.engine(environment={**without_preload(bare.engine_environment()), **cpu})
    bare.warm(engine)
    before = bare.counters(engine)
    put_and_get(engine, "short")
    bare.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
    bare.wheel = wheels.CUDA13
    stock = bare.engine("stock", environment={})
    put_and_get(stock, "far")
    assert (engine.call(actions.close), store.call(actions.close)) == (0, 0)
    assert (engine.finish(), store.finish()) == (0, 0)
    assert store.warnings == [] and engine.warnings == []
    assert "cuda" not in "".join(line for line in store.log.lower().splitlines() if line.startswith(("e", "w"))).replace(
        "no cuda device detected; treating buffers as host memory", ""
    )


def test_mooncake_client_where_there_is_no_cuda(hidden, tmp_path, request):
    """The program needs CUDA's libraries to start at all."""
    if request.config.getoption("--stock"):
        pytest.skip("without Tidepool's stand-ins the program does not start there")
    script = tmp_path / "mooncake_client"
    program = f"{wheels.CUDA13.folder}/mooncake_client"
    script.write_text(f'#!/bin/sh\nexec {shlex.join([*hidden, str(TOOL), "run", "--", program])} "$@"\n')
    script.chmod(0o755)
    with Cluster(wheels.Wheel("bare", wheels.CUDA13.venv, ""), tmp_path) as made:
        environment = {**without_preload(made.store_environment()), "MC_TENT_PLATFORM": "cpu"}
        store = made.client(environment=environment, program=str(script))
        made.wheel = wheels.CUDA13
        engine = made.engine()
        made.warm(engine)
        before = made.counters(engine)
        put_and_get(engine, "short")
        made.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))
        assert store.warnings == []
        assert store.terminate() == 143


def test_pinning_where_there_is_no_cuda(bare):
    store = bare.store(
        environment={
            **without_preload(bare.store_environment()),
            "MC_TENT_PLATFORM": "cpu",
            "MC_STORE_PIN_MEMORY_MAX_BYTES": str(1 << 30),
        }
    )
    (line,) = store.warnings
    assert "pinning would make a CUDA context, and MC_TENT_PLATFORM=cpu wins" in line
    assert store.call(actions.close) == 0


@pytest.mark.parametrize("where", ["memfd", "cumem"])
def test_a_store_makes_no_context_where_there_are_gpus(newest, where):
    """On the double, which writes down every call: at the start, while it serves (stock engines too), and at its end."""
    newest.double = True
    newest.use_segments(where)
    cpu = {"MC_TENT_PLATFORM": "cpu", "MC_STORE_PIN_MEMORY_MAX_BYTES": str(1 << 30)}
    store = newest.store(segment_bytes=64 * MIB, environment={**newest.store_environment(), **cpu})
    engine = newest.engine()
    newest.warm(engine)
    put_and_get(engine, "short")
    stock = newest.engine("stock", environment={})
    put_and_get(stock, "far")
    assert store.call(actions.close) == 0
    assert store.finish() == 0
    made = newest.driver_calls(store)
    assert "cudaPointerGetAttributes" in made, made
    if not newest.stock:
        assert not [call for call in made if call.startswith(CONTEXT)], made
        (line,) = store.warnings
        assert "MC_STORE_PIN_MEMORY_MAX_BYTES is not followed" in line


@pytest.mark.parametrize("where", ["memfd", "cumem"])
def test_nor_does_one_with_a_disk(newest, disk, where):  # noqa: F811
    newest.double = True
    newest.use_segments(where)
    store = store_with_disk(newest, disk, MC_TENT_PLATFORM="cpu")
    engine = newest.engine()
    put_and_evict(engine)
    read_back(newest, engine)
    assert (store.call(actions.close), store.finish()) == (0, 0)
    made = newest.driver_calls(store)
    assert "cudaPointerGetAttributes" in made and not [call for call in made if call.startswith(CONTEXT)], made
    assert newest.stock or store.warnings == []


def test_with_a_disk_where_there_is_no_cuda(bare, disk):  # noqa: F811
    """The store is started by `tidepool run`, with the stand-ins."""
    start = bare.store_environment
    bare.store_environment = lambda **extra: without_preload(start(**extra))
    store = store_with_disk(bare, disk, MC_TENT_PLATFORM="cpu")
    engine = bare.engine(environment={**without_preload(bare.engine_environment()), "MC_TENT_PLATFORM": "cpu"})
    put_and_evict(engine)
    read_back(bare, engine)
    assert (store.call(actions.close), store.finish()) == (0, 0)
    assert store.warnings == []


def test_the_pinned_restore_arena_is_said_to_make_one(newest):
    if newest.stock:
        pytest.skip("Tidepool's line")
    settings = {"MC_TENT_PLATFORM": "cpu", "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES": "1048576"}
    store = newest.store(segment_bytes=64 * MIB, environment={**newest.store_environment(), **settings})
    assert any("MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES" in line and "MC_TENT_PLATFORM=cpu" in line for line in store.warnings)


# ---- what `tidepool run` sets


def run_prints(directory, *command, **environment):
    done = subprocess.run(
        [*command, TOOL, "run", "--store", directory, "--segment", "memfd", "--print"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    lines = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    return lines.get("LD_LIBRARY_PATH")


def test_run_adds_what_is_missing_and_only_that(hidden, tmp_path):
    all_of_them = ":".join(str(FOLDER / folder) for folder in STUBS.values())
    cpu = {"MC_TENT_PLATFORM": "cpu"}
    assert run_prints(tmp_path, *hidden) is None
    assert run_prints(tmp_path, *hidden, MC_TENT_PLATFORM="cuda") is None
    assert run_prints(tmp_path, *hidden, **cpu) == all_of_them
    # At the end; one that is found already is not named, and a second run finds them all.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "libcudart.so.12").symlink_to(FOLDER / "cudart-12" / "libcudart.so.12")
    expected = f"{mine}:{FOLDER / 'cuda-1'}:{FOLDER / 'cudart-13'}"
    assert run_prints(tmp_path, *hidden, LD_LIBRARY_PATH=str(mine), **cpu) == expected
    assert run_prints(tmp_path, *hidden, LD_LIBRARY_PATH=all_of_them, **cpu) is None


# ---- the stand-ins themselves


def test_they_export_what_the_wheels_import():
    done = subprocess.run([ROOT / "stubs" / "check", wheels.CUDA13.folder, wheels.CPU.folder], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_check_finds_what_is_missing(tmp_path):
    source = tmp_path / "module.c"
    source.write_text("int cuNewCall(void); int f(void); int f(void) { return cuNewCall(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", tmp_path / "module.so"], check=True)
    done = subprocess.run([ROOT / "stubs" / "check", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "cuNewCall" in done.stdout


def exports(path):
    lines = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[-1] for line in lines if line.split()[1] == "T"]


@pytest.mark.parametrize("library", STUBS)
def test_every_call_says_that_there_is_no_device(library):
    """Each in turn, in one process, quietly."""
    path = FOLDER / STUBS[library] / library
    answers = {"GetErrorName", "GetErrorString", "RegisterFatBinary", "RegisterFatBinaryEnd", "UnregisterFatBinary",
               "RegisterFunction", "RegisterVar"}  # fmt: skip
    names = [name.split("@")[0] for name in exports(path)]
    ordinary = [name for name in names if name.removeprefix("__").removeprefix("cuda").removeprefix("cu") not in answers]
    assert len(ordinary) >= 26
    nodes = {name.split("@@")[1] for name in exports(path) if "@@" in name}
    assert nodes == (set() if library == "libcuda.so.1" else {library})
    program = (
        "import ctypes, sys; stub = ctypes.CDLL(sys.argv[1]); room = ctypes.create_string_buffer(4096)\n"
        "print(sorted({getattr(stub, name)(room, room, room) for name in sys.argv[2:]}))"
    )
    done = subprocess.run([sys.executable, "-c", program, path, *ordinary], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (f"[{NO_DEVICE}]", "")


def test_the_runtime_answers_in_words_and_about_pointers():
    runtime = ctypes.CDLL(str(FOLDER / "cudart-12" / "libcudart.so.12"))
    runtime.cudaGetErrorString.restype = runtime.cudaGetErrorName.restype = ctypes.c_char_p
    assert runtime.cudaGetErrorName(NO_DEVICE) == b"cudaErrorNoDevice"
    assert b"no CUDA-capable device" in runtime.cudaGetErrorString(NO_DEVICE)
    assert runtime.cudaGetErrorString(12345) == b"unrecognized error code"
    count = ctypes.c_int(7)
    assert runtime.cudaGetDeviceCount(ctypes.byref(count)) == NO_DEVICE and count.value == 0

    class Attributes(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", ctypes.c_void_p), ("on_host", ctypes.c_void_p)]

    found = Attributes(2, 3, 4, 5)
    assert runtime.cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(0x1000)) == NO_DEVICE
    assert (found.type, found.device, found.on_device, found.on_host) == (0, -1, None, 0x1000)


def test_the_driver_answers_in_words():
    driver = ctypes.CDLL(str(FOLDER / "cuda-1" / "libcuda.so.1"))
    text = ctypes.c_char_p()
    assert driver.cuGetErrorName(NO_DEVICE, ctypes.byref(text)) == 0 and text.value == b"CUDA_ERROR_NO_DEVICE"
    assert driver.cuGetErrorString(0, ctypes.byref(text)) == 0 and text.value == b"no error"
    assert driver.cuGetErrorString(999, ctypes.byref(text)) == 1 and text.value is None


def test_cuda_memory_on_the_stand_in_is_refused_as_without_a_driver(bare):
    bare.use_segments("cumem")
    bare.cumem = bare.double = False
    process = bare.process("store", {**without_preload(bare.store_environment()), "MC_TENT_PLATFORM": "cpu"})
    bare.start_master()
    assert process.call(actions.setup, limit_s=60, master=bare.master_address, segment_bytes=64 * MIB) != 0
    assert any("libcuda.so.1 cannot be loaded" in line for line in process.warnings), process.log[-2000:]
