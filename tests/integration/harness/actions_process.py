"""What a worker can be told about itself, and to do to itself: fds, threads, mappings, forks."""

import os
import sys


def fds(w):
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def threads(w):
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            found.append(file.read().strip())
    return sorted(found)


def mapped_files(w):
    with open("/proc/self/maps") as file:
        rows = [line.split(None, 5) for line in file]
    return sorted({row[5].strip() for row in rows if len(row) == 6})


def is_mapped(w, address):
    """Does anything of this process lie at this address?"""
    with open("/proc/self/maps") as file:
        bounds = [[int(part, 16) for part in line.split()[0].split("-")] for line in file]
    return any(low <= address < high for low, high in bounds)


def fork_and_exit(w):
    """A child that does nothing but leave, as multiprocessing and subprocess do."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def seqpacket_sockets():
    """The Unix sockets of this process of the type that Tidepool uses (5 is SOCK_SEQPACKET)."""
    with open("/proc/self/net/unix") as file:
        rows = [line.split() for line in file][1:]
    inodes = {row[6] for row in rows if int(row[4], 16) == 5}
    return [link for link in fds(None).values() if link.startswith("socket:[") and link[8:-1] in inodes]


def tidepool_sockets(w):
    return len(seqpacket_sockets())


def fork_and_look(w):
    """What a child sees of itself: its threads, and the sockets of Tidepool that it still holds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, f"{len(threads(w))} {len(seqpacket_sockets())}".encode())
        finally:
            os._exit(0)
    os.close(write)
    thread_count, socket_count = os.read(read, 100).decode().split()
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"code": code, "threads": int(thread_count), "tidepool_sockets": int(socket_count)}


def fork_and_stay(w):
    """A child that outlives its parent; returns its pid."""
    import time

    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    return child


def multiprocessing_fork(w):
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, -2, -3])


def run_subprocess(w):
    import subprocess

    return subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout.strip()


def environment(w, name):
    return os.environ.get(name)
