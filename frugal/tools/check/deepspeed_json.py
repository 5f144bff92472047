"""DeepSpeed's JSON: the values of its `auto` fields, its batch, and the frugal strategy that it describes.

Keys and defaults are those of DeepSpeed 0.19.8 (`runtime/config.py`, `runtime/zero/config.py`). The tools that replace
`auto`:

    transformers' Trainer   batch, clipping, precision, the optimizer's numbers; three sizes from the model's hidden
                            size (`integrations/deepspeed.py`, `trainer_config_process`, `trainer_config_finalize`)
    accelerate              batch from the data loader, the same three sizes (`accelerator.py`, `_prepare_deepspeed`)
    no tool                 in `zero_optimization` DeepSpeed drops fields that are still `auto`, and takes its own
                            default (`runtime/config_utils.py`); elsewhere it fails
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec

from frugal.config.optimizers import OptimizerImplementation
from frugal.config.request import Precision
from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import RequestError, refuse
from frugal.planning.strategy import Place as Where
from frugal.planning.strategy import Strategy
from frugal.tools.check.document import AUTO, Document, Place, Settings
from frugal.tools.check.tools import table_of, take, take_optimizer
from frugal.units import plural

BUCKET, PREFETCH, LIVE, PERSISTENT, SUB_GROUP = 500_000_000, 50_000_000, 1_000_000_000, 100_000, 1_000_000_000
"""DeepSpeed's own sizes, in elements."""

REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention",
    "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
)  # fmt: skip
REMOVED_OF_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
"""Keys that DeepSpeed 0.19.8 refuses (`_reject_removed_config_keys`), those of `zero_optimization` apart."""

UNKNOWN = "unknown"
"""The value of an `auto` that a model decides which is not at hand."""

OF_SCRIPT = "accelerate takes it from the data loader of the training script"

_SIZES = {
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": PREFETCH,
    "stage3_param_persistence_threshold": PERSISTENT,
    "stage3_max_live_parameters": LIVE,
    "stage3_max_reuse_distance": LIVE,
    "sub_group_size": SUB_GROUP,
}
_FROM_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A value for one `auto`: its dotted name, the value, and the tool that fills it in; `by` is empty if none does."""

    name: str
    value: Any
    by: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """DeepSpeed's JSON without `auto`.

    `zero` has the sizes of `zero_optimization` as they count; `batch` the three numbers of the batch as they are
    written or filled in, None where they are not.
    """

    precision: Precision
    batch: tuple[int | None, int | None, int | None]
    filled: tuple[Filled, ...]
    zero: Mapping[str, Any]


def read(document: Document, settings: Settings) -> None:
    """Keep the JSON in `settings`, with the places of its values, unknown fields, and its optimizer.

    Raises:
        RequestError: a part of it is no mapping.
    """
    has_old = "bfloat16" in document.content and not settings.fills_auto  # accelerate adds the newer name
    settings.deepspeed = ({"bf16": document.content["bfloat16"]} if has_old else {}) | {**document.content}
    settings.places |= {".".join(("json", *keys)): document.place(*keys) for keys in document.lines}
    said = take(document, settings, table_of("deepspeed"))
    settings.sequence_parallel = said.get("sequence_parallel") or settings.sequence_parallel
    block = document.content.get("optimizer") or {}
    if not block:
        return
    place, params = document.place("optimizer", "type"), block.get("params") or {}
    take_optimizer(settings, str(block.get("type", "")), place, of="deepspeed")
    if params.get("torch_adam") and settings.optimizer is not None and settings.optimizer.name == "adamw":
        where = (settings.block("zero_optimization").get("offload_optimizer") or {}).get("device")
        unfused: OptimizerImplementation = "foreach" if where in (None, "none") else "for-loop"  # torch's own choices
        settings.optimizer = replace(settings.optimizer, implementation="fused" if params.get("fused") else unfused)
    if isinstance(params.get("lr"), int | float):
        settings.learning_rate = float(params["lr"])


def resolve(settings: Settings, world_size: int, hidden_size: Callable[[], int | None]) -> Resolved:
    """Resolve `auto` on `world_size` ranks. `hidden_size` is the model's, asked for only where `auto` needs it; 0: the
    model is not at hand.

    Raises:
        RequestError: a value is no number, or no tool fills in an `auto` that DeepSpeed requires.
    """
    filled: list[Filled] = []
    batch = _batch(settings, world_size, filled)
    precision = _precision(settings, filled)
    zero = dict(settings.block("zero_optimization"))
    zero["stage"] = stage = _whole(settings, "zero_optimization.stage", zero.get("stage", 0))
    refuse(
        (
            stage not in (0, 1, 2, 3),
            f"`zero_optimization.stage` in {settings.place('json.zero_optimization.stage')} is {stage}",
            "ZeRO has the stages 0 to 3",
            None,
        )
    )
    for name, default in _SIZES.items():
        value = zero.get(name, zero.get(name.removeprefix("stage3_"), default))  # DeepSpeed takes either name
        if value == AUTO:
            of_hidden = _FROM_HIDDEN_SIZE.get(name) if settings.fills_auto else None
            hidden = hidden_size() if of_hidden is not None and (stage == 3 or not name.startswith("stage3_")) else None
            value = default if of_hidden is None or hidden is None else of_hidden(hidden)
            by = f"{settings.tool}, from the hidden size {hidden or 'of the model'}" if hidden is not None else ""
            filled.append(Filled(name=f"zero_optimization.{name}", value=value if hidden != 0 else UNKNOWN, by=by))
        zero[name] = _whole(settings, f"zero_optimization.{name}", value)
    has_deepspeeds = settings.optimizer is not None and settings.optimizer.implementation == "deepspeed"
    if stage == 0 and precision != "fp32" and has_deepspeeds:
        settings.refuse(
            f"{precision} at stage 0 with DeepSpeed's own Adam keeps what no other stage does (FP16_Optimizer)",
            settings.place("json.zero_optimization.stage", f"json.{precision}"),
        )
    overlap = _fill(filled, "zero_optimization.overlap_comm", zero.get("overlap_comm"), stage == 3, "")
    zero["overlap_comm"] = stage == 3 if overlap is None else bool(overlap)
    return Resolved(precision=precision, batch=batch, filled=tuple(filled), zero=zero)


def _batch(settings: Settings, world_size: int, filled: list[Filled]) -> tuple[int | None, int | None, int | None]:
    """Return `train_batch_size`, micro-batch and accumulation steps."""
    config = settings.deepspeed or {}
    micro, steps = settings.micro_batch, settings.accumulation_steps
    said_micro, said_steps = config.get(MICRO_BATCH), config.get("gradient_accumulation_steps")
    in_all = steps or (said_steps if isinstance(said_steps, int) else 1)
    of_gpu = said_micro if micro is None and settings.fills_auto and isinstance(said_micro, int) else micro
    by = settings.tool if settings.fills_auto else "your flags"
    if settings.tool == "accelerate" and steps is None:
        steps, by = 1, "accelerate, where the script does not tell it otherwise"
    whole = None if of_gpu is None else of_gpu * in_all * world_size
    values: list[int | None] = []
    for name, value in (
        ("train_batch_size", whole), (MICRO_BATCH, micro), ("gradient_accumulation_steps", steps)
    ):  # fmt: skip
        said = config.get(name)
        refuse(
            (
                said == AUTO and value is None,
                f"`{name}` in {settings.places.get(f'json.{name}', 'the DeepSpeed JSON')} is auto, and no tool fills "
                "it in",
                OF_SCRIPT
                if settings.tool == "accelerate"
                else "only transformers' Trainer and accelerate replace it; DeepSpeed itself takes numbers",
                "give the Trainer's arguments, too, or --micro-batch and --accumulation-steps",
            )
        )
        said = _fill(filled, name, said, value, by)
        values.append(None if said is None else _whole(settings, name, said))
    return values[0], values[1], values[2]


def _precision(settings: Settings, filled: list[Filled]) -> Precision:
    config = settings.deepspeed or {}
    if settings.fills_auto and settings.precision and settings.precision not in ("fp32", *config):
        return settings.precision  # accelerate's `DeepSpeedPlugin.set_mixed_precision`, which Trainer calls, too
    by = settings.tool if settings.fills_auto else "--precision" if settings.precision else ""
    of_nobody = next((name for name in ("bf16", "fp16") if not by and settings.block(name).get("enabled") == AUTO), "")
    if of_nobody:
        settings.refuse(
            f"`{of_nobody}.enabled` is auto, which no tool fills in here: say --precision",
            settings.place(f"json.{of_nobody}.enabled"),
        )
    enabled = {
        name: _fill(filled, f"{name}.enabled", settings.block(name).get("enabled"), settings.precision == name, by)
        for name in ("bf16", "fp16")
    }
    return "bf16" if enabled["bf16"] else "fp16" if enabled["fp16"] else "fp32"


def _fill(filled: list[Filled], name: str, said: Any, value: Any, by: str) -> Any:
    """Return what is said, or the value that is filled in for `auto`."""
    if said != AUTO:
        return said
    filled.append(Filled(name=name, value=value, by=by))
    return value


def _whole(settings: Settings, name: str, value: Any) -> int:
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError:
        where = settings.places.get(f"json.{name}", "the DeepSpeed JSON")
        raise RequestError(f"`{name}` in {where} is {value!r}", because="it must be a whole number") from None


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The batch that a run really gets, whatever was intended: samples of one optimizer step.

    `shared_by`: GPUs that share each sample; such a group takes the place of a GPU.
    """

    micro_batch: int
    accumulation_steps: int
    world_size: int
    shared_by: int = 1

    @property
    def num_takers(self) -> int:
        """Return the number of GPUs, or of groups of GPUs that share their samples."""
        return self.world_size // self.shared_by

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


def arithmetic_of(settings: Settings, resolved: Resolved | None, world_size: int) -> Arithmetic:
    """Return the batch on `world_size` ranks. Contradictions are added to the findings of `settings`.

    Ranks that share samples count once: DeepSpeed divides their number out (`runtime/config.py`).

    Raises:
        RequestError: nothing says how large a micro-batch is, or it comes out below one sample.
    """
    num_takers = world_size // settings.sequence_parallel
    stated, micro, steps = None, settings.micro_batch, settings.accumulation_steps
    if resolved is not None:
        _, json_micro, json_steps = resolved.batch
        for what, own, said, names in (
            ("micro-batch", micro, json_micro, ("micro_batch",)),
            ("accumulation", steps, json_steps, ("json.gradient_accumulation_steps", "accumulation_steps")),
        ):
            if settings.fills_auto and None not in (own, said) and own != said:
                settings.find(
                    "trainer-mismatch",
                    "error",
                    f"the {what} is {said} in DeepSpeed's JSON and {own} in the arguments of {settings.tool}, "
                    "which stops with `Please correct the following DeepSpeed config values`",
                    settings.place(*names),
                    "write auto into the JSON",
                )
        if resolved.batch[:2] != (None, None):
            stated, micro, steps = resolved.batch
    refuse(
        (
            stated is None and micro is None,
            "no file says how large the micro-batch is",
            (
                OF_SCRIPT
                if settings.tool == "accelerate"
                else "fields of its own say it, and may have other defaults than the tool's"
                if resolved is None or settings.fills_auto
                else "DeepSpeed refuses a JSON with neither `train_batch_size` nor a micro-batch"
            ),
            "add --micro-batch 4, and --accumulation-steps 8 where there is more than one",
        )
    )
    if micro is None:
        assert stated is not None
        steps = steps or 1
        micro = stated // num_takers // steps
    elif steps is None:
        steps = stated // micro // num_takers if stated is not None and micro else 1
    refuse(
        (
            micro < 1 or steps < 1,
            f"a global batch of {stated} leaves a GPU without a sample",
            f"{stated} samples on {plural(world_size, 'GPU')} in {plural(max(steps, 1), 'accumulation step')}",
            f"use at least {num_takers * max(steps, 1) * max(micro, 1)} samples, or fewer GPUs",
        )
    )
    arithmetic = Arithmetic(
        micro_batch=micro, accumulation_steps=steps, world_size=world_size, shared_by=settings.sequence_parallel
    )
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


def strategy(settings: Settings, resolved: Resolved) -> Strategy:
    """Return the strategy that the JSON describes. Options that frugal does not have become deviations of
    `settings`."""
    zero, stage = resolved.zero, resolved.zero["stage"]
    optimizer, parameters, nvme = _offload(settings, zero, stage)
    if stage == 3 and zero["stage3_max_reuse_distance"] != zero["stage3_max_live_parameters"]:
        settings.deviate(
            f"`stage3_max_reuse_distance` is evaluated as {zero['stage3_max_live_parameters']}, as the most that live",
            settings.place("json.zero_optimization.stage3_max_reuse_distance"),
        )
    ratio = (zero.get("offload_optimizer") or {}).get("ratio", 1)
    is_in_part = optimizer != "none" and isinstance(ratio, int | float) and ratio < 1
    is_adamw = settings.optimizer is not None and settings.optimizer.name == "adamw"
    is_possible = is_adamw and (optimizer, parameters, stage) == ("cpu", "none", 3)
    if is_in_part and not (is_possible and ratio > 0):
        settings.deviate("evaluated with all of the optimizer on the host", _at(settings, "offload_optimizer", "ratio"))
        is_in_part = False
    return Strategy(
        zero_stage=stage,
        activation_checkpointing="full" if settings.activation_checkpointing else "off",
        sequence_parallel=settings.sequence_parallel,
        loss="tiled" if settings.tiled_loss else "plain",
        offload_optimizer=optimizer,
        offload_ratio=float(ratio) if is_in_part else 1.0,
        offload_parameters=parameters,
        nvme_path=nvme,
        gradient_accumulation_dtype=_accumulation_dtype(settings, resolved, stage),
        reduce_bucket_elements=max(1, zero["reduce_bucket_size"]),
        prefetch_bucket_elements=zero["stage3_prefetch_bucket_size"],
        max_live_elements=zero["stage3_max_live_parameters"],
        persistence_threshold_elements=zero["stage3_param_persistence_threshold"],
        sub_group_elements=max(1, zero["sub_group_size"]),
        overlap_comm=zero["overlap_comm"] and stage >= 1,
        expandable_segments=bool(settings.expandable_segments),
    )


def _accumulation_dtype(settings: Settings, resolved: Resolved, stage: int) -> Any:
    """Return the dtype of summed gradients: the model's, unless `data_types.grad_accum_dtype` names another."""
    said = settings.block("data_types").get("grad_accum_dtype")
    words = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
    dtype = resolved.precision if said is None else words.get(str(said), str(said))
    place = settings.place("json.data_types.grad_accum_dtype")
    refuse(
        (
            dtype not in ("fp32", "bf16", "fp16"),
            f"`data_types.grad_accum_dtype` in {place} is {said!r}",
            "DeepSpeed knows no such type",
            None,
        )
    )
    if stage <= 1 and resolved.precision != "fp32" and dtype == "fp32":
        settings.deviate(
            f"evaluated with gradients summed in {resolved.precision}: stage {stage} with fp32 sums is another "
            "optimizer of DeepSpeed's, of about 4 bytes a parameter more",
            place,
        )
        return resolved.precision
    return dtype


def _offload(settings: Settings, zero: Mapping[str, Any], stage: int) -> tuple[Where, Where, str | None]:
    """Return the places of optimizer and parameters, and the folder of the optimizer on NVMe."""
    optimizer = _device(settings, "offload_optimizer", is_old=bool(zero.get("cpu_offload")))
    parameters = _device(settings, "offload_param", is_old=bool(zero.get("cpu_offload_param")))
    path = (zero.get("offload_optimizer") or {}).get("nvme_path") or (zero.get("offload_param") or {}).get("nvme_path")
    if optimizer != "none" and stage == 0:
        settings.deviate("`offload_optimizer` does nothing at stage 0", _at(settings, "offload_optimizer"))
        optimizer = "none"
    if parameters != "none" and (stage != 3 or optimizer == "none"):
        alone = "evaluated with the parameters on the GPUs: frugal moves them only together with the optimizer"
        why = alone if stage == 3 else f"`offload_param` does nothing at stage {stage}"
        settings.deviate(why, _at(settings, "offload_param"))
        parameters = "none"
    if parameters == "nvme":
        settings.deviate(
            "evaluated with the parameters in host memory: buffers for NVMe have sizes of their own",
            _at(settings, "offload_param"),
        )
        parameters = "cpu"
    if optimizer == "nvme" and (stage != 3 or not path):
        settings.refuse("the optimizer on NVMe needs stage 3 and `nvme_path`", _at(settings, "offload_optimizer"))
        optimizer = "none"
    return optimizer, parameters, str(path) if optimizer == "nvme" else None


def _device(settings: Settings, block: str, *, is_old: bool) -> Where:
    said: Any = (settings.block("zero_optimization").get(block) or {}).get("device", "none")
    if said in (None, "none", AUTO):
        return "cpu" if is_old else "none"
    refuse(
        (
            said not in get_args(Where),
            f"`{block}.device` in {_at(settings, block, 'device')} is {said!r}",
            "it is cpu, nvme or none",
            None,
        )
    )
    return said


def _at(settings: Settings, *keys: str) -> Place | None:
    return settings.place(*[".".join(("json", "zero_optimization", *keys[:n])) for n in range(len(keys), 0, -1)])
