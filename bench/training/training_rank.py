"""A run that is trained a few steps at a time, so that several can take turns; it lives on ranks between the turns.

Used by `bench.training.translation` and `bench.training.scaling`. The samples are those that `frugal train` would read,
the engine is its engine.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from frugal.data import corpus as data
from frugal.data import tokenizer as tokenizing
from frugal.data.batches import GlobalBatches, Position
from frugal.data.build import SampleSettings
from frugal.data.corpus import Corpus, Subset
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.engine import Engine, initialize
from frugal.models import resolve
from frugal.planning.plan import Plan


@dataclass(frozen=True)
class Text:
    """Documents or pairs, one byte a token: so many at most (None: all). What is tokenised is kept in `cache`."""

    sources: tuple[str, ...]
    task: str
    seq_len: int
    cache: Path
    limit: int | None = None
    validation_fraction: float = 0.0
    validation_samples: int | None = None

    def load(self) -> Corpus:
        """The samples; pairs with a side of more than `seq_len` tokens are left out."""
        return data.load_corpus(
            self.sources, tokenizing.byte_tokenizer(),
            SampleSettings(task=self.task, seq_len=self.seq_len, too_long="skip", limit=self.limit),
            validation_fraction=self.validation_fraction, cache_dir=self.cache,
        )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One optimizer step. `seconds`: until all ranks are done. The rest is this rank's or, with `targets`, everyone's.

    `largest`: padded tokens of its largest micro-batch, on the longer side of pairs; `padded`: of all of them.
    """

    loss: float
    targets: int
    samples: int
    seconds: float
    micro_steps: int
    largest: int
    padded: int


@dataclass
class _Run:
    engine: Engine
    batches: GlobalBatches
    validation: Sequence[Any]
    position: Position


_RUNS: dict[str, _Run] = {}
"""Those of this process by name."""


def begin(name: str, plan: Plan, text: Text) -> None:
    """Initialise the run `name`, from the same weights each time. Collective, as all others here."""
    tokenizer, corpus = tokenizing.byte_tokenizer(), text.load()
    spec = resolve.resolve(plan.request.model, plan.request.task).for_tokenizer(tokenizer)
    model = spec.build(dtype=DTYPES[plan.request.precision], device="cpu", seed=0)
    size = {"global_batch": plan.batch.global_batch}
    if plan.batch.global_tokens is not None:
        size = {"global_tokens": plan.batch.global_tokens}
    _RUNS[name] = _Run(
        initialize(model, plan, spec.objective(tokenizer)), GlobalBatches(corpus.train, **size, seed=1),
        Subset.drawn_from(corpus.validation or (), text.validation_samples), Position(),
    )  # fmt: skip


def go_on(name: str, steps: int) -> list[dict[str, Any]]:
    """Train so many optimizer steps more. A step's micro-batches are collated before its seconds are counted."""
    run, found = _RUNS[name], []
    for _ in range(steps):
        batch = run.batches.at(run.position)
        prepared = run.engine.prepare(batch)
        padded = [max(tensor.numel() for tensor in micro.values()) for micro in prepared.batches]
        dist.barrier()
        began = time.perf_counter()
        result = run.engine.train_step(prepared)
        dist.barrier()
        seconds = time.perf_counter() - began
        found.append(Step(result.loss, result.targets, result.samples, seconds, len(padded), max(padded), sum(padded)))
        run.position = batch.end
    return [asdict(step) for step in found]


def perplexity(name: str) -> float:
    """On the validation samples."""
    run = _RUNS[name]
    return run.engine.evaluate(run.validation).perplexity


def end(name: str) -> None:
    """Free what the run holds."""
    _RUNS.pop(name).engine.destroy()
