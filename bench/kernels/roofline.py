"""`python -m bench.kernels.roofline [--page]`: the time of a micro-step on real cards, from the account's bytes.

Nothing of it was timed. A product takes as long as its FLOPs at a share of the card's peak, those of the head as long
as their bytes where these take longer; all else takes its bytes at a share of the card's bandwidth. One comes after the
other. Left out: communication, the optimizer, and the host.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.kernels.account import RESULTS
from bench.kernels.layers import FAMILIES, Family
from bench.kernels.losses import TORCHTUNE, TRL

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

CARDS = {"RTX 3090": (71e12, 936e9), "A100-80G": (312e12, 2039e9), "H100 SXM": (989e12, 3350e9)}
"""Published FLOP/s in bf16 with sums in fp32, and bytes/s."""

BANDWIDTH = 0.85
PRODUCTS = {"RTX 3090": (0.85, 0.70), "A100-80G": (0.75, 0.55), "H100 SXM": (0.65, 0.40)}
"""Shares of the peak that products reach: of models 2,048 and more elements wide, and of narrower ones."""

ATTENTION = {"RTX 3090": 0.60, "A100-80G": 0.50, "H100 SXM": 0.40}

WAYS = {
    "frugal before": ("plain", "tiled before"),
    "frugal": ("plain", "tiled now, plain"),
    "frugal, Liger's loss kernel": ("plain", "tiled now, liger"),
    "frugal, fused layers": ("frugal", "tiled now, liger"),
    "TRL": ("plain", TRL),
    "TRL + Liger": ("liger", TRL),
    "torchtune, compiled": ("compile", TORCHTUNE),
    "compiled layers": ("compile", "tiled now, liger"),
}
"""What runs the layers, and the loss: frugal's, and what others do by default."""


def milliseconds(family: Family, account: dict[str, Any], card: str, layers: str, loss: str) -> float | None:
    """Return those of a micro-step, forward and backward; None where the account has no such way.

    Nothing is recomputed."""
    layer, of_loss = account["layers"][family.name].get(layers), account["losses"][family.name].get(loss)
    if layer is None or of_loss is None or "failed" in layer:
        return None
    flops, bandwidth = CARDS[card]
    tokens = family.samples * family.positions
    elements = layer["weights_bytes"] / 2 * family.num_active
    head = (8 if loss == TRL else 6) * tokens * family.vocabulary * family.width  # TRL's recomputes its logits
    rate, bytes_per_second = flops * PRODUCTS[card][family.width < 2048], bandwidth * BANDWIDTH
    products = 6 * tokens * elements * family.num_layers / rate
    products += max(head / rate, of_loss["bytes_in_products"] / bytes_per_second)
    heads, head_size = family.heads
    pairs = family.samples * family.positions**2 / (2 if family.is_causal else 1)
    attention = 3.5 * 4 * pairs * heads * head_size * family.num_layers / ATTENTION[card]
    moved = layer["bytes_beside_products"] * family.num_layers + of_loss["bytes_beside_products"]
    return 1e3 * (products + attention / flops + moved / bytes_per_second)


def rows(account: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Each family's and way's speed against `frugal before` on each card."""
    for name, family in FAMILIES.items():
        if name not in account["layers"]:
            continue
        for way, (layers, loss) in WAYS.items():
            times = {card: milliseconds(family, account, card, layers, loss) for card in CARDS}
            if any(time is None for time in times.values()):
                continue
            before = [milliseconds(family, account, card, "plain", "tiled before") for card in CARDS]
            yield name, way, *(f"x{b / t:.2f}" for b, t in zip(before, times.values(), strict=True) if b and t)


def layer_rows(account: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A layer of each family, each way."""
    for name, ways in account["layers"].items():
        size = f"{FAMILIES[name].samples} x {FAMILIES[name].positions}"
        for way, found in ways.items():
            if "failed" in found:
                yield name, size, way, "does not run", "", "", ""
                continue
            kernels = f"{found['kernels_forward']} + {found['kernels_backward']}"
            sizes = [
                f"{found[key] / 1e9:.2f}" for key in ("bytes_beside_products", "saved_bytes", "backward_peak_bytes")
            ]
            yield name, size, way, kernels, *sizes


def loss_rows(account: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The loss of each family's head, each way: bytes a logit, and the peak."""
    for name, ways in account["losses"].items():
        family = FAMILIES[name]
        logits = family.samples * family.positions * family.vocabulary
        for way, found in ways.items():
            kernels = f"{found['kernels_forward']} + {found['kernels_backward']}"
            per_logit = [f"{found[key] / logits:.1f}" for key in ("bytes_beside_products", "bytes_in_products")]
            peak = max(found["forward_peak_bytes"], found["backward_peak_bytes"])
            yield name, way, kernels, *per_logit, f"{peak / 1e9:.2f}"


SHOWN = ("Llama-3.1-8B",)
"""The family that docs/kernels.md shows."""


def tables(account: dict[str, Any], families: Sequence[str] = SHOWN) -> dict[str, str]:
    """The tables in Markdown, by name: layers, losses and speed of `families`."""
    heads = {
        "layers": ("layer", "micro-batch", "way", "kernels", "GB beside products", "GB kept", "GB peak of backward"),
        "losses": ("loss of", "way", "kernels", "bytes a logit beside products", "in products", "GB peak"),
        "speed": ("model", "way", *CARDS),
    }
    made = {"layers": layer_rows(account), "losses": loss_rows(account), "speed": rows(account)}
    return {
        name: "\n".join(
            f"| {' | '.join(row)} |"
            for row in (head, ["---"] * len(head), *made[name])
            if row[0] in (head[0], "---", *families)
        )
        for name, head in heads.items()
    }


def main() -> None:
    """Print the tables of the kept account for all families; with `--page` also write those of the page."""
    account = json.loads(RESULTS.read_text())
    print("\n\n".join(tables(account, tuple(FAMILIES)).values()))
    if "--page" in sys.argv:
        page = PAGE.read_text()
        for name, table in tables(account).items():
            page = re.sub(rf"(<!-- table: {name} -->\n\n).*?\n(?=\n|$)", rf"\g<1>{table}\n", page, flags=re.DOTALL)
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
