"""`python -m bench.recordings.blind [NAME ...]`: strangers' loops that are predicted before they are compared.

Each loop was written from a script, and what frugal made of it was kept in `bench/results/blind.json`, before the
published bytes were put beside it: the first predictions stay there as they were. With names only these rows are made
and nothing is written.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.recordings.loops import checkpointed, course, from_scratch, vision
from frugal.tools.own_loop.run import dry_run

RESULTS = Path(__file__).parents[1] / "results" / "blind.json"


@dataclass(frozen=True)
class Row:
    """A loop, and the run that it is written from.

    Attributes:
        name: of the row.
        loop: returns the bytes in blocks and in segments that the source counts, or those of several rows by name.
        card: that the source names, and that is dry-run.
        torch: its version in the source.
        source: repository, commit and file.
        known: sizes and order of steps.
        assumed: what is not known, and was taken from elsewhere.
        part: the row's name among those of its loop.
    """

    name: str
    loop: Callable[[], Any]
    card: str
    torch: str
    source: str
    known: str
    assumed: str
    part: str = ""


STAGES = {
    0: "as it was", from_scratch.MASK_ON_THE_FLY: "masks made anew", from_scratch.FUSED: "the fused AdamW, too",
    from_scratch.BF16: "all in bf16, too", from_scratch.OF_TORCH: "torch's LayerNorm and GELU, too",
    from_scratch.KERNEL: "torch's attention, too",
}  # fmt: skip
FINE_TUNED: dict[str, tuple[Any, ...]] = {
    "fp32-64": ("32", 64), "fp16-mixed-64": ("16-mixed", 64), "bf16-64": ("bf16-true", 64),
    "bf16-16": ("bf16-true", 16), "bf16-4x4": ("bf16-true", 4, 4),
}  # fmt: skip
GROUPS = ((1024, None), (1024, 1), (1024, 2), (1024, 4), (1024, 8), (2048, None), (2048, 1))
HEADS = tuple((length, size) for length in (512, 2048, 8192) for size in (64, 128))


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for stage, words in STAGES.items():
        yield Row(
            f"a100-gpt-from-scratch-{stage}", partial(from_scratch.epoch, stage), "a100-40g", "2.6.0+cu124",
            "rasbt/LLMs-from-scratch at 908dd2f7, ch05/10_llm-training-speed",
            f"GPT-2's size, 8 samples of 1024 tokens, {words}; figures after an epoch and a text of 50 tokens",
            "how the mask is made anew, which only the README says",
        )  # fmt: skip
    for name, arguments in FINE_TUNED.items():
        yield vit_large(name, partial(vision.fine_tuned, *arguments))
    yield vit_large("bf16-4x4-sgd", partial(vision.fine_tuned, "bf16-true", 4, 4, is_sgd=True))
    for name in ("small-cnn", "vgg16-bn", "resnet50", "vit-b-16"):
        yield Row(
            f"rtx4090-{name}-128", vision.notebook, "rtx4090-24g", "2.0.1+cu117",
            "WSShiro/vramexp at 12ad23cc, vramexp1.ipynb",
            "fp32, 128 images of 224 pixels, SGD; models before it stay on the card",
            "that its cells ran in their order", name,
        )  # fmt: skip
    for name in vision.AFTER:
        yield Row(
            f"rtx4090-{name}-1000", partial(vision.layer, name), "rtx4090-24g", "2.0.1+cu117",
            "WSShiro/vramexp at 12ad23cc, vramexp_layer.ipynb",
            "fp32, 1000 images of 224 pixels, three channels in and out, SGD",
            "nothing else in the process",
        )  # fmt: skip
    for length, group in GROUPS:
        yield of_checkpointing(f"ctx{length}-group-{group or 'none'}", partial(checkpointed.in_groups, length, group))
    for length, size in HEADS:
        yield of_checkpointing(f"attention-{length}x{size}", partial(checkpointed.by_hand, length, size))
    yield Row(
        "rtx4070ti-super-dinov2-giant", vision.giant, "rtx4080-16g", "not stated",
        "pytorch/ao at 072500ab, torchao/optim/README.md and benchmarks/benchmark_low_bit_adam.py",
        "bf16, 32 images, layers checkpointed, fused AdamW, not compiled",
        "224 pixels, as the script crops; another card of the same generation; torch 2.4",
    )  # fmt: skip


def vit_large(name: str, loop: Callable[[], course.Peaks]) -> Row:
    """Return a row of fine-tuning ViT-L."""
    return Row(
        f"a100-vit-l-16-{name}", loop, "a100-40g", "2.1.0.dev20230623+cu118",
        "rasbt/pytorch-memory-optim at f6eddcd2, logs.md and its scripts",
        "ViT-L/16 of torchvision, images of 224 pixels, an epoch and an evaluation",
        "an A100; three optimizer steps for all; no counters of accuracy; Adam as it was before July 2023",
    )  # fmt: skip


def of_checkpointing(name: str, loop: Callable[[], course.Peaks]) -> Row:
    """Return a row of the student's experiments."""
    return Row(
        f"rtx4090-{name}", loop, "rtx4090-24g", "2.11.0+cu128",
        "BraveBeter/assignment2-systems at d7eef157, student_scripts/a2k and results",
        "the course's decoder of 24 layers, bf16 autocast, a sample, AdamW; or attention by hand in bf16",
        "that the course's model of 2026 is unchanged; two counted steps for 5",
    )  # fmt: skip


def predicted(row: Row) -> dict[str, Any]:
    """Dry-run a row's loop and return its bytes in blocks and in segments."""
    found = dry_run_of(row.loop, row.card, "2.4" if row.torch == "not stated" else row.torch)
    allocated, reserved = found[row.part] if row.part else found
    facts = {name: getattr(row, name) for name in ("name", "card", "torch", "source", "known", "assumed")}
    return {**facts, "predicted_allocated_bytes": allocated, "predicted_reserved_bytes": reserved}


@cache
def dry_run_of(loop: Callable[[], Any], card: str, version: str) -> Any:
    """Return what a loop returns in its dry run, which is made once for all of its rows."""
    found: list[Any] = []
    dry_run(lambda: found.append(loop()), gpu=card, steps=1, torch_version=version)
    return found[0]


def main(names: Sequence[str]) -> None:
    """Make the rows of these names, or all, and print them as they come."""
    made = []
    for row in rows():
        if names and row.name not in names:
            continue
        made.append(predicted(row))
        allocated, reserved = (made[-1][f"predicted_{what}_bytes"] / 2**20 for what in ("allocated", "reserved"))
        print(f"{row.name:<34} allocated {allocated:>9.1f} MiB reserved {reserved:>9.1f} MiB", flush=True)
    if not names:
        about = environment("python -m bench.recordings.blind")
        RESULTS.write_text(json.dumps({**about, "rows": made}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
