"""Changes in a resumed run: those that it may make are reported, others are refused.

A checkpoint belongs to its frozen base, parameters, precision, optimizer and the like. The learning rate and the like
may be changed. How the run is laid out over ranks changes nothing.
"""

from dataclasses import replace
from pathlib import Path

from frugal.checkpoint.manifest import Manifest
from frugal.checkpoint.progress import Progress
from frugal.config.learning_rate import Curve
from frugal.config.request import Request
from frugal.data.batches import Position
from frugal.data.sources import Provenance
from frugal.errors import PlanMismatchError, refuse
from frugal.units import plural

_FIXED = {
    "precision": "precision", "optimizer": "optimizer", "optimizer_states": "optimizer states in",
    "seq_len": "sequence length", "global_batch": "global batch",
    "global_tokens": "global tokens", "pack": "packing", "lora": "adapters",
    "quantize": "quantised weights",
}  # fmt: skip
_FREE = {
    "learning_rate": "learning rate", "weight_decay": "weight decay", "decaying": "weight decay of",
    "momentum": "momentum", "beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon",
    "gradient_clipping": "gradient clipping",
}  # fmt: skip
_ALL = "all parameters"
Recipe = dict[str, bool | int | float | str | None]


def recipe(request: Request) -> Recipe:
    """Return what decides which weights come out, by name."""
    optimizer, tokens = request.optimizer, request.global_tokens
    numbers = ("momentum",) if optimizer.name == "sgd" else ("beta1", "beta2", "epsilon")
    return {
        "precision": request.precision,
        "optimizer": optimizer.name,
        "optimizer_states": optimizer.states or "fp32",
        "seq_len": request.seq_len,
        "pack": request.pack or None,
        "lora": None if request.lora is None else str(request.lora),
        **({} if request.quantize is None else {"quantize": request.quantize}),
        "global_batch": request.batch_samples if tokens is None else None,
        "global_tokens": tokens,
        "learning_rate": request.scaled_learning_rate,
        "decaying": _ALL if request.decays_all else "all but norms and biases",
        "weight_decay": request.weight_decay,
        "gradient_clipping": request.gradient_clipping,
        **{name: getattr(optimizer, name) for name in numbers},
    }


def check_resume(path: Path, made_by: Manifest, this: Manifest) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        PlanMismatchError: it is of another model, or was trained in a way that this run does not continue.
    """
    for name, word in _FIXED.items():
        before, now = made_by.recipe.get(name), this.recipe.get(name)
        if before != now:
            raise PlanMismatchError(
                f"{path} was made with {_value(word, before)}, this run has {_value(word, now)}",
                hint=f"resume with {_value(word, before)}, or start anew with another --out",
            )
    if made_by.shapes != this.shapes:
        raise PlanMismatchError(
            f"{path} is of another model",
            because=f"it was made with {made_by.model}, this run trains {this.model}; its parameters differ",
            hint="resume with the plan the run was started with, or start anew with another --out",
        )
    if made_by.base != this.base:
        raise PlanMismatchError(
            f"{path} holds adapters of another base model",
            because=f"the frozen weights of {this.model} are not those that they were trained with",
            hint="give the base model as it was, or start anew with another --out",
        )


def check_other_layout(path: Path, made_by: Manifest, this: Manifest) -> None:
    """Refuse states that cannot be read on another layout than the one that wrote them.

    Raises:
        PlanMismatchError: they are in blocks, or on NVMe.
    """
    changed = ", ".join(layout_changes(made_by, this)) or "its optimizer's implementation"
    reason = None
    if this.recipe["optimizer"] == "adamw-8bit":
        reason = f"{this.recipe['optimizer']} keeps states of many elements together, which cannot be cut anew"
    elif "nvme" in (*made_by.offload, *this.offload):
        reason = "states on NVMe are in files that only the layout which wrote them can read"
    if reason is not None:
        raise PlanMismatchError(
            f"{path} cannot be continued on another layout",
            because=[f"it would change: {changed}", reason],
            hint="resume with the plan the run was started with, or start anew with another --out",
        )


def layout_changes(made_by: Manifest, this: Manifest) -> list[str]:
    """Describe what differs in how the run is laid out."""
    pairs = [(plural(made_by.world_size, "rank"), plural(this.world_size, "rank"))]
    pairs += zip(made_by.strategy.split(", ", 1), this.strategy.split(", ", 1), strict=True)  # ZeRO-2, and the rest
    return [f"{before} -> {now}" for before, now in pairs if before != now]


def resume_changes(made_by: Manifest, this: Manifest) -> tuple[str, ...]:
    """Describe what differs between the run as it was and as it is resumed."""
    before, now = made_by.recipe, this.recipe
    values = [
        f"{_value(word, before.get(name))} -> {now.get(name)}"
        for name, word in _FREE.items()
        if before.get(name) != now.get(name)
    ]
    return (*layout_changes(made_by, this), *values)


def _value(word: str, value: object) -> str:
    return f"no {word}" if value is None else f"{word} {value}"


def check_progress(progress: Progress, out: Path, seed: int, total_steps: int | None) -> None:
    """Refuse to continue the run in `out` with another seed, or to a number of steps that is behind it.

    `total_steps`: None where they are not known.

    Raises:
        RequestError: the seed is another one, or there are more steps already.
    """
    refuse(
        (
            total_steps is not None and progress.step > total_steps,
            f"the run in {out} is at step {progress.step} already",
            f"it was to end at step {total_steps}",
            f"resume with --steps {progress.step + 1} or more; `frugal export` writes its model",
        ),
        (
            progress.seed != seed,
            f"the run in {out} was started with another seed",
            f"its seed is {progress.seed}, this one is {seed}",
            "resume with the same --seed, or start anew with another --out",
        ),
    )


def on_data(
    progress: Progress, data: Provenance, out: Path, *, accepts_changes: bool
) -> tuple[Progress, tuple[str, ...]]:
    """Return the progress with which a run is resumed on data of this provenance, and what has changed, in words.

    On other data the place in the order means nothing, so an epoch begins, in which each sample comes once.

    Raises:
        PlanMismatchError: the data has changed, and that was not accepted.
    """
    if progress.data.fingerprint == data.fingerprint:
        return progress, ()
    changes = progress.data.changes(data)
    if not accepts_changes:
        raise PlanMismatchError(
            f"the data of the run in {out} has changed since step {progress.step}",
            because=changes,
            hint="restore it, start anew with another --out, or continue with --accept-changed-data",
        )
    position = progress.position
    if position.offset or position.stream is not None:
        position = Position(position.epoch + 1, 0)
    words = f"the data ({'; '.join(changes)}), which begins with epoch {position.epoch + 1}"
    return replace(progress, data=data, position=position), (words,)


def on_curve(progress: Progress, curve: Curve) -> tuple[Progress, tuple[str, ...]]:
    """Return the progress under this learning rate, and what a changed schedule means for the next step, in words."""
    change = None if progress.learning_rate is None else curve.change_from(progress.learning_rate, progress.step)
    return replace(progress, learning_rate=curve), () if change is None else (change,)


def describe_changes(changed: tuple[str, ...], step: int, out: Path) -> str:
    """Return the line about a run that is resumed with changes."""
    begins = {"global batch": "global batch", "order": "the data", "learning rate": "learning rate"}
    same = [name for name, begin in begins.items() if not any(each.startswith(begin) for each in changed)]
    unchanged = f"{', '.join(same[:-1])} and {same[-1]} are unchanged" if same[1:] else f"{same[0]} is unchanged"
    return f"resumed at step {step} of {out}: {', '.join(changed)}; {unchanged}"
