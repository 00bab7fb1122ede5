# SPDX-License-Identifier: Apache-2.0
"""The routing policy, stated once.

The simulation runs it, and the tests hold every decision of the proxy against it. All arithmetic is on integers scaled
by 100, as the proxy does it, so that a threshold such as 1.25 gives the same answer on both sides.

Loads are of usable nodes: up and not draining. `held` is what the home already counts for this conversation, `weight`
what the conversation weighs with this turn. For requests in flight held is 0 and weight is 1.
"""
from dataclasses import dataclass

NEW = 'new'            # no home yet: least-loaded node
STAY = 'stay'          # home under the threshold, or nothing to decide
GUARDED = 'guarded'    # home over the threshold, but no node would stay under it: stays
MOVED = 'moved'        # home over the threshold: least-loaded node, for good
REHOMED = 'rehomed'    # home is gone (down, or left the configuration): least-loaded node, for good
UNKEYED = 'unkeyed'    # the request names no conversation: least-loaded node, nothing remembered
DECISIONS = (NEW, STAY, GUARDED, MOVED, REHOMED, UNKEYED)


@dataclass(frozen=True)
class Decision:
    kind: str
    nodes: tuple       # the nodes that this decision allows: one, or all the equally least-loaded


def threshold_in_hundredths(threshold):
    return round(threshold * 100)


def least_loaded(loads):
    least = min(loads.values())
    return tuple(node for node, load in loads.items() if load == least)


def is_over(load, total, count, threshold):
    return load * count * 100 > threshold_in_hundredths(threshold) * total


def decide(loads, home, threshold, *, weight=1, held=0, home_load=None, home_up=True, keyed=True):
    """loads: {usable node: load}. A home that drains is up but absent from loads; its load is home_load."""
    if not loads:
        return Decision(STAY if home is not None and home_up else REHOMED, (home,) if home is not None and home_up else ())
    if not keyed:
        return Decision(UNKEYED, least_loaded(loads))
    if home is None:
        return Decision(NEW, least_loaded(loads))
    if not home_up:
        return Decision(REHOMED, least_loaded(loads))
    total = sum(loads.values())
    count = len(loads)
    load = loads[home] if home in loads else home_load or 0
    if not is_over(load, total, count, threshold):
        return Decision(STAY, (home,))
    others = {node: value for node, value in loads.items() if node != home}
    after = total + weight - (held if home in loads else 0)
    if not others or is_over(min(others.values()) + weight, after, count, threshold):
        return Decision(GUARDED, (home,))
    return Decision(MOVED, least_loaded(others))
