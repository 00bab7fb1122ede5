"""A program that runs by itself, such as mooncake_client: it is started, looked at, and ended."""

import os
import signal
import subprocess

from .process import Logged, die_with_parent


class Program(Logged):
    def __init__(self, name, command, environment, log_path):
        self.name = name
        self.log_path = log_path
        with open(log_path, "ab") as log:
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent
            )

    def signal(self, number):
        os.kill(self.pid, number)

    def terminate(self, limit_s=10.0):
        """SIGTERM, and the exit status as a shell shows it."""
        self.popen.send_signal(signal.SIGTERM)
        code = self.popen.wait(limit_s)
        return 128 - code if code < 0 else code

    def kill(self):
        """kill -9 and reap."""
        if self.popen.poll() is None:
            self.popen.kill()
        return self.popen.wait(10)

    def dispose(self):
        self.kill()
