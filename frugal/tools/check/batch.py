"""The batch that a run really gets: micro-batch x accumulation steps x ranks, whatever was intended."""

from dataclasses import dataclass

from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan
from frugal.tools.check.deepspeed_json import Resolved
from frugal.tools.check.settings import Settings
from frugal.units import plural


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The batch of one optimizer step, in samples. `stated`: the global batch that a file names; None: no file does.

    `shared_by`: GPUs that share each sample; such a group takes the place of a GPU.
    """

    micro_batch: int
    accumulation_steps: int
    world_size: int
    stated: int | None = None
    shared_by: int = 1

    @property
    def num_takers(self) -> int:
        """Return the number of GPUs, or of groups of GPUs that share their samples."""
        return self.world_size // self.shared_by

    @property
    def planned(self) -> BatchPlan:
        """Return the batch as frugal's own `BatchPlan`."""
        return BatchPlan.of(self.global_batch, (self.micro_batch,) * self.num_takers, sequence_parallel=self.shared_by)

    @property
    def global_batch(self) -> int:
        """Return the samples of one optimizer step."""
        return self.micro_batch * self.accumulation_steps * self.num_takers

    def __str__(self) -> str:
        steps = plural(self.accumulation_steps, "accumulation step")
        gpus = plural(self.world_size, "GPU")
        if self.shared_by > 1:
            gpus = f"{plural(self.num_takers, 'group')} of {plural(self.shared_by, 'GPU')}"
        return f"{plural(self.global_batch, 'sample')} = {gpus} x micro-batch {self.micro_batch} x {steps}"


def of(settings: Settings, resolved: Resolved | None, world_size: int) -> Arithmetic:
    """Return the batch on `world_size` ranks. Contradictions are added to the findings of `settings`.

    Ranks that share samples count once: DeepSpeed divides their number out (`runtime/config.py`).

    Raises:
        RequestError: nothing says how large a micro-batch is, or it comes out below one sample.
    """
    num_takers = world_size // settings.sequence_parallel
    stated, micro, steps = None, settings.micro_batch, settings.accumulation_steps
    if resolved is not None:
        _compare_with_trainer(settings, resolved.batch)
        if resolved.batch[:2] != (None, None):
            stated, micro, steps = resolved.batch
    if stated is None and micro is None:
        raise RequestError(
            "no file says how large the micro-batch is",
            because="a script with fields of its own may have other defaults than transformers' Trainer"
            if resolved is None or settings.fills_auto
            else "DeepSpeed refuses a JSON with neither `train_batch_size` nor a micro-batch",
            hint="add --micro-batch 4, and --accumulation-steps 8 where there is more than one",
        )
    if micro is None:
        assert stated is not None
        steps = steps or 1
        micro = stated // num_takers // steps
    elif steps is None:
        steps = stated // micro // num_takers if stated is not None and micro else 1
    if micro < 1 or steps < 1:
        raise RequestError(
            f"a global batch of {stated} leaves a GPU without a sample",
            because=f"{stated} samples on {plural(world_size, 'GPU')} in {plural(max(steps, 1), 'accumulation step')}",
            hint=f"use at least {num_takers * max(steps, 1) * max(micro, 1)} samples, or fewer GPUs",
        )
    arithmetic = Arithmetic(
        micro_batch=micro, accumulation_steps=steps, world_size=world_size, stated=stated,
        shared_by=settings.sequence_parallel,
    )  # fmt: skip
    if stated is not None and stated != arithmetic.global_batch:
        settings.find(
            "batch-mismatch",
            "error",
            f"train_batch_size {stated} is not {micro} x {steps} x {num_takers} = {arithmetic.global_batch}: "
            "DeepSpeed stops with `Check batch related parameters`",
            settings.place("json.train_batch_size"),
            f"set it to {arithmetic.global_batch}, or leave it out",
        )
    return arithmetic


def _compare_with_trainer(settings: Settings, batch: tuple[int | None, int | None, int | None]) -> None:
    """Note where DeepSpeed's JSON contradicts the Trainer's arguments: transformers then stops."""
    rows = (
        ("micro-batch", settings.micro_batch, batch[1], ("micro_batch",)),
        (
            "accumulation",
            settings.accumulation_steps,
            batch[2],
            ("json.gradient_accumulation_steps", "accumulation_steps"),
        ),
    )
    for what, own, said, names in rows:
        if settings.fills_auto and None not in (own, said) and own != said:
            settings.find(
                "trainer-mismatch",
                "error",
                f"the {what} is {said} in DeepSpeed's JSON and {own} in the arguments of {settings.tool}, "
                "which stops with `Please correct the following DeepSpeed config values`",
                settings.place(*names),
                "write auto into the JSON",
            )
