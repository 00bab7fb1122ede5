"""File systems that a test mounts for itself: tmpfs, and hugetlbfs with pages that the kernel is asked for."""

import contextlib
import fcntl
import os
import subprocess
import tempfile

import pytest

POOL = "/proc/sys/vm/nr_hugepages"
FREE = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
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
def huge_pages(count):
    with open(LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = number(POOL)
        try:
            with open(POOL, "w") as file:
                file.write(str(before + count))
            if number(FREE) < count:
                pytest.skip(f"the kernel has {number(FREE)} huge pages of 2 MiB to give, not {count}")
            yield
        except PermissionError:
            pytest.skip("may not ask the kernel for huge pages")
        finally:
            with contextlib.suppress(PermissionError), open(POOL, "w") as file:
                file.write(str(before))


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
