"""What a run that continues may change, what it may not, and how either is said."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.plan import Plan
from frugal.training.batches import Position
from frugal.training.manifest import Manifest
from frugal.training.provenance import Provenance
from frugal.training.settings import Settings

if TYPE_CHECKING:
    from frugal.training.checkpoint import Progress

_FIXED = {
    "precision": "precision", "optimizer": "optimizer", "seq_len": "sequence length", "global_batch": "global batch",
    "global_tokens": "global tokens", "pack": "packing",
}  # fmt: skip
_FREE = {
    "learning_rate": "learning rate", "weight_decay": "weight decay", "momentum": "momentum",
    "gradient_clipping": "gradient clipping",
}  # fmt: skip


def recipe(plan: Plan) -> dict[str, bool | int | float | str | None]:
    """What decides which weights come out, by name."""
    request, batch = plan.request, plan.batch
    return {
        "precision": request.precision,
        "optimizer": request.optimizer,
        "seq_len": request.seq_len,
        "pack": request.pack or None,
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


def on_data(progress: "Progress", data: Provenance, asked: Settings) -> "tuple[Progress, tuple[str, ...]]":
    """Where a run goes on in data of this provenance, and what is not as it was.

    On other data the place in the order means nothing, so it begins an epoch: each sample comes once in it.

    Raises:
        RequestError: another seed.
        PlanMismatchError: other data, and nobody said that this was all right.
    """
    if progress.seed != asked.seed:
        raise RequestError(
            f"the run in {asked.out} was started with another seed",
            because=f"its seed is {progress.seed}, this one is {asked.seed}",
            hint="resume with the same --seed, or start anew with another --out",
        )
    if progress.data.fingerprint == data.fingerprint:
        return progress, ()
    found = progress.data.changes(data)
    if not asked.accept_changed_data:
        raise PlanMismatchError(
            f"the data of the run in {asked.out} has changed since step {progress.step}",
            because=found,
            hint="restore it, start anew with another --out, or go on with --accept-changed-data",
        )
    position = progress.position
    if position.offset:
        position = Position(position.epoch + 1, 0)
    words = f"the data ({'; '.join(found)}), which begins with epoch {position.epoch + 1}"
    return replace(progress, data=data, position=position), (words,)


def describe(changed: tuple[str, ...], step: int, out: Path) -> str:
    """One line about a run that goes on otherwise than it was."""
    same = [
        name for name in ("global batch", "order", "learning rate") if not any(_tells(each, name) for each in changed)
    ]
    unchanged = f"{', '.join(same[:-1])} and {same[-1]} are unchanged" if same[1:] else f"{same[0]} is unchanged"
    return f"resumed at step {step} of {out}: {', '.join(changed)}; {unchanged}"


def _tells(change: str, name: str) -> bool:
    return change.startswith({"order": "the data"}.get(name, name))


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _value(word: str, value: object) -> str:
    return f"no {word}" if value is None else f"{word} {value}"
