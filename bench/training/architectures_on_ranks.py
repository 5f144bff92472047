"""`bench.training.architectures` on real ranks: a step of two ranks under ZeRO-2 and ZeRO-3, and its dry run.

Every sample is a micro-batch, so ranks have other lengths, experts and padding at the same time. The gradient that
DeepSpeed has applied is read off a step of SGD in fp32, and compared with that of the same micro-batches in one process
in fp64 (fp32 where a model's kernels know no other): `exact` within 1e-5, or within four times of what one process in
fp32 is off, if that is more.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.optimizers import Optimizer
from frugal.dryrun.messages import AskDryRun
from frugal.dryrun.run import dry_run
from frugal.engine.engine import initialize
from frugal.models.objectives import Sample
from frugal.models.spec import ModelSpec
from frugal.planning.plan import Plan

WORLD_SIZE, STAGES = 2, (2, 3)
LEARNING_RATE = 1024.0  # so large that the rounding of weights hides nothing of the gradient
MOST_ERROR, TIMES_ROUNDING = 1e-5, 4
MOST_SECONDS = 120

Gradient = dict[str, Tensor]
OfOneProcess = Callable[[nn.Module, Any, Sequence[Sequence[Sample]]], tuple[float, int, Gradient]]


def measure(ranks: Ranks, spec: ModelSpec, samples: Sequence[Sample], ours: OfOneProcess) -> dict[str, Any]:
    """Say of each stage whether its step is exact, and how far off; `ours` sums loss and gradient in a process."""
    alone = [[sample] for sample in samples]
    gradients, reason = {}, ""
    for dtype in (torch.float64, torch.float32):
        try:
            model = _built(spec, dtype)
            _, targets, gradient = ours(model, spec.objective(), alone)
            if dtype is torch.float32 or all(each.isfinite().all() for each in gradient.values()):
                gradients[dtype] = {name: each / targets for name, each in gradient.items()}
        except Exception as error:  # kernels that know no fp64; masks for fp32 are NaN in it
            reason = f"{type(error).__name__}: {error}"
    if torch.float32 not in gradients:
        return {f"zero{stage}": {"verdict": f"not run: {reason[:160]}"} for stage in STAGES}
    truth = gradients.get(torch.float64, gradients[torch.float32])
    most = max(MOST_ERROR, TIMES_ROUNDING * _apart(gradients[torch.float32], truth))
    return {f"zero{stage}": _of_stage(ranks, spec, samples, stage, truth, most) for stage in STAGES}


def _of_stage(
    ranks: Ranks, spec: ModelSpec, samples: Sequence[Sample], stage: int, truth: Gradient, most: float
) -> dict[str, Any]:
    plan = plan_by_hand(
        world_size=WORLD_SIZE, global_batch=len(samples), micro_batch=1, zero_stage=stage,
        request={
            "optimizer": Optimizer(name="sgd"), "learning_rate": LEARNING_RATE, "weight_decay": 0.0,
            "gradient_clipping": 0.0, "precision": "fp32",
            "seq_len": max(len(sample["input_ids"]) for sample in samples),
        },
    )  # fmt: skip
    record: dict[str, Any] = {"dry_run": _dry_run(spec, plan)}
    try:
        by_rank = ranks.run(step, spec, plan, samples, timeout=MOST_SECONDS)
    except AssertionError as error:  # a rank died, or waits for another
        return record | {"verdict": f"died: {str(error).strip().splitlines()[-1][:160]}"}
    if isinstance(by_rank[0], str):
        return record | {"verdict": f"failed: {by_rank[0]}"}
    error = max(_apart(gradient, truth) for gradient in by_rank)
    return record | {"verdict": "exact" if error <= most else "wrong", "gradient_error": error}


def step(spec: ModelSpec, plan: Plan, samples: Sequence[Sample]) -> Gradient | str:
    """The gradient that a step applies, or how it failed. Runs on ranks."""
    model = _built(spec, torch.float32)
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    engine = None
    try:
        engine = initialize(model, plan, spec.objective())
        engine.train_step(samples)
        gradient = {}
        for name, parameter in engine.module.named_parameters():
            with engine.zero.gathered(parameter):
                gradient[name] = (before[name] - parameter.detach().double()) / LEARNING_RATE
        return gradient
    except Exception as error:  # whatever a model trips over, on all ranks alike
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    finally:
        if engine is not None:
            engine.destroy()
        del engine, model
        gc.collect()


def _dry_run(spec: ModelSpec, plan: Plan) -> str:
    try:
        dry_run(
            lambda: spec.build(dtype=torch.float32, device="meta"),
            spec.objective(),
            AskDryRun(
                request=plan.request,
                strategy=plan.strategy,
                micro_batch=1,
                accumulation_steps=plan.batch.accumulation_steps,
                world_size=WORLD_SIZE,
                rank=0,
                kind="cpu",
            ),
        )
    except Exception as error:  # whatever a model trips over
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    return "runs"


def _built(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """The same model each time, without dropout."""
    return (
        spec.build(dtype=torch.float32, seed=0).to(dtype).train(spec.config.model_type == "reformer")
    )  # no gradient otherwise


def _apart(gradient: Gradient, truth: Gradient) -> float:
    """Return the distance between them, relative to the truth; a parameter that it does not name has none."""
    square = sum(float((each - truth[name]).square().sum() if name in truth else each.square().sum())
                 for name, each in gradient.items())  # fmt: skip
    return float((square / sum(float(each.square().sum()) for each in truth.values())) ** 0.5)
