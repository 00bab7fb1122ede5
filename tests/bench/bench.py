"""Medians of paired runs: stock Mooncake, Tidepool, and a plain memcpy of the same blocks, by turns in one run."""

import argparse
import json
import os
import sys
import tempfile
import time

from harness import measure, wheels

PUT_AT_LEAST, GET_AT_LEAST, OF_MEMCPY_AT_LEAST = 6.0, 4.0, 0.8


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write machine, settings and every measured time here")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each side a shape (default 5)")
    parser.add_argument("--scale", type=float, default=0.5, help="share of the keys of the engines' shapes (default 0.5)")
    parser.add_argument("--shapes", help="names, separated by commas (default: all)")
    parser.add_argument("--check", action="store_true", help="only the four core shapes, and fail below the bounds:"
                        f" put {PUT_AT_LEAST}x and get {GET_AT_LEAST}x of stock, {OF_MEMCPY_AT_LEAST} of memcpy from 1 MiB up")
    return parser.parse_args()


def chosen(options):
    shapes = measure.CORE + ([] if options.check else [shape.scaled(options.scale) for shape in measure.ENGINES])
    if options.shapes:
        names = options.shapes.split(",")
        unknown = set(names) - {shape.name for shape in shapes}
        if unknown:
            sys.exit(f"bench: no such shape: {', '.join(sorted(unknown))}")
        shapes = [shape for shape in shapes if shape.name in names]
    return shapes


def misses(row):
    """What this row does not reach, in words."""
    found = []
    for direction, bound in (("put", PUT_AT_LEAST), ("get", GET_AT_LEAST)):
        if row[direction]["ratio"] < bound:
            found.append(f"{row['shape']} {direction}: {row[direction]['ratio']}x of stock, at least {bound} wanted")
        if row["block_bytes"] >= 1 << 20 and row[direction]["of_memcpy"] < OF_MEMCPY_AT_LEAST:
            found.append(
                f"{row['shape']} {direction}: {row[direction]['of_memcpy']} of memcpy, {OF_MEMCPY_AT_LEAST} wanted"
            )
    if row["forward_bytes"]:
        found.append(f"{row['shape']}: {row['forward_bytes']} bytes went by Mooncake's transport")
    return found


def main():
    options = arguments()
    shapes = chosen(options)
    machine = measure.machine()
    print("bench: {processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}, load {load}".format(**machine), flush=True)
    rows, start = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        sides = []
        try:
            for name in ("stock", "tidepool"):
                sides.append(measure.Side(name, os.path.join(folder, name), measure.segment_for(shapes)))
            print(f"GB/s, medians of {options.pairs} pairs\n{measure.HEADING}", flush=True)
            for shape in shapes:
                row = measure.measure(shape, *sides, options.pairs)
                rows.append(row)
                print("\n".join(measure.lines(row)), flush=True)
        finally:
            for side in sides:
                side.end()
    if options.json:
        with open(options.json, "w") as file:
            report = {"machine": machine, "wheel": os.path.basename(str(wheels.CPU.folder)), "rows": rows}
            json.dump(report, file, indent=1)
    print(f"bench: {time.monotonic() - start:.0f} s")
    missed = [text for row in rows for text in misses(row)] if options.check else []
    for text in missed:
        print(f"bench: MISSED: {text}")
    if options.check and not missed:
        print("bench: all bounds held")
    return 1 if missed else 0


sys.exit(main())
