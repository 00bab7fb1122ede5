"""Programs that have Mooncake's store linked into them are told from all others, and only they are served: against a
stand-in that asks of libc what mooncake_client does."""

import glob
import os
import subprocess

import pytest
from harness import status
from harness.cluster import MIB
from harness.wheels import BUILD, LIBRARY, SCARCE

pytestmark = pytest.mark.stores

FOLDER = BUILD / "tests" / "cxx"
BYTES = 64 * MIB
HOST = ["--host=10.1.2.3", "--metadata_server=P2PHANDSHAKE"]


class Program:
    def __init__(self, name, directory, *words, settings=None, preload=LIBRARY, more=None):
        if not (FOLDER / name).exists():
            pytest.skip("no C++ compiler when the build was configured")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "TIDEPOOL_", "LD_"))}
        if settings is None:
            settings = {"MC_STORE_SHM_SEGMENT_DIR": "memfd", "TIDEPOOL_SOCKET_DIR": str(directory)}
        self.directory = str(directory)
        self.log = directory / f"{name}.log"
        self.popen = subprocess.Popen(
            [FOLDER / name, str(BYTES), *words],
            env={**plain, **settings, **(more or {}), "LD_PRELOAD": str(preload)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(self.log, "wb"), text=True,
        )
        self.read()

    def read(self):
        port, self.segment, error = self.popen.stdout.readline().split()
        self.port, self.error = int(port), int(error)
        return self

    def tell(self, word):
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()
        return self.read()

    def finish(self):
        self.popen.stdin.close()
        return self.popen.wait(10)

    @property
    def lines(self):
        return [line for line in self.log.read_text().splitlines() if line.startswith("tidepool")]

    @property
    def status(self):
        return status.read(self.directory).get(self.popen.pid)


@pytest.fixture
def start(tmp_path):
    started = []
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)

    def start(name="program", *words, **rest):
        started.append(Program(name, folder, *words, **rest))
        return started[-1]

    yield start
    for program in started:
        program.popen.kill()
        program.popen.wait()


def moved(program, name):
    """An engine finds it by this name, and what it writes and reads goes through shared memory."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "TIDEPOOL_", "LD_"))}
    env.update(LD_PRELOAD=str(LIBRARY), SEGMENT_BYTES=str(BYTES), TIDEPOOL_SOCKET_DIR=program.directory)
    env["MC_TENT_CONF"] = '{"transports":{"shm":{"enable":true}}}'
    done = subprocess.run(
        [FOLDER / "border_56", "engine", name, program.segment, "roundtrip"], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "ok", (done, program.log.read_text())


@pytest.mark.parametrize("name", ["program", "program_exporting"])
def test_it_is_served(start, name):
    program = start(name, *HOST)
    assert program.status.name == f"10.1.2.3:{program.port}"
    assert [segment["base"] for segment in program.status.segments] == [int(program.segment, 16)]
    moved(program, program.status.name)
    assert program.finish() == 0
    assert program.status is None and status.sockets(program.directory) == []
    assert program.lines == []


@pytest.mark.parametrize(
    "words",
    [
        ["-host", "10.1.2.3", "-metadata_server", "P2PHANDSHAKE"],
        ["--host", "10.1.2.3:99", "--metadata_server=P2PHANDSHAKE"],
        ["--host=1.1.1.1", "--metadata_server=http://x", *HOST],
        ["--hosts=1", "-host", "10.1.2.3", "--port=5", "--metadata_server=P2PHANDSHAKE", "--device_names", ""],
    ],
    ids=lambda words: " ".join(words),
)
def test_flags_as_they_may_be_written(start, words):
    program = start("program", *words)
    assert program.status.name == f"10.1.2.3:{program.port}"


def test_a_segment_ends_with_its_memory_and_a_new_one_is_served(start):
    program = start("program", *HOST)
    assert program.tell("free").status.segments == []
    assert "memfd:tidepool-segment" not in open(f"/proc/{program.popen.pid}/maps").read()
    for _ in range(3):
        assert len(program.tell("again").status.segments) == 1
        moved(program, program.status.name)
        assert program.tell("free").status.segments == []
    assert program.finish() == 0


def test_a_forked_child_frees_nothing_of_its_parents(start):
    program = start("program", *HOST)
    assert program.tell("fork").error == 0
    assert len(program.status.segments) == 1
    moved(program, program.status.name)


def test_without_a_name_it_runs_as_stock_and_says_so(start):
    program = start("program")
    assert int(program.segment, 16) and program.status.name == ""
    assert len(program.lines) == 1 and "--host and --metadata_server" in program.lines[0]
    assert program.finish() == 0


@pytest.mark.parametrize("word", ["listen", "again"])
def test_a_name_that_cannot_be_learned_once(start, word):
    """It is asked for again when the program listens somewhere else, and when it makes another segment."""
    preload = f"{SCARCE}:{LIBRARY}"
    program = start("program", *HOST, preload=preload, more={"SCARCE": "open=cmdline:1:1"})
    assert program.status.name == ""
    assert len(program.lines) == 1 and "too many open files" in program.lines[0]
    program.tell(word)
    assert program.status.name == f"10.1.2.3:{program.port}"
    moved(program, program.status.name)


def test_a_wrong_setting_fails_the_allocation(start):
    program = start("program", *HOST, settings={"MC_STORE_SHM_SEGMENT_DIR": "/nonexistent/tidepool"})
    assert program.segment == "0" and program.error == 12
    assert len(program.lines) == 1 and "/nonexistent/tidepool" in program.lines[0]


def untouched(program):
    assert int(program.segment, 16) and program.tell("small").tell("free").tell("again")
    maps = open(f"/proc/{program.popen.pid}/maps").read()
    assert "memfd:" not in maps and "libtidepool" in maps
    assert [name for name in status.names(program.directory) if not name.endswith(".log")] == []
    assert program.finish() == 0
    assert program.lines == []


def test_another_program_is_left_alone(start):
    untouched(start("program_other", *HOST))


@pytest.mark.parametrize("conf", [None, '{"transports":{"shm":{"enable":true,"socket_dir":"%s"}}}'], ids=["nothing", "engine"])
def test_a_process_that_is_no_store_is_left_alone(start, tmp_path, conf):
    settings = {"MC_TENT_CONF": conf % (tmp_path / "d")} if conf else {}
    untouched(start("program", *HOST, settings=settings))


def test_an_allocator_before_the_library_is_named(start):
    found = sorted(glob.glob("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"))
    if not found:
        pytest.skip("no jemalloc on this machine")
    program = start("program", *HOST, preload=f"{found[0]}:{LIBRARY}")
    assert int(program.segment, 16)
    assert len(program.lines) == 1 and "libjemalloc" in program.lines[0] and "LD_PRELOAD" in program.lines[0]


def test_an_allocator_after_the_library_does_not_matter(start):
    found = sorted(glob.glob("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"))
    if not found:
        pytest.skip("no jemalloc on this machine")
    program = start("program", *HOST, preload=f"{LIBRARY}:{found[0]}")
    moved(program, program.status.name)
    for _ in range(3):
        assert program.tell("free").status.segments == []
        program.tell("again")
        moved(program, program.status.name)
    assert program.finish() == 0
