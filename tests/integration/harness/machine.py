"""The time in which this machine ran, by which bounds of seconds are judged.

A virtual machine stands still for seconds now and then, and a busy one lets nobody run; the clock goes on meanwhile.
A thread that sleeps for 20 ms at a time sees it. Times are those of time.monotonic(), which all processes share.
"""

import threading
import time

TICK_S = 0.02
STILL_S = 0.1  # a tick that took longer: the rest of it does not count


class Witness(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True, name="witness")
        self.stills = []
        self.last = time.monotonic()
        self.start()

    def run(self):
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - self.last > STILL_S:
                self.stills.append((self.last + TICK_S, now))
            self.last = now

    def ran(self, start, end):
        while self.last < end:
            time.sleep(TICK_S / 2)
        return end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in list(self.stills))


witness = Witness()


def ran_s(start, end=None):
    """How long this machine ran between two times, or since one."""
    return witness.ran(start, time.monotonic() if end is None else end)


def undisturbed(run, still_s=0.3, tries=4):
    """What `run` returns. One that fails while the machine stands still, of what takes its time by nature, says nothing
    and is done again."""
    while True:
        start = time.monotonic()
        tries -= 1
        try:
            return run()
        except Exception:
            still = time.monotonic() - start - ran_s(start)
            if still < still_s or tries == 0:
                raise
            print(f"the machine stood still for {still:.1f} s: once more")


def longest_s(result):
    """Of what `hammer` returns: the longest that a call took."""
    return max(ran_s(*call) for call in result["longest"])


def sleep(seconds, since=None):
    """Until this machine ran for that long, from now or since a time: others had it to do what they do in it."""
    start = time.monotonic() if since is None else since
    while ran_s(start) < seconds:
        time.sleep(max(TICK_S, seconds - ran_s(start)))
