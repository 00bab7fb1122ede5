"""One driven process: calls go in over one pipe as JSON lines, results come back over another.

A call has a time limit. The process can be stopped, killed and awaited at any moment, also while a call runs.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import time

HARNESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CALL_LIMIT_S = 30.0


class CallFailed(Exception):
    """The function raised; the text is the worker's traceback."""


class Logged:
    """A process, `popen`, whose standard error goes to the file `log_path`."""

    @property
    def pid(self):
        return self.popen.pid

    @property
    def log(self):
        with open(self.log_path, errors="replace") as file:
            return file.read()

    @property
    def tidepool_lines(self):
        return [line for line in self.log.splitlines() if line.startswith("tidepool")]

    @property
    def warnings(self):
        """What Tidepool has said aloud in this process."""
        return [line for line in self.tidepool_lines if "] warn: " in line or "] error: " in line]


class ProcessEnded(Exception):
    """The process ended before it answered."""


class CallTooLong(Exception):
    """No answer within the time limit."""


def die_with_parent():
    # PR_SET_PDEATHSIG: nothing outlives the test run, even one that is killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def open_files(pid):
    """What the fds of a process stand for, as the kernel names it; those that are closed meanwhile are left out."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    return found


class Pending:
    """A call that was sent and has not been awaited yet."""

    def __init__(self, process, number):
        self.process = process
        self.number = number

    def result(self, limit_s=CALL_LIMIT_S):
        return self.process.await_result(self.number, limit_s)


class Process(Logged):
    def __init__(self, name, python, environment, log_path, user=None):
        self.name = name
        self.log_path = log_path
        reply_read, reply_write = os.pipe()
        log = open(log_path, "ab")
        paths = [HARNESS, environment["PYTHONPATH"]] if "PYTHONPATH" in environment else [HARNESS]
        environment = dict(environment, PYTHONPATH=os.pathsep.join(paths))
        self.popen = subprocess.Popen(
            [python, "-m", "harness.worker", str(reply_write)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=[reply_write],
            preexec_fn=die_with_parent,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        log.close()
        os.close(reply_write)
        self.replies = reply_read
        self.buffered = b""
        self.answers = {}
        self.next_number = 0

    def start(self, function, /, **arguments):
        number = self.next_number
        self.next_number += 1
        call = {
            "number": number,
            "module": function.__module__,
            "function": function.__name__,
            "arguments": arguments,
        }
        try:
            self.popen.stdin.write(json.dumps(call).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None
        return Pending(self, number)

    def call(self, function, /, limit_s=CALL_LIMIT_S, **arguments):
        return self.start(function, **arguments).result(limit_s)

    def await_result(self, number, limit_s):
        deadline = time.monotonic() + limit_s
        while number not in self.answers:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.replies], [], [], left)[0]
            if not ready:
                raise CallTooLong(f"{self.name}: no answer within {limit_s} s\n{self.log[-3000:]}")
            chunk = os.read(self.replies, 1 << 16)
            if not chunk:
                raise self.ended()
            self.buffered += chunk
            *lines, self.buffered = self.buffered.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                self.answers[answer["number"]] = answer
        answer = self.answers.pop(number)
        if "error" in answer:
            raise CallFailed(f"{self.name}: {answer['error']}")
        return answer["result"]

    def ended(self):
        code = self.popen.wait(5)
        return ProcessEnded(f"{self.name} ended with {code}\n{self.log[-3000:]}")

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """kill -9 and reap."""
        if self.popen.poll() is None:
            self.popen.kill()
        return self.popen.wait(10)

    def finish(self, limit_s=20.0):
        """Close the pipe of calls, by which the worker leaves its loop, and return the exit status."""
        self.popen.stdin.close()
        return self.popen.wait(limit_s)

    def dispose(self):
        self.kill()
        os.close(self.replies)
        if not self.popen.stdin.closed:
            try:
                self.popen.stdin.close()
            except BrokenPipeError:
                pass
