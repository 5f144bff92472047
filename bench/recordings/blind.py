"""`python -m bench.recordings.blind [NAME ...]`: strangers' loops that are predicted before they are compared.

Each loop was written from a script, and what frugal made of it was kept in `bench/results/blind-first.json` before the
published bytes were put beside it. `bench/results/blind.json` has both, and what a row comes to now. With names only
these rows are made and nothing is written.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.recordings.loops import checkpointed, course, from_scratch, student_decoder, vision
from frugal.tools.own_loop.run import dry_run

RESULTS = Path(__file__).parents[1] / "results" / "blind.json"
FIRST = RESULTS.with_name("blind-first.json")
"""Bytes by row as first predicted: kept as they were."""


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
            "that it ran once, from its start", name,
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
    yield Row(
        "student-large-ctx256-step", partial(student_decoder.last_step, "large", 256), "rtx4090-24g", "2.6.0",
        "notHanmin/assignment2-systems at 33be88e, cs336_systems and memory_snapshot.pickle",
        "a decoder of 36 layers, fp32, 4 samples of 256 tokens, AdamW by hand; the recorded step",
        "the card; three steps with an update a round for 10; that the recorded round is the last",
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
    """Return a row of a student's experiments."""
    return Row(
        f"rtx4090-{name}", loop, "rtx4090-24g", "2.11.0+cu128",
        "BraveBeter/assignment2-systems at d7eef157, student_scripts/a2k and results",
        "the course's decoder of 24 layers, bf16 autocast, a sample, AdamW; or attention by hand in bf16",
        "that the course's model of 2026 is unchanged",
    )  # fmt: skip


def predicted(row: Row) -> dict[str, Any]:
    """Dry-run a row's loop and return its bytes in blocks and in segments."""
    found = dry_run_of(row.loop, row.card, "2.4" if row.torch == "not stated" else row.torch)
    allocated, reserved = found[row.part] if row.part else found
    facts = {name: getattr(row, name) for name in ("name", "card", "torch", "source", "known", "assumed")}
    return {**facts, "predicted_allocated_bytes": allocated, "predicted_reserved_bytes": reserved}


GIB, GB, MIB = (2**30, 4), (10**9, 2), (2**20, 1)
"""A unit, and the digits that are printed of it."""
WHOLE, ALL = (2**20, 0), (2**20, 12)

PUBLISHED: dict[str, tuple[tuple[int, int], float | None, float | None]] = {
    "a100-gpt-from-scratch-0": (GIB, 2.5069, 26.2617), "a100-gpt-from-scratch-1": (GIB, None, 26.2422),
    "a100-gpt-from-scratch-3": (GIB, None, 26.2422), "a100-gpt-from-scratch-5": (GIB, None, 13.7871),
    "a100-gpt-from-scratch-6": (GIB, None, 11.5645), "a100-gpt-from-scratch-7": (GIB, None, 5.9004),
    "a100-vit-l-16-fp32-64": (GB, None, 26.79), "a100-vit-l-16-fp16-mixed-64": (GB, None, 18.21),
    "a100-vit-l-16-bf16-64": (GB, None, 13.82), "a100-vit-l-16-bf16-16": (GB, None, 5.69),
    "a100-vit-l-16-bf16-4x4": (GB, None, 3.91), "a100-vit-l-16-bf16-4x4-sgd": (GB, None, 2.02),
    "rtx4090-small-cnn-128": (MIB, 530.9, 604.0), "rtx4090-vgg16-bn-128": (MIB, 17231.9, 18752.0),
    "rtx4090-resnet50-128": (MIB, 11738.2, 12982.0), "rtx4090-vit-b-16-128": (MIB, 17218.1, 18142.0),
    "rtx4090-conv-1000": (WHOLE, 3445, None), "rtx4090-conv-conv-1000": (WHOLE, 4020, None),
    "rtx4090-conv-relu-1000": (WHOLE, 3445, None), "rtx4090-conv-bn-1000": (MIB, 4019.5, 4034.0),
    "rtx4090-conv-dropout-1000": (WHOLE, 3589, None), "rtx4090-conv-softmax-1000": (WHOLE, 3445, None),
    "rtx4090-ctx1024-group-none": (ALL, 10046.1259765625, 10204.0),
    "rtx4090-ctx1024-group-1": (ALL, 8096.53564453125, 8162.0),
    "rtx4090-ctx1024-group-2": (ALL, 8096.53564453125, 8166.0),
    "rtx4090-ctx1024-group-4": (ALL, 8096.53564453125, 8152.0),
    "rtx4090-ctx1024-group-8": (ALL, 8096.53564453125, 8182.0),
    "rtx4090-ctx2048-group-none": (ALL, 19623.6689453125, 19936.0),
    "rtx4090-ctx2048-group-1": (ALL, 8094.92626953125, 9398.0),
    "rtx4090-attention-512x64": (ALL, 19.8798828125, 26.0), "rtx4090-attention-512x128": (ALL, 20.2548828125, 26.0),
    "rtx4090-attention-2048x64": (ALL, 69.76953125, 84.0), "rtx4090-attention-2048x128": (ALL, 71.26953125, 86.0),
    "rtx4090-attention-8192x64": (ALL, 854.328125, 862.0), "rtx4090-attention-8192x128": (ALL, 860.328125, 982.0),
    "rtx4070ti-super-dinov2-giant": (GB, 9.82, None),
    "student-large-ctx256-step": (ALL, 23281500672 / 2**20, 22738.0),
}  # fmt: skip
"""How a source prints, and its figures of blocks and of segments; those of the last row are its recording's."""


def compared(made: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the published bytes, the errors, and those of its first prediction. Figures that are printed
    alike count as exact."""
    (unit, digits), *published = PUBLISHED[made["name"]]
    for what, printed in zip(("allocated", "reserved"), published, strict=True):
        if printed is None:
            continue
        made[f"{what}_bytes"] = round(printed * unit)
        for prefix, source in (("", made), ("first_", first)):
            found = source[f"predicted_{what}_bytes"] / unit
            made[f"{prefix}{what}_error"] = 0.0 if round(found, digits) == printed else found / printed - 1
        made[f"first_predicted_{what}_bytes"] = first[f"predicted_{what}_bytes"]
    return made


@cache
def dry_run_of(loop: Callable[[], Any], card: str, version: str) -> Any:
    """Return what a loop returns in its dry run, which is made once for all of its rows."""
    found: list[Any] = []
    dry_run(lambda: found.append(loop()), gpu=card, steps=1, torch_version=version)
    return found[0]


def line(each: dict[str, Any]) -> str:
    """Return the line of a row: published bytes, error of the first prediction, error now."""
    parts = [f"{each['name']:<30}"]
    for what in ("allocated", "reserved"):
        if f"{what}_bytes" in each:
            errors = f"{each[f'first_{what}_error']:+.3%} now {each[f'{what}_error']:+.3%}"
            parts.append(f"{what} {each[f'{what}_bytes'] / 2**20:>9.1f} MiB {errors}")
    return " ".join(parts)


def main(names: Sequence[str]) -> None:
    """Make the rows of these names, or all, and print them as they come."""
    made, first = [], json.loads(FIRST.read_text())["rows"]
    for row in rows():
        if names and row.name not in names:
            continue
        made.append(compared(predicted(row), first[row.name]))
        print(line(made[-1]), flush=True)
    if not names:
        about = environment("python -m bench.recordings.blind")
        RESULTS.write_text(json.dumps({**about, "rows": made}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
