"""What `plan.json` tells in few words: equal nodes once, and cells one by one only where they are few.

    cluster.nodes   equal nodes that follow each other are one entry, with their `count`
    batch.cells     samples of each rank in each micro-step, up to `MOST_CELLS` of them; beyond that null, because
                    `batch.micro_steps` says the same for a thousand ranks and micro-steps in a few numbers

Both work on what msgspec makes of a plan: dictionaries, lists and numbers.
"""

from typing import Any

from frugal.planning.cluster import MOST_RANKS

MOST_CELLS = 8192


def packed(plan: dict[str, Any], cells: tuple[tuple[int, ...], ...] | None) -> dict[str, Any]:
    """`plan` as it is written; `cells` are the batch's, None where they are too many."""
    nodes: list[dict[str, Any]] = []
    for node in plan["cluster"]["nodes"]:
        if nodes and node == {name: value for name, value in nodes[-1].items() if name != "count"}:
            nodes[-1]["count"] += 1
        else:
            nodes.append({"count": 1, **node})
    return plan | {"cluster": plan["cluster"] | {"nodes": nodes}, "batch": plan["batch"] | {"cells": cells}}


def unpacked(raw: Any) -> Any:
    """What was `packed`. Anything else is left as it is, for the types to complain about."""
    if not isinstance(raw, dict) or not isinstance(raw.get("cluster"), dict) or not isinstance(raw.get("batch"), dict):
        return raw
    cluster, batch = raw["cluster"], {name: value for name, value in raw["batch"].items() if name != "cells"}
    if not isinstance(cluster.get("nodes"), list):
        return raw
    nodes = [again for node in cluster["nodes"] for again in _each(node)]
    return raw | {"cluster": cluster | {"nodes": nodes}, "batch": batch}


def _each(node: Any) -> list[Any]:
    """A node as often as it says."""
    count = node.get("count") if isinstance(node, dict) else None
    if type(count) is not int or not 1 <= count <= MOST_RANKS:
        return [node]
    return [{name: value for name, value in node.items() if name != "count"}] * count
