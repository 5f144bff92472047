"""`python -m bench.training.ragged`: text of very different lengths, in fixed micro-batches and in grouped ones.

Samples are stretches of Python's own library, their lengths drawn log-normal: 99 % are more than ten times as long as
half of them at most, and the longest fills the plan's sequence. Two engines on two CPU ranks, from the same weights,
are trained on the same global batches, step by step in turns: one in the plan's micro-batches of a fixed number of
samples, in the order of the data; the other in micro-batches that `frugal.data.batches` groups by length
under the same plan.

Measured: seconds of each step (ratio of the sums, and the median of the ratios), padded positions for each token, and
the loss of both. Then the epoch once more with a limit on memory enforced: the storages of every operator are counted,
and a rank that has more live bytes than the plan promises is refused the next one as a GPU would refuse it. This twice:
in the micro-steps that are soonest done, and in the fewest, which fill the plan's budget.

Goals: no step runs out of memory, no token is left out, at most a tenth of the padding is left, equal losses.
"""

import gc
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import frugal
from bench.environment import environment
from bench.goals import report_goals
from bench.plans import without_calibration
from bench.ranks import Ranks
from frugal.planning.plan import Plan
from frugal.units import format_bytes

RESULTS = Path(__file__).parents[1] / "results" / "ragged-cpu.json"
NUM_SAMPLES, GLOBAL_BATCH, SEQ_LEN, WORLD_SIZE = 384, 64, 1024, 2
MEDIAN_TOKENS, SPREAD = 40, 1.15
MOST_PADDING = 0.1  # of the padding of fixed micro-batches
MODEL = {
    "model_type": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 260, "n_positions": SEQ_LEN,
    "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip


class Text(list[Any]):
    """Samples with their lengths; no window is cut from them."""

    def __init__(self) -> None:
        generator = random.Random(0)
        text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        for number in range(NUM_SAMPLES):
            length = max(4, min(SEQ_LEN, round(MEDIAN_TOKENS * generator.lognormvariate(0, SPREAD))))
            length = length if number else SEQ_LEN
            start = generator.randrange(len(text) - length)
            super().append({"input_ids": np.frombuffer(text, np.uint8, length, start).astype(np.int64) + 4})
        self.lengths = np.array([len(sample["input_ids"]) for sample in self])


def planned(folder: Path) -> Plan:
    """On two CPU ranks, with memory for a few samples of full length."""
    config = folder / "config.json"
    config.write_text(json.dumps(MODEL))
    lengths, counts = np.unique(Text().lengths, return_counts=True)
    without_calibration()
    return frugal.plan(
        model=str(config), device="cpu", gpus=WORLD_SIZE, mem="600M", seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH,
        precision="fp32", zero_stage=2, activation_checkpointing="off", loss="plain",
        lengths=dict(zip(lengths.tolist(), counts.tolist(), strict=True)),
    )  # fmt: skip


def engine_of(plan: Plan) -> Any:
    """An engine with the same weights each time."""
    import torch

    from frugal.engine.engine import initialize
    from frugal.models.objectives import CausalLM
    from frugal.models.resolve import resolve

    spec = resolve(plan.request.model, None)
    return initialize(spec.build(dtype=torch.float32, device="cpu", seed=0), plan, CausalLM())


def steps(plan: Plan) -> Iterator[tuple[list[Any], Any]]:
    """The epoch: each global batch as a plain list, whose lengths nobody knows, and with its lengths."""
    from frugal.data.batches import GlobalBatches

    batches = GlobalBatches(Text(), global_batch=GLOBAL_BATCH, seed=1)
    position, drawn = batches.at().start, 0
    while drawn < NUM_SAMPLES:
        batch = batches.at(position)
        yield [batch[i] for i in range(len(batch))], batch
        position, drawn = batch.end, drawn + len(batch)


def in_turns(plan: Plan) -> list[dict[str, Any]]:
    """Return what both engines take for each step; runs on ranks."""
    import torch.distributed as dist

    from frugal.data.batches import share

    fixed, grouped = engine_of(plan), engine_of(plan)
    found = []
    for number, (as_list, with_lengths) in enumerate(steps(plan)):
        step: dict[str, Any] = {"tokens": int(with_lengths.lengths.sum())}
        turns = [("fixed", fixed, as_list), ("grouped", grouped, with_lengths)]
        for name, engine, samples in turns if number % 2 == 0 else turns[::-1]:
            shapes = [batch["input_ids"].shape for batch in engine.prepare(samples).batches]
            dist.barrier()
            began = time.perf_counter()
            loss = engine.train_step(samples).loss
            dist.barrier()
            step[name] = {
                "seconds": time.perf_counter() - began,
                "loss": loss,
                "shapes": [list(shape) for shape in shapes],
                "samples": sum(map(len, share(samples, engine.limits, engine.rank, plan.batch).places)),
            }
        found.append(step)
    for engine in (fixed, grouped):
        engine.destroy()
    gc.collect()
    return found


@contextmanager
def limited(limit_bytes: int) -> Iterator[Any]:
    """A gauge that refuses what would be more than `limit_bytes`."""
    import torch

    from frugal.memory_watch import HostGauge

    class Limited(HostGauge):
        def born(self, address: int, size_bytes: int, tensor: torch.Tensor, operator: Any) -> None:
            super().born(address, size_bytes, tensor, operator)
            if self.live_bytes > limit_bytes:
                raise torch.OutOfMemoryError(f"out of memory: {self.live_bytes} bytes live, {limit_bytes} promised")

    with Limited(torch.device("cpu")) as gauge:
        yield gauge


def under_a_limit(plan: Plan, limit_bytes: int, is_full: bool) -> dict[str, Any]:
    """The epoch in grouped micro-batches, never more than `limit_bytes` live; runs on ranks.

    `is_full`: in the fewest micro-steps, which fill the budget, rather than in those that are soonest done.
    """
    with limited(limit_bytes) as gauge:
        engine = engine_of(plan)
        if is_full:
            engine.adaptive_limits.limits = replace(engine.limits, overhead=None)
        before, losses, tokens = engine.limits, [], 0
        for _, batch in steps(plan):
            losses.append(engine.train_step(batch).loss)
            tokens += int(batch.lengths.sum())
        found = {
            "peak_bytes": gauge.peak_bytes,
            "was_out_of_memory": engine.limits != before,
            "tokens": tokens,
            "losses": losses,
        }
        engine.destroy()
    gc.collect()
    return found


def summary(plan: Plan, text: Text, by_rank: list[Any], limits: list[Any]) -> dict[str, Any]:
    """Return what both engines made of the epoch, of every rank's steps; and what it took under a limit, spread and
    full."""
    median, percentile_99 = (float(np.percentile(text.lengths, share)) for share in (50, 99))
    padded = {
        name: sum(rows * width for rank in by_rank for step in rank for rows, width in step[name]["shapes"])
        for name in ("fixed", "grouped")
    }
    first = by_rank[0]
    seconds = {name: sum(step[name]["seconds"] for step in first) for name in padded}
    tokens = sum(step["tokens"] for step in first)
    padding = {name: each / tokens - 1 for name, each in padded.items()}
    differences = [abs(step["fixed"]["loss"] / step["grouped"]["loss"] - 1) for step in first]
    samples = sum(step["grouped"]["samples"] for rank in by_rank for step in rank)
    text_tokens = int(text.lengths.sum())
    goals = {
        "heavy tail": percentile_99 / median >= 10,
        "no step out of memory": not any(rank["was_out_of_memory"] for rank in limits),
        "never more bytes than planned": max(rank["peak_bytes"] for rank in limits) <= plan.memory.live_bytes,
        "no sample left out or cut": samples == NUM_SAMPLES and {tokens, limits[0]["tokens"]} == {text_tokens},
        "at most a tenth of the padding": padding["grouped"] <= MOST_PADDING * padding["fixed"],
        "the same losses": max(differences) < 1e-4,
    }
    assert all(type(reached) is bool for reached in goals.values())
    return {
        "ranks": WORLD_SIZE,
        "samples": NUM_SAMPLES,
        "tokens": tokens,
        "median_tokens": median,
        "percentile_99_tokens": percentile_99,
        "longest_tokens": int(text.lengths.max()),
        "global_batch": GLOBAL_BATCH,
        "micro_batch": max(plan.batch.micro_batch),
        "shortest": plan.batch.shortest,
        "overhead_tokens": plan.batch.overhead_tokens,
        "planned_bytes": plan.memory.live_bytes,
        "peak_bytes": [rank["peak_bytes"] for rank in limits[:WORLD_SIZE]],
        "peak_bytes_in_fewest_micro_steps": [rank["peak_bytes"] for rank in limits[WORLD_SIZE:]],
        "padding": padding,
        "tokens_per_second": {name: tokens / each for name, each in seconds.items()},
        "ratio": seconds["fixed"] / seconds["grouped"],
        "ratio_median": statistics.median(step["fixed"]["seconds"] / step["grouped"]["seconds"] for step in first),
        "micro_steps": {name: [len(step[name]["shapes"]) for step in first] for name in padded},
        "losses": {name: [step[name]["loss"] for step in first] for name in padded},
        "largest_difference_of_losses": max(differences),
        "goals": goals,
    }


def main() -> int:
    """Plan, measure, write the results, and say whether the goals are reached."""
    import tempfile

    text = Text()
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(Path(folder))
        ranks = Ranks(WORLD_SIZE)
        by_rank = ranks.run(in_turns, plan, timeout=3000)
        limits = [
            rank
            for is_full in (False, True)
            for rank in ranks.run(under_a_limit, plan, plan.memory.live_bytes, is_full, timeout=3000)
        ]
        ranks.close()
    result = environment("python -m bench.training.ragged") | summary(plan, text, by_rank, limits)
    padding = result["padding"]
    sys.stdout.write(
        f"padding {padding['fixed']:.2f} -> {padding['grouped']:.3f}, {result['ratio']:.2f}x tokens/s, peak "
        f"{format_bytes(max(rank['peak_bytes'] for rank in limits))} of {format_bytes(plan.memory.live_bytes)}\n"
    )
    return report_goals(result, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
