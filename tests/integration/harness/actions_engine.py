"""What a worker can be told to do with mooncake.engine, the transfer engine without the store."""

import time

import numpy as np

from .memory import Buffer, random_bytes


def setup(w, host="127.0.0.1"):
    """Returns the name by which peers open this engine."""
    from mooncake.engine import TransferEngine

    w.engine = TransferEngine()
    assert w.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
    return f"{host}:{w.engine.get_rpc_port()}"


def register(w, name, size, seed=None):
    """A registered buffer of this process under a name; returns its address."""
    if name in w.kept:
        w.engine.unregister_memory(w.kept.pop(name).address)
    buffer = Buffer(size)
    if seed is None:
        buffer.poison()
    else:
        buffer.bytes[:] = random_bytes(size, seed)
    assert w.engine.register_memory(buffer.address, size) == 0
    w.kept[name] = buffer
    return buffer.address


def holds(w, name, seed, first=0, size=None):
    """Does the buffer hold what this seed makes, and are its guards whole?"""
    buffer = w.kept[name]
    size = buffer.size - first if size is None else size
    expected = random_bytes(size, seed)
    return bool(np.array_equal(buffer.bytes[first : first + size], expected)) and buffer.guards_intact


def poison(w, name):
    w.kept[name].poison()


def cut(buffer, address, size, count):
    """`count` neighbouring slices of the local buffer and of the peer's memory."""
    step = size // count
    starts = [index * step for index in range(count)]
    lengths = [step] * (count - 1) + [size - step * (count - 1)]
    return [buffer.address + s for s in starts], [address + s for s in starts], lengths


def transfer(w, way, target, name, address, size, count=5, write=True):
    """Move `size` bytes between the named buffer and a peer's address by one of the engine's calls; 0 is success."""
    buffer = w.kept[name]
    engine = w.engine
    if way == "sync":
        call = engine.transfer_sync_write if write else engine.transfer_sync_read
        return call(target, buffer.address, address, size)
    if way == "submit":
        assert write, "there is no submit for reads"
        return await_transfer(engine, engine.transfer_submit_write(target, buffer.address, address, size))
    if way == "batch_sync":
        call = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read
        return call(target, *cut(buffer, address, size, count))
    if way == "batch_async":
        call = engine.batch_transfer_async_write if write else engine.batch_transfer_async_read
        batch = call(target, *cut(buffer, address, size, count))
        return await_batch(engine, batch)
    if way == "notify":
        from mooncake.engine import TransferNotify, TransferOpcode

        opcode = TransferOpcode.Write if write else TransferOpcode.Read
        note = TransferNotify("tidepool", "done")
        return engine.batch_transfer_sync(target, *cut(buffer, address, size, count), opcode, note)
    raise ValueError(way)


def await_transfer(engine, batch, limit_s=10):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        status = engine.transfer_check_status(batch)
        if status:
            return 0 if status == 1 else status
    raise TimeoutError("transfer_check_status never said that the transfer was done")


def await_batch(engine, batch):
    assert batch, "batch_transfer_async refused"
    return engine.get_batch_transfer_status([batch])
