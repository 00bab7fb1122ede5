"""The demonstration: stock Mooncake beside Tidepool with one store and two engines, a table and a chart."""

import os
import sys
import tempfile
import time

from harness import actions_store as actions
from harness import measure, wheels
from harness.cluster import MIB

PAIRS = 5
CHART = wheels.BUILD / "demo.png"
start_s = time.monotonic()


def say(text):
    print(f"demo: [{time.monotonic() - start_s:5.1f} s] {text}", flush=True)


def second_engine_reads(side):
    """What one engine has put, the other gets; both are separate processes."""
    one, other = side.engines
    sizes = [16 * MIB + 1, MIB, 4097]
    keys = ["handed-over-0", "handed-over-1", "handed-over-2"]
    if one.call(actions.write_keys, keys=keys, sizes=sizes, seed=42) != [0, 0, 0]:
        sys.exit(f"demo: {side.name}: put failed\n{one.log[-2000:]}")
    if other.call(actions.read_keys, keys=keys, sizes=sizes, seed=42) != {"results": sizes, "wrong": []}:
        sys.exit(f"demo: {side.name}: the second engine read other bytes")
    say(f"{side.name}: engine 2 has read what engine 1 wrote, {sum(sizes)} bytes compared")


def draw(rows, machine):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, direction in zip(axes, ("put", "get")):
        for offset, side, color in ((-0.27, "stock", "#b0b0b0"), (0, "tidepool", "#0b7a75"), (0.27, "memcpy", "#e0c060")):
            heights = [row[direction][side] for row in rows]
            bars = axis.bar([x + offset for x in range(len(rows))], heights, 0.25, color=color)
            axis.bar_label(bars, fmt="%.1f", fontsize=8)
            bars.set_label({"stock": "stock Mooncake", "tidepool": "with Tidepool", "memcpy": "plain memcpy"}[side])
        axis.set_xticks(range(len(rows)), [row["shape"] for row in rows])
        axis.set_title(direction)
    axes[0].set_ylabel("GB/s")
    axes[0].legend()
    figure.suptitle(f"One store, one node: {machine['processor']}, {machine['cores']} cores", fontsize=10)
    figure.tight_layout()
    figure.savefig(CHART, dpi=110)


def main():
    machine = measure.machine()
    say("{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}".format(**machine))
    rows, sides = [], []
    with tempfile.TemporaryDirectory(prefix="tidepool-demo-") as folder:
        try:
            for name in ("stock", "tidepool"):
                say(f"{name}: starting a master, a store and two engines")
                sides.append(
                    measure.Side(name, os.path.join(folder, name), measure.segment_for(measure.CORE), engines=2)
                )
            for side in sides:
                second_engine_reads(side)
            for shape in measure.CORE:
                say(f"{shape.name}: {shape.keys} keys, {shape.what}: {PAIRS} runs of each, by turns")
                rows.append(measure.measure(shape, *sides, PAIRS))
            for side in sides:
                for process in (*side.engines, side.store):
                    if process.call(actions.close) != 0 or process.finish() != 0:
                        sys.exit(f"demo: {side.name}: {process.name} did not close cleanly\n{process.log[-2000:]}")
        finally:
            for side in sides:
                side.end()
    draw(rows, machine)
    say(f"drew {CHART}")
    print(f"\nGB/s, medians of {PAIRS} pairs; 'of it': Tidepool as a share of plain memcpy\n{measure.HEADING}")
    for row in rows:
        print("\n".join(measure.lines(row)))
    detour = [row["shape"] for row in rows if row["forward_bytes"] or row["local_bytes"] != row["moved_bytes"]]
    if detour:
        print(f"\ndemo: bytes of {', '.join(detour)} did not go through shared memory")
    return 1 if detour else 0


sys.exit(main())
