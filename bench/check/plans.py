"""`python -m bench.check.plans`: verdicts of `frugal check` on public files, against plans of the same settings.

Of the files that get a verdict under ZeRO 0 to 2 (a plan can pin all that decides memory there, but sums in fp16;
sizes of ZeRO-3's buffers it cannot), a plan with the same batch, stage, buckets, offloading, activation checkpointing,
loss, optimizer and adapters has to come to the same bytes. Half precision below ZeRO-2 is left out, which frugal
refuses to train, and so are runs without DeepSpeed that are dry-run in Trainer. The model is a wide Llama of two
layers: a plan takes no bucket that is larger than the model. Results go to `bench/results/check-plans.json`.
"""

import argparse
import json
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from bench.check.public import MODEL, Listed, checked, fetched
from bench.environment import environment
from frugal.config.request import Request
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.planner import make_plan
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.tools.check.verdict import Subject, Verdict

RESULTS = Path(__file__).parents[1] / "results" / "check-plans.json"
WANTED = 28
LARGE = MODEL | {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 100_000}
"""1.2 billion parameters, most of them embeddings: more than the largest bucket of these files."""


def can_be_pinned(subject: Subject) -> bool:
    """Return whether a plan can be told all that decides memory: it never sums in fp16, nor overlaps communication."""
    strategy, is_half = subject.strategy, subject.request.precision != "fp32"
    sums_otherwise = strategy.gradient_accumulation_dtype == "fp16" or strategy.overlap_comm
    if strategy.zero_stage == 0:
        return not is_half
    return strategy.zero_stage < 3 and not sums_otherwise and not (is_half and strategy.zero_stage == 1)


def pinned(subject: Subject) -> Request:
    """Return the request of a check with everything pinned that its strategy and batch say."""
    strategy, batch = subject.strategy, subject.batch
    accumulation: Any = strategy.gradient_accumulation_dtype
    return replace(
        subject.request,
        global_batch=batch.global_batch, micro_batch=batch.largest_micro_batch,
        accumulation_steps=batch.accumulation_steps,
        zero_stage=strategy.zero_stage,
        activation_checkpointing="full" if strategy.activation_checkpointing == "full" else "off",
        loss="tiled" if strategy.loss == "tiled" else "plain", mlp="plain", kernels="plain",
        offload="none" if strategy.offload_optimizer == "none" else "optimizer",
        optimizer=replace(
            subject.request.optimizer, gradient_accumulation_dtype=accumulation if strategy.zero_stage else "fp32"
        ),
        expandable_segments=strategy.expandable_segments,
    )  # fmt: skip


def row(verdict: Verdict, pool: Pool) -> dict[str, Any]:
    """Return the bytes of a verdict and of the plan with the same settings."""
    subject = verdict.subject
    bucket = subject.strategy.reduce_bucket_elements  # a file says its size, which is frugal's own to choose in a plan
    with mock.patch("frugal.planning.strategy.BUCKET_ELEMENTS", bucket):
        plan = make_plan(pinned(subject), subject.cluster, dry_run=partial(DryRunSource, pool=pool))
    return {
        "strategy": str(subject.strategy), "model": Path(subject.request.model).stem,
        "check_bytes": verdict.memory.total_bytes, "plan_bytes": plan.memory.total_bytes,
        "is_same_batch": plan.batch == subject.batch,
    }  # fmt: skip


def main() -> None:
    """Compare, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/public"), help="of the files")
    folder = parser.parse_args().folder.resolve()
    listed, rows = Listed.kept(), []
    with TemporaryDirectory() as scratch, closing(workers()) as pool:
        model = Path(scratch) / "large.json"
        model.write_text(json.dumps(LARGE))
        for each in listed.rows:
            if each.reading.outcome != "verdict" or len(rows) == WANTED:
                continue
            fetched(folder, each.repository, listed.repositories[each.repository], each.paths)
            done, _ = checked(each, folder, model, pool)
            if done.verdict is None or not can_be_pinned(done.verdict.subject):
                continue
            if done.deepspeed is None and done.verdict.subject.strategy.zero_stage == 0:  # Trainer's loop, not frugal's
                continue
            try:
                made = row(done.verdict, pool)
            except FrugalError as error:
                made = {"no_plan": str(error).split("\n")[0]}
            rows.append({"repository": each.repository, "path": each.path, **made})
            print(rows[-1], flush=True)
    figures = {
        "compared": sum("plan_bytes" in each for each in rows),
        "same": sum(each.get("plan_bytes", 0) == each.get("check_bytes") for each in rows),
    }
    print(figures)
    RESULTS.write_text(
        json.dumps({**environment("python -m bench.check.plans"), **figures, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
