"""`python -m bench.training.throughput --ranks 2`: tokens per second, against others that train with DeepSpeed.

Samples are the docstrings of Python's own library, one byte a token, in pieces of at most `SEQ_LEN`: half of them have
fewer than a hundred tokens. In each round every contender trains one epoch over the same samples from the same weights,
in turns whose order changes; see `bench.training.throughput_rank`. All see the same tokens in an epoch, so tokens per
second are compared by the seconds of it, per round; medians of the rounds.

All have memory for the same number of full-length samples, which is the peers' micro-batch: `--room 8`, HF Trainer's
default, or 2 or 1, as on a small card. There a global batch has 256 samples, not 64, and those who pad in random order
are left out: their micro-batches of one have no padding.

- by hand: a loop on DeepSpeed alone, given frugal's micro-batches. Its losses must be frugal's, bit by bit.
- trainer: HF Trainer with defaults, samples in random order.
- trainer, grouped: the same with `train_sampling_strategy="group_by_length"`, all samples sorted together.
- accelerate: the loop of its documentation, samples in random order.

Each number of ranks is measured by itself and kept beside the other. One thread a rank.
"""

import argparse
import ast
import json
import statistics
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import frugal
from bench.environment import environment
from bench.goals import report_goals
from bench.plans import without_calibration
from bench.ranks import Ranks
from bench.training.throughput_rank import run
from frugal.data.batches import permutation
from frugal.planning.plan import Plan

RESULTS = Path(__file__).parents[1] / "results" / "throughput-cpu.json"
SEQ_LEN, ROUNDS = 512, 5
NAMES = {
    "by hand": "a loop by hand on DeepSpeed, frugal's micro-batches",
    "trainer": "HF Trainer, random order",
    "trainer, grouped": "HF Trainer, `group_by_length`",
    "accelerate": "Accelerate's loop, random order",
}
"""What docs/benchmarks.md calls the peers."""

NOISE = 0.03  # of the ratio to the loop by hand: both do the same work


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The training: an epoch of `steps` global batches, in memory for `micro_batch` samples of full length.

    `goals` are the least ratios of frugal's tokens per second to each peer's.
    """

    micro_batch: int
    global_batch: int
    steps: int
    goals: dict[str, float]


USUAL = Setting(
    micro_batch=8, global_batch=64, steps=4,
    goals={"by hand": 1.0, "trainer": 2.5, "trainer, grouped": 1.1, "accelerate": 1.0},
)  # fmt: skip
SETTINGS = {8: USUAL} | {
    room: Setting(micro_batch=room, global_batch=256, steps=2, goals={"by hand": 1.0, "trainer, grouped": 1.1})
    for room in (2, 1)
}
MODEL = {
    "n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 260, "n_positions": SEQ_LEN, "use_cache": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Docstrings(list[Any]):
    """So many pieces of the docstrings of Python's library, drawn evenly, with their lengths."""

    def __init__(self, number: int, seq_len: int) -> None:
        pieces = []
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = np.frombuffer((ast.get_docstring(node) or "").encode(), np.uint8).astype(np.int64) + 4
                    pieces += [text[i : i + seq_len] for i in range(0, len(text), seq_len)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        super().__init__({"input_ids": pieces[i]} for i in permutation(len(pieces), seed=0, epoch=0)[:number])
        self.lengths = np.array([len(sample["input_ids"]) for sample in self])


def planned(folder: Path, samples: Docstrings, ranks: int, shape: dict[str, Any], setting: Setting) -> Plan:
    """ZeRO-2 with memory for the setting's micro-batch."""
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape}))
    lengths, counts = np.unique(samples.lengths, return_counts=True)
    without_calibration()
    return frugal.plan(
        model=str(config), device="cpu", gpus=ranks, mem="2G", seq_len=shape["n_positions"],
        global_batch=setting.global_batch, max_tokens_per_gpu=setting.micro_batch * shape["n_positions"],
        precision="fp32", zero_stage=2, loss="plain", activation_checkpointing="off",
        lengths=dict(zip(lengths.tolist(), counts.tolist(), strict=True)),
    )  # fmt: skip


def rounds(
    plan: Plan, ranks: Ranks, samples: Docstrings, shape: dict[str, Any], setting: Setting, number: int
) -> list[dict[str, list[dict[str, Any]]]]:
    """Return of each round what each contender took, by rank. A round before them, of one step, is thrown away."""
    names, found = ["frugal", *setting.goals], []
    for name in names:
        ranks.run(run, name, plan, shape, samples, 1, 0, timeout=900)
    for turn in range(number):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found.append(
            {name: ranks.run(run, name, plan, shape, samples, setting.steps, turn, timeout=900) for name in order}
        )
    return found


def padding_of_everything(plan: Plan, seq_len: int) -> dict[str, float]:
    """Padded positions for each token over all docstrings, by arithmetic.

    The samples that are trained are few, and so are those that HF's sampler sorts together: it takes up to 50 global
    batches of a rank, but at most a quarter of the data. Here it has enough.
    """
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    from frugal.data.batches import GlobalBatches, MicroBatchLimits, share

    samples = Docstrings(sys.maxsize, seq_len)
    batch = plan.batch
    batches = GlobalBatches(samples, global_batch=batch.global_batch, seed=0)
    micro_batches = [
        (number * batch.global_batch, places)
        for number in range(len(samples) // batch.global_batch)
        for rank in range(batch.world_size)
        for places in share(batches.at(batches.after(number)), MicroBatchLimits.of(plan), rank, batch).places
    ]
    order = np.array(permutation(len(samples), seed=0, epoch=0)[:])
    grouped = get_length_grouped_indices(
        samples.lengths.tolist(), batch.global_batch // batch.world_size, generator=torch.Generator().manual_seed(0)
    )
    return {
        "frugal": _padded(
            [samples.lengths[order[[begin + place for place in places]]] for begin, places in micro_batches if places]
        ),
        "random": _padded(_in_turn(samples.lengths[order], batch.micro_batch[0])),
        "trainer, grouped": _padded(_in_turn(samples.lengths[grouped], batch.micro_batch[0])),
    }


def _in_turn(lengths: NDArray[Any], micro_batch: int) -> list[NDArray[Any]]:
    return [lengths[i : i + micro_batch] for i in range(0, len(lengths), micro_batch)]


def _padded(micro_batches: list[NDArray[Any]]) -> float:
    return float(sum(len(each) * each.max() for each in micro_batches) / sum(each.sum() for each in micro_batches))


def summary(
    plan: Plan, found: list[dict[str, list[dict[str, Any]]]], tokens: int, goals: dict[str, float]
) -> dict[str, Any]:
    """The kept record of one number of ranks and one setting."""
    seconds = {name: [turn[name][0]["seconds"] for turn in found] for name in found[0]}
    drawn = {name: {sum(rank["tokens"] for rank in turn[name]) for turn in found} for name in found[0]}
    assert all(each == {tokens} for name, each in drawn.items() if name != "trainer, grouped"), (tokens, drawn)
    ratios = {
        name: [theirs / ours for theirs, ours in zip(seconds[name], seconds["frugal"], strict=True)] for name in goals
    }
    middle = {name: statistics.median(each) for name, each in ratios.items()}
    losses = {name: found[0][name][0]["losses"] for name in found[0]}
    world_size, micro_batch = plan.batch.world_size, plan.batch.micro_batch[0]
    return environment(f"python -m bench.training.throughput --ranks {world_size} --room {micro_batch}") | {
        "accelerate": version("accelerate"),
        "full_length_samples_in_memory": micro_batch,
        "global_batch": plan.batch.global_batch,
        "tokens_of_an_epoch": tokens,
        "seconds": seconds,
        "tokens_per_second": {name: tokens / statistics.median(each) for name, each in seconds.items()},
        "padded_for_each_token": {
            name: statistics.median(
                sum(rank["padded_tokens"] for rank in turn[name]) / sum(rank["tokens"] for rank in turn[name])
                for turn in found
            )
            for name in found[0]
        },
        "micro_batches_of_a_rank": {name: found[0][name][0]["micro_batches"] for name in found[0]},
        "frugal_is_faster": {name: {"median": middle[name], "rounds": ratios[name]} for name in goals},
        "losses_of_the_first_round": losses,
        "goals": {
            **{f"{name}: {goal}x": middle[name] >= goal - NOISE * (name == "by hand") for name, goal in goals.items()},
            "the losses are those of the loop by hand": all(
                turn["frugal"][0]["losses"] == turn["by hand"][0]["losses"] for turn in found
            ),
        },
    }


def table(kept: dict[str, Any]) -> str:
    """Return the table of docs/benchmarks.md, of the records for one rank and for two."""
    lines = ["| room for | | padded positions a token | 1 rank | 2 ranks |", "|---|---|---|---|---|"]
    for room, setting in SETTINGS.items():
        records = [kept[f"{ranks} ranks, room for {room}"] for ranks in (1, 2)]
        for name in setting.goals:
            padded = dict.fromkeys(f"{record['padded_for_each_token'][name]:.2f}" for record in records)
            columns = [room, NAMES[name], ", ".join(padded), *(_faster(record, name) for record in records)]
            lines.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(lines)


def _faster(record: dict[str, Any], name: str) -> str:
    ratio = record["frugal_is_faster"][name]
    return f"{ratio['median']:.2f} ({min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f})"


def main() -> int:
    """Measure, keep, and say whether the goals are reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--room", type=int, choices=SETTINGS, default=8, help="full-length samples that memory holds")
    asked = parser.parse_args()
    setting = SETTINGS[asked.room]
    samples = Docstrings(setting.steps * setting.global_batch, SEQ_LEN)
    ranks = Ranks(asked.ranks)
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(Path(folder), samples, asked.ranks, MODEL, setting)
        found = rounds(plan, ranks, samples, MODEL, setting, asked.rounds)
    ranks.close()
    result = summary(plan, found, int(samples.lengths.sum()), setting.goals)
    result["padded_for_each_token_of_all_docstrings"] = padding_of_everything(plan, SEQ_LEN)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[f"{asked.ranks} ranks, room for {asked.room}"] = result
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n")
    for name in result["frugal_is_faster"]:
        print(f"{_faster(result, name)} times the tokens/s of {name}")
    if len(kept) == 2 * len(SETTINGS):
        print(f"\n{table(kept)}\n")
    return report_goals(result)


if __name__ == "__main__":
    sys.exit(main())
