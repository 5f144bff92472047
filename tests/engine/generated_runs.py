"""Training of generated modules on real ranks, beside plain torch in fp32 and fp64.

    python -m tests.engine.generated_runs SEED [NUMBER]    # NUMBER cases from SEED on; one by default, in full

Each case ends in a verdict: `exact` (the weights after several steps are off fp64's by at most `FACTOR` times what
plain torch's in fp32 are on this machine), `refused` (all ranks raise the same FrugalError, and live), `said` (a note
of the trial says that the cut matters, or a warning that unused parameters decay or move on, and the weights are
exactly those that this gives in plain torch), or `failed`.
"""

import gc
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.errors import FrugalError
from frugal.models.spec import OWN, ModelSpec
from frugal.models.trials.model_check import check_model
from frugal.planning.plan import Plan
from frugal.planning.report import SPLIT_MATTERS
from tests.engine.generated_modules import Case, draw_case

FACTOR = 4
LEAST = 2.0**-24
"""Relative; by chance plain fp32 may be off by less than its rounding of a single number."""

UNUSED = "got no gradient on any rank"
"""In the warning that optimizers go on to update what a step does not use."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """The end of a case: `kind` is exact, refused, said or failed, and `reason` says why."""

    seed: int
    kind: str
    reason: str


@dataclass(frozen=True)
class Trained:
    """The end of a run on one rank: the weights and the loss of each step, or what frugal refused it with."""

    weights: Weights
    losses: list[float]
    warnings: tuple[str, ...]
    refusal: str | None = None


def plan_of(case: Case) -> Plan:
    """Return the plan of a case."""
    return plan_by_hand(
        world_size=case.world_size, global_batch=case.global_batch, micro_batch=case.micro_batch,
        zero_stage=case.zero_stage, request=case.request, strategy=case.strategy,
    )  # fmt: skip


def train(draw: Callable[..., Case], *of: Any) -> Trained:
    """Train the case that `draw` makes of the rest, as its users would. Runs on ranks."""
    from frugal.engine.engine import initialize

    case = draw(*of)
    heard = _Heard()
    logging.getLogger("frugal").addHandler(heard)
    engine, losses = None, []
    try:
        engine = initialize(case.make(), plan_of(case), case.objective())
        for number, samples in enumerate(case.steps):
            if number == case.freezes_after:
                engine.module.first.requires_grad_(False)
            losses.append(engine.train_step(samples).loss)
        weights = {}
        for name, parameter in engine.module.named_parameters():
            with engine.zero.gathered(parameter):
                weights[name] = _exact(parameter).clone()
        return Trained(weights, losses, tuple(heard.messages))
    except FrugalError as error:
        return Trained({}, losses, tuple(heard.messages), str(error))
    finally:
        logging.getLogger("frugal").removeHandler(heard)
        if engine is not None:
            engine.destroy()
        del engine
        gc.collect()


def _exact(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return torch.view_as_real(parameter).double() if parameter.is_complex() else parameter.double()


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def by_torch(
    case: Case, dtype: torch.dtype, sizes: Sequence[int], *, zeros: bool = False
) -> tuple[Weights, list[float]]:
    """Return the weights and losses of a plain loop in one process over micro-batches of `sizes`.

    `zeros`: parameters without a gradient get one of zero, as DeepSpeed has it.
    """
    model = _of(case.make(), dtype)
    settings, numbers = case.request, case.request["optimizer"]
    if numbers.name == "sgd":
        make: Any = partial(torch.optim.SGD, momentum=numbers.momentum)
    else:
        make = partial(torch.optim.AdamW, eps=numbers.epsilon, betas=numbers.betas)
    optimizer = make(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings["learning_rate"], weight_decay=settings["weight_decay"], foreach=False,
    )  # fmt: skip
    losses = []
    for number, samples in enumerate(case.steps):
        if number == case.freezes_after:
            model.first.requires_grad_(False)
        total, begin = 0.0, 0
        for size in sizes:
            batch = torch.utils.data.default_collate(samples[begin : begin + size])
            loss = case.loss(model, batch | {"x": batch["x"].to(dtype)}) / len(samples)
            loss.backward()
            total, begin = total + loss.item(), begin + size
        for parameter in model.parameters():
            if zeros and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if settings["gradient_clipping"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: _exact(parameter) for name, parameter in model.named_parameters()}, losses


def _of(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with numbers of `dtype`; complex ones become as exact."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(
            dtype.to_complex() if tensor.is_complex() else dtype if tensor.is_floating_point() else tensor.dtype
        )

    return model._apply(cast)


def judge(case: Case, ranks: Ranks, timeout: float = 120) -> Verdict:
    """Train a case on `ranks` and compare."""
    stage = {"has_low_stage": True} if case.zero_stage < 2 else {}
    try:
        notes = check_model(spec_of(case), **stage)
    except FrugalError as error:  # nobody gets a plan for it
        return Verdict(case.seed, "refused", str(error))
    try:
        runs: list[Trained] = ranks.run(train, draw_case, case.seed, timeout=timeout)
    except AssertionError as error:
        return Verdict(case.seed, "failed", str(error))
    if any(run.refusal for run in runs):
        ranks.close()  # what a refused step leaves behind must not be found by the next case
        if len({run.refusal for run in runs}) > 1:
            return Verdict(case.seed, "failed", f"refused unevenly: {[run.refusal for run in runs]}")
        return Verdict(case.seed, "refused", str(runs[0].refusal))
    if case.request["precision"] != "fp32":
        return Verdict(case.seed, "exact", "as far as bf16 tells")
    if any(not torch.equal(runs[0].weights[n], run.weights[n]) for run in runs for n in run.weights):
        return Verdict(case.seed, "failed", "wrong: ranks have other weights than rank 0")
    together, alone = [case.global_batch], [1] * case.global_batch
    error = compare(case, runs[0], [together] if case.compares else [together, alone])
    if error is None:
        return Verdict(case.seed, "exact", "")
    split = [note for note in notes if note.startswith(SPLIT_MATTERS) and case.compares]
    unused = [warning for warning in runs[0].warnings if UNUSED in warning]
    if split or unused:
        planned = plan_of(case).batch
        cut = sorted(
            place
            for rank in range(case.world_size)
            for place in zip(planned.starts_of(rank), planned.sizes_of(rank), strict=True)
        )
        sizes = [size for _, size in cut if size]
        not_reached = any("got no gradient from a batch" in note for note in notes)  # so the trial knows no cut of it
        has_own_state = "spectral norm" in case.parts and (split or not_reached)  # each rank's vectors are its own
        order = sizes if split else together
        if has_own_state or compare(case, runs[0], [order], zeros=bool(unused)) is None:
            return Verdict(case.seed, "said", (*split, *unused)[0])
    return Verdict(case.seed, "failed", f"{error}; notes: {notes}; warnings: {runs[0].warnings}")


def compare(case: Case, run: Trained, orders: list[list[int]], *, zeros: bool = False) -> str | None:
    """Return how far a run is off; None: no farther than plain fp32 in the worst of `orders`, by `FACTOR`."""
    before = {name: _exact(parameter) for name, parameter in case.make().named_parameters()}
    exact, exact_losses = by_torch(case, torch.float64, orders[0], zeros=zeros)
    plain = [by_torch(case, torch.float32, order, zeros=zeros) for order in orders]
    scale = sum(float((exact[name] - before[name]).square().sum()) for name in exact) ** 0.5
    size = max(float(each.abs().max()) for each in exact.values() if each.numel())

    def apart(weights: Weights) -> float:
        return sum(float((exact[name] - weights[name]).square().sum()) for name in exact) ** 0.5

    unit = max([*(apart(weights) for weights, _ in plain), LEAST * size])
    if not apart(run.weights) <= FACTOR * unit:
        worst = max(exact, key=lambda name: float((exact[name] - run.weights[name]).norm()))
        return (
            f"wrong: weights are off by {apart(run.weights) / scale:.2g} of the movement, "
            f"{apart(run.weights) / unit:.3g} times plain fp32's; most in {worst}"
        )
    loss_scale = max(map(abs, exact_losses))
    loss_unit = max([*(_farthest(losses, exact_losses) for _, losses in plain), 2 * LEAST * loss_scale])
    if not _farthest(run.losses, exact_losses) <= FACTOR * loss_unit:
        return f"wrong: losses are {run.losses}, of fp64 {exact_losses}"
    return None


def _farthest(losses: Sequence[float], exact: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(losses, exact, strict=True))


def spec_of(case: Case) -> ModelSpec:
    """Return the model of a case as it is planned for."""
    return ModelSpec(
        reference="generated", task=OWN, max_positions=None, vocab_size=None, own_objective=case.objective(),
        factory=lambda: (case.make(), case.objective()), structure=str(case.seed),
    )  # fmt: skip


def run_cases(seeds: Sequence[int], timeout: float = 120) -> Iterator[tuple[Case, Verdict]]:
    """Run cases one after the other, on ranks that live as long as they can; one that fails is tried on new ones."""
    of_size = {world_size: Ranks(world_size) for world_size in (1, 2, 3)}
    try:
        for seed in seeds:
            case = draw_case(seed)
            try:
                verdict = judge(case, of_size[case.world_size], timeout)
            except Exception:  # of the trial
                verdict = Verdict(seed, "failed", traceback.format_exc())
            yield case, verdict
    finally:
        for ranks in of_size.values():
            ranks.close()


def main() -> None:
    """Run the cases that the command line asks for."""
    first, number = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    begin, kinds = time.perf_counter(), Counter[str]()
    for case, verdict in run_cases(range(first, first + number)):
        kinds[verdict.kind] += 1
        if number == 1 or verdict.kind != "exact":
            reason = verdict.reason if number == 1 else " | ".join(verdict.reason.split("\n"))[-500:]
            print(f"{case.seed} {verdict.kind}: {reason}\n    {case}", flush=True)
    print(f"{number} cases in {time.perf_counter() - begin:.0f} s: {dict(kinds)}")


if __name__ == "__main__":
    main()
