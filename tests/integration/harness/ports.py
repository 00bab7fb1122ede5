"""Ports for what tests and benchmarks start: none twice in a process, and none that a neighbouring worker of pytest may
have been given and not yet bound."""

import os
import random
import socket

# Outside the ranges of the kernel (from 32768) and of Mooncake (15000-17000).
FIRST, WORKERS, EACH = 18000, 8, 1750

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
_next = random.randrange(EACH)


def free_port():
    """A port that nobody listens on."""
    global _next
    while True:
        port = FIRST + _worker * EACH + _next
        _next = (_next + 1) % EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
