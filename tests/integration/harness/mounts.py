"""File systems that a test mounts for itself: tmpfs, and hugetlbfs with pages that the kernel is asked for."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time

import pytest

# Not /proc/sys/vm/nr_hugepages, which leaves out pages that are held though the pool was made smaller ("surplus").
POOL = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
FREE = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
PROMISED = "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages"
SURPLUS = "/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages"
# The pool belongs to the machine: one test at a time (tests/unit/test_hugetlbfs.c takes the same lock).
LOCK = "/tmp/hugepages.lock"


@contextlib.contextmanager
def mounted(kind, options):
    folder = tempfile.mkdtemp(prefix="tidepool-mount-")
    try:
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", folder], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
    finally:
        os.rmdir(folder)


def number(path):
    with open(path) as file:
        return int(file.read())


@contextlib.contextmanager
def huge_pages(count, pool=POOL, free=FREE, size="2 MiB"):
    with open(LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Pages that processes of the test before still held when it gave its own back count in the pool until they end, which
        # is waited for: they would come to be free in the middle of this one.
        surplus = free.replace("free_", "surplus_")
        deadline = time.monotonic() + 2
        while number(surplus) and time.monotonic() < deadline:
            time.sleep(0.02)
        before = number(pool) - number(surplus)
        try:
            for _ in range(4):
                missing = count - number(free)
                if missing > 0:
                    # Memory that lies in pieces is put together by the first try, and found by the next.
                    with open(pool, "w") as file:
                        file.write(str(number(pool) + missing))
            if number(free) < count:
                pytest.skip(f"the kernel has {number(free)} huge pages of {size} to give, not {count}")
            yield
        except OSError as error:
            if error.filename != pool:
                raise
            pytest.skip(f"may not ask the kernel for huge pages of {size}: {error}")
        finally:
            with contextlib.suppress(OSError), open(pool, "w") as file:
                file.write(str(before))


def gigantic_pages(count):
    """Pages of 1 GiB: the processor has to have them, and so much memory has to lie together."""
    pool = "/sys/kernel/mm/hugepages/hugepages-1048576kB"
    if not os.path.isdir(pool):
        pytest.skip("no pages of 1 GiB here")
    return huge_pages(count, f"{pool}/nr_hugepages", f"{pool}/free_hugepages", "1 GiB")


@contextlib.contextmanager
def segment_folder(mode, mib):
    """What MC_STORE_SHM_SEGMENT_DIR is set to for segments of up to so many MiB."""
    with contextlib.ExitStack() as stack:
        if mode == "hugetlbfs":
            stack.enter_context(huge_pages(mib // 2))
            yield stack.enter_context(mounted("hugetlbfs", "pagesize=2M,mode=0700"))
        elif mode == "tmpfs":
            yield stack.enter_context(mounted("tmpfs", "mode=0700"))
        else:
            yield mode
