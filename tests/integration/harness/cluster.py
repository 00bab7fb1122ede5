"""A Mooncake cluster on this machine: a master, stores and engines as processes of a stock wheel, with or without
Tidepool, all gone when the test ends.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from . import actions_engine, actions_store, status
from .ports import free_port
from .process import Process, die_with_parent
from .program import Program
from .wheels import BUILD, LIBRARY, ROOT

DOUBLE = BUILD / "tests" / "fakecuda"
sys.path.insert(0, str(ROOT / "tests" / "fakecuda"))
import fakecuda  # noqa: E402

MIB = 1 << 20

# Mooncake's master forgets a store that has not been heard for so long: a dead one, but also a living one on a machine
# that stands still.
FORGETTING = ("-client_ttl", "5")
FORGOTTEN_S = 6.0


def await_port(port, process, limit_s=15.0, host="127.0.0.1"):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode} instead of listening on {port}")
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port} after {limit_s} s")


class Cluster:
    """Use as a context manager. `directory` is the one that Tidepool's processes share."""

    def __init__(self, wheel, folder, preload=None, stock=False):
        self.wheel = wheel
        # Stock: the same calls without Tidepool, to tell its faults from Mooncake's.
        self.stock = stock
        self.folder = str(folder)
        self.directory = os.path.join(self.folder, "tidepool")
        os.mkdir(self.directory, 0o700)
        self.preload = str(LIBRARY) if preload is None else preload
        self.processes = []
        self.extra_folders = []
        self.cumem = False
        # Processes find the double of the CUDA libraries, whatever segments are made of.
        self.double = False
        self.where = "memfd"
        self.master = None
        self.master_address = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.dispose()
        if self.master is not None:
            self.master.kill()
            self.master.wait(10)
        for folder in self.extra_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def common_directory(self):
        """A directory that every user can enter (the tests' own folders are closed)."""
        made = tempfile.mkdtemp(prefix="tidepool-test-")
        os.chmod(made, 0o755)
        self.extra_folders.append(made)
        return made

    # ---- environments

    def use_segments(self, where):
        """What segments are made of from now on: memfd, a directory, or cumem (on the double of the CUDA libraries)."""
        self.where = where
        self.cumem = where == "cumem"
        self.double = self.double or self.cumem

    def segments(self):
        """Read when a process starts: tests put other directories in place of the one they were given."""
        if self.where == "cumem":
            return {"MC_STORE_CUMEM_SOCKET_DIR": self.directory, "MC_STORE_CUMEM_PIECE_BYTES": "64M"}
        return {"MC_STORE_SHM_SEGMENT_DIR": self.where, "TIDEPOOL_SOCKET_DIR": self.directory}

    def whole_environment(self, name, environment):
        whole = {**self.wheel.environment(), **environment}
        return fakecuda.environment(DOUBLE, self.driver_log(name), whole) if self.double else whole

    def driver_log(self, name):
        return os.path.join(self.folder, f"{name}.jsonl")

    def driver_calls(self, process):
        """On the double: the names of the calls that this process has made of the CUDA libraries."""
        return {line["call"] for line in fakecuda.read_log(self.driver_log(process.name))}

    def assert_no_rule_broken(self):
        """On the double: no call of the driver was wrong, in any process."""
        for process in self.processes if self.double else []:
            assert not fakecuda.broken_rules(self.driver_log(process.name)), process.name

    def store_environment(self, **extra):
        """A process that lends memory. Values of None take a variable away."""
        base = {
            "LD_PRELOAD": self.preload,
            **self.segments(),
            "TIDEPOOL_LOG": "info",
        }
        return {} if self.stock else self.merged(base, extra)

    def engine_environment(self, conf=None, **extra):
        """A process that uses the memory of others."""
        if conf is None:
            # The double of the CUDA libraries runs no copy kernel of ours.
            extra_keys = {"copy_engine": "dma"} if self.double else {}
            conf = {"transports": {"shm": {"enable": True, "socket_dir": self.directory, **extra_keys}}}
        base = {
            "LD_PRELOAD": self.preload,
            "MC_TENT_CONF": conf if isinstance(conf, str) else json.dumps(conf),
            "TIDEPOOL_LOG": "info",
        }
        return {} if self.stock else self.merged(base, extra)

    def both_environment(self, **extra):
        return dict(self.engine_environment(), **self.store_environment(), **extra)

    @staticmethod
    def merged(base, extra):
        return {name: value for name, value in {**base, **extra}.items() if value is not None}

    # ---- processes

    def start_master(self, *flags):
        port, metrics = free_port(), free_port()
        self.master_address = f"127.0.0.1:{port}"
        log = open(os.path.join(self.folder, "master.log"), "ab")
        self.master = subprocess.Popen(
            [f"{self.wheel.folder}/mooncake_master", "-port", str(port), "-metrics_port", str(metrics)]
            + ["-default_kv_lease_ttl", "5000", *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.wheel.environment(),
            preexec_fn=die_with_parent,
        )
        log.close()
        await_port(port, self.master)

    def process(self, name, environment=None, user=None):
        """A process of the wheel that has done nothing yet. No environment: stock."""
        whole = self.whole_environment(name, environment or {})
        log = os.path.join(self.folder, f"{name}.log")
        if user is not None:
            open(log, "ab").close()
            os.chown(log, user, user)
        python = self.wheel.python
        if user is not None:
            python, paths = self.wheel.python_for(user)
            whole["PYTHONPATH"] = os.pathsep.join(paths)
        made = Process(name, python, whole, log, user)
        self.processes.append(made)
        return made

    def store(self, name="store", segment_bytes=512 * MIB, environment=None, **setup):
        """A store process with Tidepool (or the given environment; {} is stock)."""
        if self.master is None:
            self.start_master()
        made = self.process(name, self.store_environment() if environment is None else environment)
        self.set_up(made, segment_bytes=segment_bytes, local_bytes=16 * MIB, **setup)
        return made

    def client(self, name="client", environment=None, segment="256MB", metadata="P2PHANDSHAKE", host="127.0.0.1", program=None, **flags):
        """The wheel's mooncake_client as a store, ready for its dummy clients. A flag of None is left out; `program` starts
        it in another way. Returns it with `.port`, at which it serves them."""
        program = program or f"{self.wheel.folder}/mooncake_client"
        if not os.path.exists(program):
            pytest.skip("this wheel has no mooncake_client")
        if self.master is None:
            self.start_master()
        if self.stock or environment is None:
            environment = self.store_environment()
        port = free_port()
        given = dict(
            master_server_address=self.master_address, metadata_server=metadata, host=host, global_segment_size=segment, port=port
        )
        words = [f"--{flag}={value}" for flag, value in {**given, **flags}.items() if value is not None]
        log = os.path.join(self.folder, f"{name}.log")
        made = Program(name, [program, *words], self.whole_environment(name, environment), log)
        made.port = port
        self.processes.append(made)
        await_port(port, made.popen, 30.0, "::1" if host == "::1" else "127.0.0.1")
        return made

    def engine(self, name="engine", environment=None, local_bytes=128 * MIB, **setup):
        """A store client without memory of its own, as inference engines are."""
        made = self.process(name, self.engine_environment() if environment is None else environment)
        self.set_up(made, segment_bytes=0, local_bytes=local_bytes, **setup)
        return made

    def set_up(self, process, **setup):
        result = process.call(actions_store.setup, limit_s=60, master=self.master_address, **setup)
        assert result == 0, f"{process.name}: setup returned {result}\n{process.log[-3000:]}"

    def transfer_engine(self, name, environment=None):
        """A process with mooncake.engine; returns it and the name by which peers open it."""
        made = self.process(name, self.engine_environment() if environment is None else environment)
        return made, made.call(actions_engine.setup)

    # ---- proof of the path

    def warm(self, engine, stores=1, size=4096):
        """Move something, so that the engine opens its stores, and wait until it has mapped them whole."""
        keys = [f"warm-{engine.name}-{index}" for index in range(4 * stores)]
        results = engine.call(actions_store.write_keys, keys=keys, sizes=[size] * len(keys), seed=1)
        assert not any(results), results
        if not self.stock:
            status.until_attached(self.directory, engine, stores)

    def counters(self, process):
        return {} if self.stock else status.of(self.directory, process)

    def assert_local(self, process, before, written=0, read=0):
        """Since `before`, exactly these bytes went through shared memory and none by Mooncake's transport."""
        if self.stock:
            return
        after = self.counters(process)
        path = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert path.get("local_write_bytes", 0) == written, path
        assert path.get("local_read_bytes", 0) == read, path
        assert path.get("forward_bytes", 0) == 0, path
        assert path.get("forward_requests", 0) == 0, path
