"""The verdict on a run at its own settings: a dry run of exactly these, not of a plan of frugal's.

Runs without DeepSpeed are checked as far as a dry run matches them:

    fp32        torch's optimizer on every GPU equals stage 0; DDP's buckets, of the gradients' size, are taken to be
                the copy of all gradients that stage 0 makes to average them
    adapters    the frozen base decides: evaluated on one GPU under stage 2, as every GPU holds all of it under DDP

Mixed precision over fp32 weights (autocast) is neither: it is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from frugal.config.hardware.cluster import Cluster
from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.dryrun.cache import presets
from frugal.errors import RequestError
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.model_facts import ModelFacts
from frugal.planning.search.candidate import Source
from frugal.planning.search.evaluate import Fitting
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import with_gpus
from frugal.tools.check import batch as batches
from frugal.tools.check import deepspeed_json
from frugal.tools.check.batch import Arithmetic
from frugal.tools.check.deepspeed_json import Resolved
from frugal.tools.check.settings import Settings
from frugal.tools.check.tools import PEFTS_OWN


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A request that pins only the model's own numbers, with the strategy and the batch of the configuration."""

    request: Request
    cluster: Cluster
    strategy: Strategy
    batch: BatchPlan


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a dry run. `host_shortfall_bytes`, `disk_shortfall_bytes`: missing on a node, 0 where not known."""

    subject: Subject
    memory: MemoryBreakdown
    host_shortfall_bytes: int = 0
    disk_shortfall_bytes: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Return whether device, host and disk are large enough."""
        return self.memory.fits and not self.host_shortfall_bytes and not self.disk_shortfall_bytes


SHARING = ("sequence_parallel", "tensor", "pipeline", "context")
"""Sizes of groups of GPUs that have the same samples."""


def resolved(settings: Settings, world_size: int) -> tuple[Resolved | None, Arithmetic]:
    """Return DeepSpeed's JSON without `auto`, and the batch.

    Raises:
        RequestError: it cannot be resolved; see `frugal.tools.check.deepspeed_json.resolve`.
    """
    deepspeed = None
    if world_size % settings.sequence_parallel:
        shared_by = settings.sequence_parallel
        raise RequestError(
            f"{shared_by} GPUs cannot share samples on {world_size} GPUs",
            because=f"{settings.place(*SHARING)} names {shared_by}, and {world_size} is no multiple of it",
            hint=f"check on {shared_by * max(1, world_size // shared_by)}, for instance with --gpus",
        )
    if settings.deepspeed is not None:
        deepspeed = deepspeed_json.resolve(settings, world_size // settings.sequence_parallel, hidden_size_of(settings))
    return deepspeed, batches.of(settings, deepspeed, world_size)


def request_of(settings: Settings, deepspeed: Resolved | None, arithmetic: Arithmetic) -> Request:
    """Return the configuration's model, samples, precision and optimizer as a request that leaves the strategy open.

    Raises:
        RequestError: no file and no flag names the model, or frugal has nothing like it.
    """
    clipping = settings.gradient_clipping
    if settings.deepspeed is not None and isinstance(settings.deepspeed.get("gradient_clipping"), int | float):
        clipping = float(settings.deepspeed["gradient_clipping"])
    values: dict[str, Any] = {
        "model": model_of(settings),
        "task": settings.task,
        "seq_len": settings.seq_len,
        "global_batch": arithmetic.global_batch,
        "precision": deepspeed.precision if deepspeed is not None else settings.precision,
        "optimizer": settings.optimizer,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "gradient_clipping": 1.0 if clipping is None else clipping,
        "lora": settings.lora,
        "sequence_parallel": settings.sequence_parallel if settings.sequence_parallel > 1 else None,
    }
    if settings.lora is not None and settings.lora.targets == (PEFTS_OWN,):
        values["lora"] = replace(settings.lora, targets=_targets_of_peft(values["model"], settings.task))
    if _has_bf16_states(settings):
        values["optimizer"] = replace(settings.optimizer or Optimizer(), states="bf16")
    given = {name: value for name, value in values.items() if value is not None}
    if settings.quantize == "int8":
        settings.refuse(
            "the base in int8: columns of activations with an outlier are computed apart, so memory depends on data",
            settings.place("quantize"),
        )
    if settings.quantize != "nf4":
        return Request(**given)
    try:
        return Request(**given | {"quantize": settings.quantize})
    except RequestError as error:
        settings.refuse(f"the base in {settings.quantize}: {error.what}", settings.place("quantize"))
        return Request(**given)


def _has_bf16_states(settings: Settings) -> bool:
    """Return whether DeepSpeed keeps master weights and the optimizer's states in bf16. frugal follows only both
    together."""
    block = (settings.deepspeed or {}).get("bf16") or {}
    both = [bool(block.get(name)) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")]
    if any(both) and not all(both):
        settings.deviate("states in bf16 are evaluated in fp32: only both kinds together are followed")
    return all(both)


def readable(request: Request, facts: ModelFacts, settings: Settings) -> Request:
    """Return the request with samples that the model can read: a length that was not given is shortened.

    Raises:
        RequestError: a length that was named is too long.
    """
    if facts.max_positions is None or request.seq_len <= facts.max_positions:
        return request
    if settings.seq_len is not None:
        raise RequestError(
            f"samples of {request.seq_len} tokens are longer than {request.model} can read",
            because=f"it has {facts.max_positions} positions",
            hint=f"use --seq-len {facts.max_positions}",
        )
    return replace(request, seq_len=facts.max_positions)


AUTOCAST = (
    "it does not use DeepSpeed, and mixed precision without DeepSpeed keeps fp32 weights under autocast: "
    "`frugal dryrun SCRIPT.py:step` measures such a loop"
)


def refuse_autocast(settings: Settings) -> None:
    """Note why memory cannot be checked without DeepSpeed, if it cannot."""
    if settings.sequence_parallel > 1 and (place := settings.place("sequence_parallel")) is not None:
        settings.refuse("samples that GPUs share are checked under DeepSpeed alone", place)
    if settings.lora is None and settings.precision != "fp32":
        settings.refuse(AUTOCAST, settings.place("precision"))


def subject_of(
    settings: Settings,
    deepspeed: Resolved | None,
    arithmetic: Arithmetic,
    request: Request,
    cluster: Cluster,
    facts: ModelFacts,
) -> Subject:
    """Return the subject of the dry run. Settings that frugal cannot follow are noted in `settings`."""
    batch = arithmetic.planned
    if deepspeed is not None:
        strategy = deepspeed_json.strategy(settings, deepspeed)
    else:
        strategy = Strategy(
            zero_stage=0 if request.precision == "fp32" else 2,
            activation_checkpointing="full" if settings.activation_checkpointing else "off",
            loss="tiled" if settings.tiled_loss else "plain",
            reduce_bucket_elements=max(2, facts.trainable_parameters + facts.trainable_parameters % 2),
            expandable_segments=bool(settings.expandable_segments),
        )
        if request.precision != "fp32":
            settings.deviate(
                "without DeepSpeed: adapters are evaluated under ZeRO-2 on one GPU, with 18 bytes for each of their "
                "parameters instead of 16 to 20; the inputs that peft copies for adapters in fp32 are not counted"
            )
            batch = BatchPlan.of(arithmetic.micro_batch * arithmetic.accumulation_steps, (arithmetic.micro_batch,))
            cluster = with_gpus(replace(cluster, nodes=cluster.nodes[:1]), 1)
        elif arithmetic.world_size > 1:
            settings.deviate("without DeepSpeed: DDP is evaluated as stage 0, which averages all gradients at once")
    if strategy.loss == "tiled" and not facts.can_tile:
        settings.deviate("evaluated with whole logits: this model cannot take the tiled loss")
        strategy = replace(strategy, loss="plain")
    if strategy.activation_checkpointing != "off" and not facts.can_recompute:
        settings.deviate("evaluated without activation checkpointing, which this model does not take")
        strategy = replace(strategy, activation_checkpointing="off")
    if settings.tiled_mlp:
        strategy = replace(strategy, mlp="tiled")
    return Subject(request=request, cluster=cluster, strategy=strategy, batch=batch)


def verdict_of(subject: Subject, source: Source) -> Verdict:
    """Dry-run exactly this subject on each kind of device. Raises as `Source.dry_run`."""
    steps = subject.batch.accumulation_steps
    fitting = Fitting(subject.request, subject.cluster)
    of_devices = [
        source.dry_run(subject.strategy, micro, steps, device) for device, micro in fitting.loads(subject.batch)
    ]
    memory = min(of_devices, key=lambda memory: memory.headroom_bytes)
    return Verdict(
        subject=subject,
        memory=memory,
        host_shortfall_bytes=max(0, fitting.host_shortfall_bytes(memory)),
        disk_shortfall_bytes=max(0, fitting.disk_shortfall_bytes(subject.strategy, source.facts())),
        notes=source.notes,
    )


def drafted(subject: Subject, source: Source) -> bool:
    """Return whether the subject fits by its profile, in which the allocator is replayed. A dry run has to confirm
    it."""
    profile = source.profile(subject.strategy, subject.batch.accumulation_steps > 1)
    fitting = Fitting(subject.request, subject.cluster)
    return all(
        (memory := profile.memory(micro, device)).fits and fitting.host_shortfall_bytes(memory) <= 0
        for device, micro in fitting.loads(subject.batch)
    )


def hidden_size_of(settings: Settings) -> Callable[[], int | None]:
    """Return a function for the model's width, found as transformers' Trainer does; None if it has none, 0 if the
    model is not at hand."""

    def hidden_size() -> int | None:
        try:
            config = _config_of(model_of(settings), settings.task)
        except RequestError as error:
            refuse_model(settings, error)
            return 0
        sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or [])]
        return max((size for size in sizes if size is not None), default=None)

    return cache(hidden_size)


def refuse_model(settings: Settings, error: RequestError) -> None:
    """Note that the model is not at hand, or is none that can be trained like that."""
    why = ": ".join((error.what, *error.because))
    settings.refuse(f"{why}; {error.hint}" if error.hint else why, settings.place("model"))


def model_of(settings: Settings) -> str:
    """Return the model as `--model` takes it.

    Raises:
        RequestError: no file and no flag names it.
    """
    if not settings.model:
        raise RequestError(
            "no file names the model",
            because="memory depends on the model",
            hint="add --model, a preset such as llama-3.1-8b, a model folder or a config.json",
        )
    return preset_of(settings.model)


def _config_of(reference: str, task: str | None) -> Any:
    from frugal.models.resolve import resolve  # torch takes seconds

    return resolve(reference, task).config


def _targets_of_peft(reference: str, task: str | None) -> tuple[str, ...]:
    """Return the modules to which peft attaches adapters where none are named.

    Raises:
        RequestError: peft has no such table for this type of model.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    kind = getattr(_config_of(reference, task), "model_type", "")
    if kind not in TABLE:
        raise RequestError(
            f"no file says which modules of {reference} get adapters",
            because=f"peft has no default for {kind or 'it'}",
            hint="name them, or say --lora r=16,targets=all-linear",
        )
    return tuple(TABLE[kind])


@cache
def _presets_by_hub_name() -> dict[str, str]:
    return {
        source.partition("huggingface.co/")[2].partition("/blob/")[0]: name
        for name, preset in presets().items()
        if "huggingface.co/" in (source := preset["source"])
    }


def preset_of(model: str) -> str:
    """Return the preset with the configuration of a hub name, which saves a download; otherwise the name itself."""
    return _presets_by_hub_name().get(model, model)
