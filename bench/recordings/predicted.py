"""`python -m bench.recordings.predicted [NAME ...]`: dry runs of strangers' loops against what their cards took.

Each loop of `bench/recordings/loops` is written anew from what is known of a script, and dry-run from the model's
creation on; the most bytes in blocks and in segments since the recording began are compared with the recording's.
Some repositories publish the bytes without a recording; of those only what they count is compared.

Results go to `bench/results/predictions.json`; with names only these rows are made and nothing is written.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.environment import environment
from bench.recordings.loops import (
    adapters,
    calibration,
    course,
    hybrid,
    kernels,
    litgpt,
    own_decoder,
    small_decoder,
    toy_decoder,
    turing,
    zero3,
)
from bench.recordings.recording import FOLDER, SUFFIX, Recording
from frugal.tools.own_loop.run import dry_run
from frugal.tools.own_loop.tracker import LoopTracker

RESULTS = Path(__file__).parents[1] / "results" / "predictions.json"

SOME_CARD = "rtx4090-24g"
"""Dry-run where the card is not stated: one with small workspaces, as nearly all of those recordings have."""

CARDS = {"rtx-pro-6000-96g": "rtxpro6000-96g"}
"""frugal's name for a recording's card, where it is another."""


@dataclass(frozen=True)
class Row:
    """A loop and the recording that it is compared with.

    Attributes:
        name: of the recording.
        loop: returns the peaks of the dry run.
        assumed: what is not known of the script, and was taken from elsewhere.
        card: dry-run where the recording's is not stated.
    """

    name: str
    loop: Callable[[], course.Peaks]
    assumed: str = ""
    card: str = SOME_CARD


IN_WINDOW = "whether the cache was emptied: no segment is made in the recording, so it was not"
AUTOCAST = "that it ran under autocast, from 2-byte tensors in the recording"


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for length in (128, 256, 512):
        for mode in ("forward", "forward-with-gradients"):
            for suffix in ("", "-autocast"):
                loop = partial(course.emptied, length, mode, bool(suffix))
                yield Row(f"a10-transformer-large-ctx{length}-{mode}{suffix}", loop, "6 steps, its default")
    lengths = {"forward": (128, 512, 1024, 2048), "step": (128, 512)}
    for mode, of_mode in lengths.items():
        for length in of_mode:
            for suffix in ("", "-autocast"):
                is_emptied = (mode, length, suffix) == ("forward", 128, "")
                loop = partial(course.xl_of_2026, length, mode, bool(suffix), is_emptied)
                yield Row(f"rtx-pro-6000-transformer-xl-ctx{length}-{mode}{suffix}", loop, IN_WINDOW)
    for mode, length, suffix in (
        ("forward", 128, "-autocast"), ("forward", 256, "-autocast"), ("step", 128, "-autocast"), ("step", 128, "")
    ):  # fmt: skip
        loop = partial(course.largest_of_2025, length, mode, bool(suffix))
        yield Row(f"transformer-2.7b-ctx{length}-{mode}{suffix}", loop, "4 samples, its default; ranges for a profiler")
    for length in (128, 256, 512, 1024):
        for mode, function in (("inference", course.inference), ("training", course.training)):
            assumed = AUTOCAST if length == 512 or (mode, length) == ("training", 1024) else ""
            yield Row(
                f"transformer-medium-ctx{length}-{mode}", partial(function, "medium", length, bool(assumed)), assumed
            )
    for length in (128, 256, 512):
        yield Row(
            f"transformer-ctx{length}-forward", partial(course.kept_forwards, length), "the small size, its default"
        )
    yield Row("transformer-small-ctx256-32-samples-backward", partial(course.kept_gradients, 32, 256))
    for length, suffix in ((128, ""), (512, ""), (512, "-autocast"), (2048, "")):
        loop = partial(course.profiled_forward, length, length == 512, bool(suffix))
        yield Row(
            f"b200-transformer-xl-ctx{length}-forward{suffix}", loop, "which files kept gradients, from their sizes"
        )
    for mode in ("forward", "step"):
        for length in (128, 256, 512):
            for suffix in ("", "-autocast") if mode == "forward" else ("",):
                loop = partial(own_decoder.in_one_process, (mode, length), bool(suffix))
                yield Row(f"h100-transformer-2.7b-ctx{length}-{mode}{suffix}", loop, "the order of runs in one process")
    for length in (100, 150, 200):
        for mode in ("forward", "step"):
            for suffix in ("", "-autocast") if length == 200 else ("",):
                loop = partial(small_decoder.from_creation, length, mode, bool(suffix))
                yield Row(f"transformer-4-layers-ctx{length}-{mode}{suffix}", loop, "that torch 2.6 slices `[:]`")
    yield Row("transformer-small-ctx128-inference", partial(toy_decoder.forwards, 128))
    loop = partial(toy_decoder.after_shorter, 512)
    yield Row("transformer-small-ctx512-inference", loop, "that 128 tokens ran before: blocks are left of a run")
    for mode in ("grad", "no_grad"):
        loop = partial(toy_decoder.linear, mode == "grad")
        yield Row(f"linear-10000-50000-{mode}", loop, "a Hopper, from its workspace of 32 MiB", "h100-80g")


LONGEST = 696
"""Tokens of the longest batch of peft's comparison, which is not published: with it `lora-rank32` comes to its bytes.
The other methods were trained on the same batches."""

PUBLISHED = {
    "lora-rank64": 22_552_772_608, "lora-rank10-target-mlp": 24_698_159_104, "lora-rank32-dora": 24_532_484_096,
    "ln_tuning": 21_181_235_200, "ia3": 23_234_347_008, "full-finetuning": 38_868_615_168,
    "delora": 22_351_446_016, "fourierft": 23_657_971_712, "gralora": 22_296_920_064, "waveft": 24_895_291_392,
    "boft": 24_691_867_648, "prefixtuning": 21_952_987_136, "loha": 23_907_532_800, "pvera": 22_177_382_400,
    "lily": 25_614_614_528, "deft": 23_620_222_976,
}  # fmt: skip
"""`accelerator_memory_max` of results in huggingface/peft at 5d602fdbf, method_comparison/MetaMathQA, on an L40S."""


UNKNOWN = {
    "full-finetuning": "; the first batches, which decide where gradients and states lie: other lengths gave -4.5 to "
    "+1.4 %",
    "prefixtuning": "; the longest batch before an evaluation, 540 tokens, as of 10 buckets: 540 to 600 gave "
    "-4.3 to -1.3 %",
}
"""What else is not known of a method's loop, and matters."""


def with_errors(
    facts: dict[str, Any], found: course.Peaks, allocated: int | None, reserved: int | None
) -> dict[str, Any]:
    """Return a row of `facts` with predicted and published bytes in blocks and in segments, and the errors."""
    made: dict[str, Any] = {**facts, "made_bytes": None}
    for what, predicted, published in (("allocated", found[0], allocated), ("reserved", found[1], reserved)):
        made[f"{what}_bytes"], made[f"predicted_{what}_bytes"] = published, predicted
        made[f"{what}_error"] = None if published is None else predicted / published - 1
    return made


def of_adapters(method: str) -> dict[str, Any]:
    """Dry-run a method of peft's comparison and return its segments beside the published ones."""
    found: list[course.Peaks] = []
    dry_run(lambda: found.append(adapters.steps(method, LONGEST)), gpu="l40s-48g", steps=1)
    facts = {
        "name": f"l40s-llama-3.2-3b-{method}", "card": "l40s-48g", "torch": "2.13.0+cu130",
        "repository": "huggingface/peft",
        "known": "Llama 3.2 3B in bf16, 4 samples, 5000 steps of batches sorted by length, the cache emptied every 10",
        "assumed": f"the longest batch, {LONGEST} tokens, from `lora-rank32`, which is no row; that logarithms of "
        f"lengths are normal, with the published mean{UNKNOWN.get(method, '')}",
    }  # fmt: skip
    return with_errors(facts, found[0], None, PUBLISHED[method])


UNDER_ZERO3 = {"fp32-states": 31.38, "bf16-states": 18.93}
"""GiB that `max_memory_allocated` printed on each of four H100, in training/bf16_master_weight of
deepspeedai/DeepSpeedExamples at 45b4b715."""


def under_zero3(states: str) -> dict[str, Any]:
    """Dry-run DeepSpeed's example under ZeRO-3 and return its blocks beside those that were printed, to 0.01 GiB."""
    found: list[course.Peaks] = []
    dry_run(lambda: found.append(zero3.steps(states == "bf16-states")), gpu="h100-80g", gpus=4, steps=1)
    fullest = max(peaks[0] for peaks in found), max(peaks[1] for peaks in found)
    facts = {
        "name": f"h100-zero3-6.9b-{states}", "card": "h100-80g", "torch": "not stated",
        "repository": "deepspeedai/DeepSpeedExamples",
        "known": "an encoder of 32 layers, width 4096, 1 sample of 512 tokens, layers checkpointed, ZeRO-3 on 4 GPUs "
        f"with overlapped communication and buckets of 5e7 elements, {states.replace('-', ' ')}: steps with FusedAdam",
        "assumed": "DeepSpeed 0.19.8 with `memory_efficient_linear` off, which is how releases up to 0.19.3 treat a "
        "model made outside of `zero.Init`; three steps for all; printed to 0.01 GiB, so equal figures count as exact",
    }  # fmt: skip
    return as_printed(facts, fullest, UNDER_ZERO3[states], 2**30)


def as_printed(
    facts: dict[str, Any], found: course.Peaks, printed: float, unit: int, digits: int = 2
) -> dict[str, Any]:
    """Return a row of bytes in blocks that were printed in `unit`s to so many digits: exact where these are the
    same."""
    made = with_errors(facts, found, round(printed * unit), None)
    if round(found[0] / unit, digits) == printed:
        made["allocated_error"] = 0.0
    return made


ADAPTED = {
    ("tinyllama-1.1b", "eager", 2, 512): (2757.193359375, 2908),
    ("tinyllama-1.1b", "sdpa", 2, 512): (2756.193359375, 2880),
    ("tinyllama-1.1b", "eager", 2, 1024): (3518.083984375, 4226),
    ("tinyllama-1.1b", "sdpa", 2, 1024): (3287.833984375, 3532),
    ("tinyllama-1.1b", "eager", 2, 2048): (6616.115234375, 7662),
    ("tinyllama-1.1b", "sdpa", 2, 2048): (4354.115234375, 4696),
    ("smollm2-135m", "eager", 2, 512): (1027.29443359375, 1104),
    ("smollm2-135m", "sdpa", 2, 512): (1026.91943359375, 1070),
    ("smollm2-135m", "eager", 1, 4096): (3180.10693359375, 4476),
    ("smollm2-135m", "sdpa", 1, 4096): (3148.10693359375, 3284),
    ("smollm2-360m", "eager", 1, 4096): (4908.51171875, 7304),
    ("smollm2-360m", "sdpa", 1, 4096): (3754.77734375, 3912),
    ("smollm2-1.7b", "eager", 4, 1024): (6536.748046875, 7734),
    ("smollm2-1.7b", "sdpa", 4, 1024): (6528.748046875, 7094),
    ("qwen2.5-1.5b", "eager", 2, 1024): (7405.8095703125, 7910),
    ("qwen2.5-1.5b", "sdpa", 2, 1024): (7401.8095703125, 7766),
}
"""MiB in blocks and in segments, by model, attention, samples and tokens: all rows without quantization in
data/measurements/t4-sweep-2026-09-15.json of Anassbzdd/fitcheck at 1e72b19a."""

UNDER_AUTOCAST = {
    ("gpt2", 4, 128): (2_705_153_536, 3_042_967_552), ("gpt2", 8, 256): (5_736_883_712, 6_092_226_560),
    ("distilbert-base", 4, 128): (1_354_818_048, 1_501_560_832),
    ("distilbert-base", 8, 256): (1_757_328_384, 1_954_545_664),
    ("bert-base", 4, 128): (2_209_738_240, 2_483_027_968), ("bert-base", 8, 256): (3_185_408_000, 3_491_758_080),
    ("resnet50", 16, 224): (1_119_203_840, 1_195_376_640), ("resnet50", 32, 224): (1_839_903_232, 2_000_683_008),
}  # fmt: skip
"""Bytes in blocks and in segments, by model, samples, and tokens or pixels: `measured_allocated_bytes` and
`measured_reserved_bytes` of tests/calibration/measured_peaks.json of highwaterlabs/torch-preflight at 774b8396."""


def on_turing(row: tuple[Any, ...]) -> dict[str, Any]:
    """Dry-run a step that fitcheck was calibrated with on a T4, and return its bytes beside the published."""
    found: list[course.Peaks] = []
    allocated, reserved = (round(mib * 2**20) for mib in ADAPTED[row])
    version = "2.14.0+cu130"
    dry_run(lambda: found.append(turing.adapted(*row)), gpu="t4-16g", steps=1, torch_version=version)
    facts = {
        "name": turing_name(row), "card": "t4-16g", "torch": version, "repository": "Anassbzdd/fitcheck",
        "known": f"{row[0]} in fp16, LoRA of rank 32 on attention's projections, {row[1]} attention, layers "
        f"checkpointed, {row[-2]} samples of {row[-1]} tokens, AdamW, the second step",
        "assumed": "transformers 5.23, where it was 5.17",
    }  # fmt: skip
    return with_errors(facts, found[0], allocated, reserved)


@cache
def calibrated() -> dict[tuple[Any, ...], course.Peaks]:
    """Dry-run the whole script of torch-preflight, once for all of its rows."""
    found: list[dict[tuple[Any, ...], course.Peaks]] = []
    dry_run(lambda: found.append(calibration.whole()), gpu="t4-16g", steps=1, torch_version="2.11")
    return found[0]


def under_autocast(row: tuple[Any, ...]) -> dict[str, Any]:
    """Return the bytes of a row of torch-preflight on a T4 beside the published."""
    facts = {
        "name": turing_name(row), "card": "t4-16g", "torch": "2.11.0+cu128",
        "repository": "highwaterlabs/torch-preflight",
        "known": f"{row[0]} in fp32 under autocast, {row[-2]} samples of {row[-1]} tokens or pixels, AdamW, the second "
        "step, in the order of the script",
        "assumed": "bf16, as torch says that a T4 has it; the transformers of that day",
    }  # fmt: skip
    return with_errors(facts, calibrated()[row], *UNDER_AUTOCAST[row])


HYBRID = {
    ("rtxpro5000-72g", "0.8b", 16, "full", 2): 6.626, ("rtxpro5000-72g", "0.8b", 128, "full", 1): 6.687,
    ("rtxpro5000-72g", "0.8b", 128, "full-checkpointed", 1): 6.679, ("rtxpro5000-72g", "0.8b", 16, "lora", 1): 1.756,
    ("rtxpro5000-72g", "0.8b", 128, "lora", 1): 2.696, ("rtxpro5000-72g", "0.8b", 128, "lora-checkpointed", 1): 1.876,
    ("rtxpro5000-72g", "2b", 16, "full", 2): 15.939, ("rtxpro5000-72g", "2b", 16, "lora", 1): 3.868,
    ("rtxpro5000-72g", "2b", 128, "lora", 1): 4.959, ("rtxpro5000-72g", "2b", 128, "lora-checkpointed", 1): 3.974,
    ("rtx3090ti-24g", "0.8b", 16, "full", 1): 6.630, ("rtx3090ti-24g", "0.8b", 128, "lora-checkpointed", 1): 1.876,
}  # fmt: skip
"""GiB of `max_memory_allocated`, by card, size, tokens, what is trained, and micro-batches: all rows without
quantization on one GPU in docs/llm-sft-memory-estimation.md of FanBB2333/FakeGPU at 7d5cf83c."""

AS_DRY_RUN = {"rtxpro5000-72g": ("rtxpro6000-96g", "2.8"), "rtx3090ti-24g": ("rtx3090-24g", "2.12")}
"""A card of the same kind, and torch."""


def of_hybrid(row: tuple[Any, ...]) -> dict[str, Any]:
    """Dry-run the first step of a Qwen3.5 and return its blocks beside the printed ones."""
    card, size, length, trained, micro_batches = row
    found: list[course.Peaks] = []
    loop = partial(
        hybrid.step, size, length, is_lora=trained.startswith("lora"), is_checkpointed=trained.endswith("checkpointed"),
        micro_batches=micro_batches,
    )  # fmt: skip
    gpu, version = AS_DRY_RUN[card]
    dry_run(lambda: found.append(loop()), gpu=gpu, steps=1, torch_version=version)
    facts = {
        "name": hybrid_name(row), "card": card, "torch": {"2.8": "2.8.0+cu128", "2.12": "2.12.1+cu130"}[version],
        "repository": "FanBB2333/FakeGPU",
        "known": f"Qwen3.5-{size.upper()} in bf16, {trained}, {micro_batches} micro-batches of a sample of {length} "
        "tokens, AdamW parameter by parameter, the first step, transformers 5.12.1, linear attention in plain torch",
        "assumed": f"dry-run as {gpu}; printed to 0.001 GiB, so equal figures count as exact",
    }  # fmt: skip
    return as_printed(facts, found[0], HYBRID[row], 2**30, 3)


def hybrid_name(row: tuple[Any, ...]) -> str:
    """Return the name of a row of a Qwen3.5."""
    card, size, length, trained, _ = row
    return f"{card.partition('-')[0]}-qwen3.5-{size}-{trained}-{length}"


def turing_name(row: tuple[Any, ...]) -> str:
    """Return the name of a row of a T4."""
    return "-".join(("t4", *row[:-2], f"{row[-2]}x{row[-1]}"))


def compared(row: Row) -> dict[str, Any]:
    """Dry-run a row's loop and return its figures beside those of the recording."""
    recording = Recording.read(FOLDER / f"{row.name}{SUFFIX}")
    stream = recording.stream
    found: list[course.Peaks] = []
    with patch.object(LoopTracker, "reservation_bytes", stream.reservation_bytes):
        dry_run(
            lambda: found.append(row.loop()),
            gpu=row.card if stream.device == "not stated" else CARDS.get(stream.device, stream.device),
            steps=1,
            expandable_segments=stream.expandable_segments,
            torch_version=stream.versions["torch"],
        )
    facts = {
        "name": row.name, "card": stream.device, "torch": stream.versions["torch"],
        "repository": recording.source.repository, "known": recording.script, "assumed": row.assumed,
    }  # fmt: skip
    made = with_errors(facts, found[0], recording.peak_allocated_bytes, stream.reserved_bytes)
    return made | {"made_bytes": recording.made_bytes}


LITGPT = {
    ("phi-1.5", 1): 4.82, ("phi-1.5", 2): 6.76, ("phi-1.5", 4): 10.68, ("stablelm-alpha-3b", 1): 9.69,
    ("stablelm-alpha-3b", 2): 12.10, ("stablelm-alpha-3b", 4): 16.92, ("llama-2-7b", 1): 21.30,
    ("llama-2-7b", 2): 29.07, ("llama-2-13b", 1): 38.12,
}  # fmt: skip
"""GB of `max_memory_allocated`, by model and samples of a micro-batch: all rows of LoRA on one GPU without quantization
in tutorials/resource-tables.md of Lightning-AI/litgpt at 0cc02afa."""


def of_litgpt(name: str, samples: int) -> dict[str, Any]:
    """Dry-run the fullest micro-step of Lit-GPT's LoRA and return its blocks beside the printed ones."""
    found: list[course.Peaks] = []
    loop = partial(litgpt.micro_step, name, samples)
    dry_run(lambda: found.append(loop()), gpu="a100-40g", steps=1, torch_version="2.1")
    facts = {
        "name": f"a100-litgpt-{name}-{samples}", "card": "a100-40g", "torch": "2.1.0+cu121",
        "repository": "Lightning-AI/litgpt",
        "known": f"{name} in bf16, LoRA of rank 8 on queries and values, {samples} samples of the length of the "
        f"longest, {litgpt.SIZES[name].longest} tokens, the head in chunks of 128 tokens",
        "assumed": "that no later micro-step is fuller; no flash-attn; printed to 0.01 GB, so equal figures are exact",
    }  # fmt: skip
    return as_printed(facts, found[0], LITGPT[name, samples], 10**9)


KERNELS: dict[str, tuple[str, Callable[[], course.Peaks], float]] = {
    "fused_add_rms_norm": ("h100-80g", partial(kernels.fused_add_rms_norm, 2048), 208.05517578125),
    "fused_linear_cpo_loss": ("a100-80g", partial(kernels.preference, 4, 1024, by_odds=False), 12184.330078125),
    "multi_token_attention": ("rtx3090-24g", partial(kernels.multi_token_attention, 64), 1.4814453125),
    "rms_norm": ("a100-80g", partial(kernels.rms_norm, 1024), 80.01953125),
    "fused_linear_cross_entropy": ("a100-80g", partial(kernels.fused_linear_cross_entropy, 32_768), 27582.5),
    "fused_linear_orpo_loss": ("a100-80g", partial(kernels.preference, 16, 1024, by_odds=True), 33418.421875),
    "swiglu": ("a100-80g", partial(kernels.swiglu, 1024), 1294.25),
    "kl_div": ("h100-80g", partial(kernels.kl_div, 32_768), 14336.0),
    "tvd": ("h100-80g", partial(kernels.tvd, 16_384), 8192.0009765625),
    "layer_norm": ("h100-80g", partial(kernels.layer_norm, 2048), 160.09375),
    "embedding": ("a100-80g", partial(kernels.embedding, 32_768), 12773.6875),
    "fused_linear_jsd": ("h100-80g", partial(kernels.fused_linear_jsd, 4096), 30220.017578125),
    "jsd": ("h100-80g", partial(kernels.jsd, 65_536), 26624.0),
}  # fmt: skip
"""Card, loop and MiB in blocks: 13 of the 24 pairs of a comparison and a card whose other side is plain torch, and one
size of each, in benchmark/data/all_benchmark_data.csv of linkedin/Liger-Kernel at 2120862b, drawn with
`random.Random(28)`. A 14th, `kto_loss`, keeps what random labels choose; the script of `fused_linear_orpo_loss` is kept
for 1024 tokens, not for the 4096 that were drawn."""


def of_kernels(name: str) -> dict[str, Any]:
    """Dry-run the plain side of a comparison of kernels and return its blocks beside the published ones."""
    found: list[course.Peaks] = []
    card, loop, mebibytes = KERNELS[name]
    dry_run(lambda: found.append(loop()), gpu=card, steps=1)
    facts = {
        "name": f"liger-{name}", "card": card, "torch": "not stated", "repository": "linkedin/Liger-Kernel",
        "known": f"forward and backward of the plain modules that {name} is compared with, repeated",
        "assumed": "that rows before left nothing but workspaces",
    }  # fmt: skip
    return with_errors(facts, found[0], round(mebibytes * 2**20), None)


def summary(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of all rows, in short."""
    result: dict[str, Any] = {"rows": len(made)}
    for name in ("card", "torch", "repository"):
        result[name] = len({each[name].partition("+")[0] for each in made} - {"not stated"})
    result["with_stated_card"] = sum(each["card"] != "not stated" for each in made)
    for name in ("allocated_error", "reserved_error"):
        errors = [each[name] for each in made if each[name] is not None]
        result[name] = {
            "rows": len(errors),
            "median": statistics.median(map(abs, errors)), "worst": max(map(abs, errors)), "lowest": min(errors),
            "exact": errors.count(0),
        }  # fmt: skip
    return result


def line(each: dict[str, Any]) -> str:
    """Return the line of a row."""
    parts = [f"{each['name']:<62} {each['card']:<16} torch {each['torch']:<12}"]
    for what in ("allocated", "reserved"):
        if each[f"{what}_bytes"] is not None:
            parts.append(f"{what} {each[f'{what}_bytes'] / 2**20:>9.1f} MiB {each[f'{what}_error']:+.4%}")
    return " ".join(parts)


def all_makers() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a function for each row that makes it, by name."""
    makers: dict[str, Callable[[], dict[str, Any]]] = {row.name: partial(compared, row) for row in rows()}
    makers |= {f"l40s-llama-3.2-3b-{method}": partial(of_adapters, method) for method in PUBLISHED}
    makers |= {f"h100-zero3-6.9b-{states}": partial(under_zero3, states) for states in UNDER_ZERO3}
    makers |= {turing_name(row): partial(on_turing, row) for row in ADAPTED}
    makers |= {turing_name(row): partial(under_autocast, row) for row in UNDER_AUTOCAST}
    makers |= {hybrid_name(row): partial(of_hybrid, row) for row in HYBRID}
    makers |= {f"a100-litgpt-{name}-{samples}": partial(of_litgpt, name, samples) for name, samples in LITGPT}
    makers |= {f"liger-{name}": partial(of_kernels, name) for name in KERNELS}
    return makers


BLIND = ("a100-litgpt-", "liger-")
"""Rows of a test whose loops were written before any prediction, apart from the table. Only Lit-GPT's norm was mended
since."""


def main(names: Sequence[str]) -> None:
    """Make the rows of these names, or all, and print them as they come."""
    makers, made = all_makers(), []
    for name in names or [name for name in makers if not name.startswith(BLIND)]:
        made.append(makers[name]())
        print(line(made[-1]), flush=True)
    if not names:
        result = summary(made)
        print(json.dumps(result, indent=1))
        about = environment("python -m bench.recordings.predicted")
        about["device"] = f"the cards of the rows; dry-run on {about['device']}"
        RESULTS.write_text(json.dumps({**about, "summary": result, "rows": made}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
