"""What a run that continues may change, what it may not, and how either is said."""

from pathlib import Path

from frugal.errors import PlanMismatchError
from frugal.planning.plan import Plan
from frugal.training.manifest import Manifest

_FIXED = {
    "precision": "precision", "optimizer": "optimizer", "seq_len": "sequence length", "global_batch": "global batch",
    "global_tokens": "global tokens",
}  # fmt: skip
_FREE = {
    "learning_rate": "learning rate", "weight_decay": "weight decay", "momentum": "momentum",
    "gradient_clipping": "gradient clipping",
}  # fmt: skip


def recipe(plan: Plan) -> dict[str, int | float | str | None]:
    """What decides which weights come out, by name."""
    request, batch = plan.request, plan.batch
    return {
        "precision": request.precision,
        "optimizer": request.optimizer,
        "seq_len": request.seq_len,
        "global_batch": batch.global_batch if batch.global_tokens is None else None,
        "global_tokens": batch.global_tokens,
        "learning_rate": request.scaled_learning_rate,
        **{name: getattr(request, name) for name in _FREE if name != "learning_rate"},
    }


def check(path: Path, made_by: Manifest, this: Manifest) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        PlanMismatchError: it is of another model, or was trained in a way that this run does not continue.
    """
    if made_by.shapes != this.shapes:
        raise PlanMismatchError(
            f"{path} is of another model",
            because=f"it was made with {made_by.model}, this run trains {this.model}; its parameters differ",
            hint="resume with the plan the run was started with, or start anew with another --out",
        )
    for name, word in _FIXED.items():
        before, now = made_by.recipe.get(name), this.recipe[name]
        if before != now:
            raise PlanMismatchError(
                f"{path} was made with {_value(word, before)}, this run has {_value(word, now)}",
                hint=f"resume with {_value(word, before)}, or start anew with another --out",
            )


def refuse_other_layout(path: Path, made_by: Manifest, this: Manifest) -> PlanMismatchError | None:
    """Why the states cannot be read on another layout than the one that wrote them; None where they can."""
    changed = ", ".join(layout_changes(made_by, this)) or "its optimizer's implementation"
    reason = None
    if this.recipe["optimizer"] in ("adafactor", "adamw-8bit"):
        reason = f"{this.recipe['optimizer']} keeps states of many elements together, which cannot be cut anew"
    elif "nvme" in (*made_by.offload, *this.offload):
        reason = "states on NVMe are in files that only the layout which wrote them can read"
    if reason is None:
        return None
    return PlanMismatchError(
        f"{path} cannot be continued on another layout",
        because=[f"it would change: {changed}", reason],
        hint="resume with the plan the run was started with, or start anew with another --out",
    )


def layout_changes(made_by: Manifest, this: Manifest) -> list[str]:
    """What differs in how the run is laid out, in words."""
    pairs = [(_ranks(made_by.world_size), _ranks(this.world_size))]
    pairs += zip(made_by.strategy.split(", ", 1), this.strategy.split(", ", 1), strict=True)  # ZeRO-2, and the rest
    return [f"{before} -> {now}" for before, now in pairs if before != now]


def changes(made_by: Manifest, this: Manifest) -> tuple[str, ...]:
    """What differs between the run as it was and as it goes on, in words."""
    values = [
        f"{_value(word, made_by.recipe.get(name))} -> {this.recipe[name]}"
        for name, word in _FREE.items()
        if made_by.recipe.get(name) != this.recipe[name]
    ]
    return (*layout_changes(made_by, this), *values)


def describe(changed: tuple[str, ...], step: int, out: Path) -> str:
    """One line about a run that goes on otherwise than it was."""
    same = ["global batch", "order"] + ["learning rate"] * (not any("learning rate" in each for each in changed))
    unchanged = f"{', '.join(same[:-1])} and {same[-1]} are unchanged"
    return f"resumed at step {step} of {out}: {', '.join(changed)}; {unchanged}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _value(word: str, value: object) -> str:
    return f"no {word}" if value is None else f"{word} {value}"
