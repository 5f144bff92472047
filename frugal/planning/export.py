"""A plan for other trainers: transformers' Trainer, Accelerate, and a plain DeepSpeed script.

Each export is one file beside the plan's own `ds_config.json`, which all three take unchanged: every batch size and
every bucket in it is a number, so there is nothing for them to fill in. What they cannot do is refused here, not left
to come out in memory or in the gradient.
"""

import json
from dataclasses import dataclass

from frugal.errors import RequestError
from frugal.planning import export_texts
from frugal.planning.ds_config import deepspeed_config
from frugal.planning.export_texts import DEEPSPEED_FILE, FILES, Target
from frugal.planning.plan import Plan

_NAMES: dict[Target, str] = {
    "hf": "transformers' Trainer",
    "accelerate": "Accelerate",
    "script": "a plain DeepSpeed script",
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for another trainer: files by name, that of the trainer first, and the command that starts it."""

    files: dict[str, str]
    start: str


def export(plan: Plan, target: Target, *, folder: str = "", make_model: str = "") -> Export:
    """The plan for `target`. Its files are to lie in `folder`; `make_model` is Python that makes the script's model.

    Raises:
        RequestError: the target cannot do what the plan says.
    """
    check(plan, target)
    start = export_texts.start(plan, target, folder)
    if target == "hf":
        text = export_texts.hf(plan, start)
    elif target == "accelerate":
        text = export_texts.accelerate(plan, start, folder)
    else:
        text = export_texts.script(plan, start, make_model)
    config = json.dumps(deepspeed_config(plan), indent=2) + "\n"
    return Export(files={FILES[target]: text, DEEPSPEED_FILE: config}, start=start)


def check(plan: Plan, target: Target) -> None:
    """Refuse what `target` cannot do, or could only do in more memory than the plan has.

    Raises:
        RequestError: with the nearest thing that it can do.
    """
    who, strategy, batch = _NAMES[target], plan.strategy, plan.batch
    if plan.model.task == "own" and target != "accelerate":
        raise RequestError(
            f"{who} cannot train {plan.request.model}",
            because="its loss is Python of its own",
            hint="--to accelerate exports all but the loss; `frugal train` and `frugal.initialize` train it",
        )
    if plan.request.pack:
        raise RequestError(
            f"{who} cannot keep packed documents apart as planned",
            because="frugal packs them itself, and the plan counts the attention mask that this takes",
            hint="plan without --pack",
        )
    if batch.global_tokens is not None:
        raise RequestError(
            f"{who} cannot fill a global batch of {batch.global_tokens} tokens",
            because="it counts samples, and short ones would leave the batch too small",
            hint=f"plan with --global-batch {batch.global_batch} instead of --global-tokens",
        )
    if strategy.loss == "tiled":
        told = next((reason for reason in plan.why if reason.startswith("the loss is tiled")), None)
        raise RequestError(
            f"{who} does not know frugal's tiled loss",
            because=told or "it holds the logits whole, for which the plan may have no memory",
            hint="plan with --loss plain",
        )
    if strategy.activation_checkpointing not in ("off", "full"):
        raise RequestError(
            f"{who} does not know activation checkpointing {strategy.activation_checkpointing}",
            because="it recomputes whole layers, or nothing",
            hint="plan with --activation-checkpointing full, or off",
        )
    if "optimizer" not in deepspeed_config(plan):
        raise RequestError(
            f"{who} cannot make the optimizer {plan.request.optimizer}",
            because="DeepSpeed does not know it by name, and frugal hands it over ready made",
            hint="plan with --optimizer adamw",
        )
    if target == "accelerate" and len({len(node.devices) for node in plan.cluster.nodes}) > 1:
        raise RequestError(
            "Accelerate starts equally many ranks on each node",
            because=f"the nodes have {', '.join(str(len(node.devices)) for node in plan.cluster.nodes)} GPUs",
            hint="use --to script, which starts with `deepspeed --hostfile`",
        )
    if not (_is_even(plan) if target == "script" else batch.is_uniform):
        raise _uneven(plan, target)


def _is_even(plan: Plan) -> bool:
    """Whether no cell is empty, and those of a micro-step differ by one sample at most: the ranks are one group."""
    cut = plan.batch.cut
    return len(cut.groups) == 1 and all(sum(steps.samples) >= cut.world_size for steps in cut.micro_steps)


def _uneven(plan: Plan, target: Target) -> RequestError:
    batch = plan.batch
    kind = "ranks" if plan.cluster.devices[0].kind == "cpu" else "GPUs"
    world, groups = batch.world_size, batch.cut.groups.values()
    dealt = [pair for steps in batch.micro_steps for pair in zip(steps.samples, groups, strict=True)]
    sizes = sorted({size for samples, ranks in dealt for size in (samples // ranks, -(-samples // ranks))})
    equation = f"{kind} x micro-batch x accumulation steps"
    ways = []
    for near, micro in nearest(batch.global_batch, world, min(batch.micro_batch)):
        other = f"--global-batch {near} " if near != batch.global_batch else ""
        ways.append(f"{other}--micro-batch {micro} ({world} x {micro} x {near // (world * micro)})")
    also = "; or use --to script, which can" if target != "script" and _is_even(plan) else ""
    return RequestError(
        f"{_NAMES[target]} cannot cut {batch.global_batch} samples as planned for {world} {kind}",
        because=[
            f"it trains {equation}, all cells alike"
            if target != "script"
            else "it cuts each micro-step evenly, and leaves no rank without samples",
            f"the plan's cells have {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} samples",
        ],
        hint=f"plan with {', or '.join(ways)}{also}",
    )


def nearest(global_batch: int, world_size: int, cap: int) -> list[tuple[int, int]]:
    """The batches next to `global_batch` that divide, each with its micro-batch: the same, or one below and one above.

    k samples a rank divide into k / m steps of m samples, where m divides k and is at most `cap`. With m = 1 any k
    does, but slowly; only those count with more than half of the cap, or with a single step. Every multiple of the
    cap does, so there is always one above.
    """

    def micro(samples: int) -> int | None:
        largest = next(size for size in range(min(cap, samples), 0, -1) if samples % size == 0)
        return largest if largest == samples or 2 * largest > cap else None

    share, rest = divmod(global_batch, world_size)
    if not rest and (size := micro(share)):
        return [(global_batch, size)]
    below = ((k, size) for k in range(share, 0, -1) if (size := micro(k)))
    above = ((k, size) for k in range(share + 1, share + cap + 1) if (size := micro(k)))
    found = [pair for pair in (next(below, None), next(above, None)) if pair is not None]
    return sorted(
        ((k * world_size, size) for k, size in found), key=lambda pair: (abs(pair[0] - global_batch), -pair[0])
    )
