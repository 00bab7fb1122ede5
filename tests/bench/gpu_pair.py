#!/usr/bin/env python3
"""Two engines on two GPUs of one host, with one store: what each reaches alone, and both at once.

Rounds of a shape go on for some seconds on one GPU, on the other, and on both together; the medians of the rounds that
lie within the other's are compared. Beside them stands the same for plain copies between pinned memory and each GPU:
what the host itself allows. Bytes are compared before and after.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile

import gpu_bench

SHAPES = ("16M", "v32")


class Pair(gpu_bench.Side):
    """The side's engine is on the first GPU; another one on the second."""

    def start(self, wheel_folder):
        super().start(wheel_folder)
        first = self.engine
        self.engine = gpu_bench.Process("tidepool-engine-1", self.options.wheel_python, self.environment(False), self.folder)
        self.processes.append(self.engine)
        self.engine.call("hello", limit_s=120, gpu=not self.options.host, device=1, owner="second-")
        result = self.engine.call("setup", segment_bytes=0, local_bytes=64 * gpu_bench.MIB, master=self.master_address)
        if result != 0:
            raise gpu_bench.Failure(f"{self.engine.name}: setup gave {result}\n{self.engine.tail()}")
        self.attach()
        self.engines = [first, self.engine]

    def forwarded(self):
        """Bytes that went by Mooncake's transport, of each engine."""
        found = []
        for self.engine in self.engines:
            found.append(self.counters()["forward_bytes"])
        return found


def at_once(engines, do, limit_s=120, **arguments):
    for engine in engines:
        engine.ask(do, **arguments)
    return [engine.answer(do, limit_s) for engine in engines]


def rates(spans, size, others=None):
    """GB/s of the median round; with others' spans, of those that lie within their time."""
    if others:
        first, last = others[0][0], others[-1][1]
        spans = [span for span in spans if span[0] >= first and span[1] <= last]
    return size / statistics.median(end - start for start, end in spans) / 1e9 if spans else 0.0


def measure(shape, pair, seconds):
    """{way: {alone: [..], together: [..], share: [..]}} in GB/s."""
    job, keys, found = shape.job(), shape.keys, {}
    for engine in pair.engines:
        engine.call("prepare", limit_s=120, shape=job, keys=keys)
        engine.call("repeat", way="put", keys=keys, keys_a_call=keys, seconds=0.5)  # makes its GPU ready
    before = pair.forwarded()
    for way in ("put", "get"):
        if way == "get":
            at_once(pair.engines, "put", keys=keys, keys_a_call=keys)
        arguments = {"way": way, "keys": keys, "keys_a_call": keys, "seconds": seconds}
        alone = [rates(engine.call("repeat", **arguments), shape.total) for engine in pair.engines]
        spans = at_once(pair.engines, "repeat", **arguments)
        together = [rates(spans[index], shape.total, spans[1 - index]) for index in (0, 1)]
        found[way] = {"alone": alone, "together": together, "share": [b / a for a, b in zip(alone, together)]}
    for engine in pair.engines:
        got = engine.call("get", keys=keys, keys_a_call=keys)
        if got["state"] != "equal":
            raise gpu_bench.Failure(f"{engine.name}: after the gets: {got['state']}")
        engine.call("forget")
    pair.engines[0].call("remove")
    found["forwarded"] = [after - one for one, after in zip(before, pair.forwarded())]
    return found


def limits(pair, host):
    alone = [engine.call("limit", host=host, seconds=1) for engine in pair.engines]
    together = at_once(pair.engines, "limit", host=host, seconds=1)
    return {way: {"alone": [one[way] for one in alone], "together": [one[way] for one in together],
                  "share": [b[way] / a[way] for a, b in zip(alone, together)]} for way in ("put", "get")}


def show(name, found):
    for way in ("put", "get"):
        of = found[way]
        print(f"{name if way == 'put' else '':12} {way}   "
              + "   ".join(f"{a:6.1f} {b:6.1f} {share:5.2f}" for a, b, share in zip(of["alone"], of["together"], of["share"])),
              flush=True)
    if any(found.get("forwarded", ())):
        print(f"             PROBLEM: bytes went by Mooncake's transport: {found['forwarded']}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = os.path.join(gpu_bench.ROOT, "build")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement (default 2)")
    parser.add_argument("--scale", type=float, default=1, help="share of the keys (default 1)")
    parser.add_argument("--wheel-python", default=sys.executable, help="a Python that imports mooncake (default: this one)")
    parser.add_argument("--lib", default=os.path.join(beside, "libtidepool.so"), help="default: %(default)s")
    parser.add_argument("--tool", default=os.path.join(beside, "tidepool"), help="default: %(default)s")
    parser.add_argument("--store-gib", type=float, default=6, help="the store's segment (default 6)")
    parser.add_argument("--store-memory", choices=["cumem", "memfd"], default="cumem", help="default: %(default)s")
    parser.add_argument("--host", action="store_true", help="everything in host memory: no GPU is used")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the processes' logs there")
    return parser.parse_args()


def main():
    options = arguments()
    gpu_bench.end_on_signals()
    options.null_lib = None
    wheel = gpu_bench.wheel_folder(options.wheel_python)
    shapes = [shape for shape in gpu_bench.SHAPES if shape.name in options.shapes.split(",")]
    for shape in shapes:
        shape.keys = max(1, round(shape.keys * options.scale))
        shape.total = shape.keys * shape.key_bytes
    report = {}
    folder = tempfile.mkdtemp(prefix="tidepool-pair-")
    try:
        pair = Pair("tidepool", options, folder, wheel)
        try:
            print(f"GB/s              {pair.hello['device']}, alone / with the other / share, of each")
            report["pinned copies"] = limits(pair, options.host)
            show("limit", report["pinned copies"])
            for shape in shapes:
                report[shape.name] = measure(shape, pair, options.seconds)
                show(shape.name, report[shape.name])
        finally:
            pair.end()
            if options.logs:
                shutil.copytree(pair.folder, options.logs, ignore=lambda *_: ["sockets"], dirs_exist_ok=True)
    except gpu_bench.Failure as error:
        print(f"gpu_pair: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
