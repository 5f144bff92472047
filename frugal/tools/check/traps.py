"""Known traps, found in the settings alone. Each trap has its source in docs/facts, or at its place."""

from collections.abc import Callable, Iterator
from typing import Any

from frugal.config.hardware import local_host
from frugal.tools.check import known_faults
from frugal.tools.check.batch import Arithmetic
from frugal.tools.check.deepspeed_json import REMOVED, REMOVED_OF_ZERO, Resolved
from frugal.tools.check.settings import AUTO, Finding, Settings
from frugal.units import format_bytes, plural

LARGE_BUCKET_BYTES = 500_000_000
"""The smallest gradient bucket that is reported: a few MB already saturate a link."""


Row = tuple[object, Finding]
"""A condition, and what is found where it is true."""


def traps(settings: Settings, deepspeed: Resolved | None, arithmetic: Arithmetic) -> list[Finding]:
    """Return all traps that the settings show, the worst first."""
    rows = [row for trap in _OF_ANY for row in trap(settings, arithmetic)]
    if deepspeed is not None:
        rows += [row for of_deepspeed in _OF_DEEPSPEED for row in of_deepspeed(settings, deepspeed, arithmetic)]
    order = ("error", "warning", "note")
    findings = [*settings.findings, *(finding for applies, finding in rows if applies)]
    return sorted(findings, key=lambda finding: order.index(finding.level))


def _zero(settings: Settings) -> dict[str, Any]:
    return (settings.deepspeed or {}).get("zero_optimization") or {}


# Of DeepSpeed's JSON


def _low_stages(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find wrong or wasteful combinations of precision and low stages (docs/facts/deepspeed.md, Precision), and long
    sums of gradients in bf16 (Exactness)."""
    stage, steps = deepspeed.zero["stage"], arithmetic.accumulation_steps
    said = ((settings.deepspeed or {}).get("data_types") or {}).get("grad_accum_dtype")
    is_bf16 = deepspeed.precision == "bf16"
    yield (
        stage == 0 and deepspeed.precision != "fp32",
        Finding(
            "half-precision-stage-0",
            "error",
            f"{deepspeed.precision} at stage 0 starts Adam at its second step: after ten steps the change of "
            "the weights is off by 15 %",
            settings.place("json.zero_optimization.stage", "json.zero_optimization", "json.bf16"),
            "use stage 2, also on one GPU",
        ),
    )
    yield (
        is_bf16 and stage == 1 and said in ("fp32", "float32"),
        Finding(
            "bf16-stage-1-fp32-sums",
            "warning",
            "stage 1 with gradients summed in fp32 silently becomes BF16_Optimizer, which takes more memory "
            "than stage 2",
            settings.place("json.data_types.grad_accum_dtype"),
            "use stage 2",
        ),
    )
    yield (
        is_bf16 and said in (None, "bf16", "bfloat16") and steps >= 8,
        Finding(
            "bf16-accumulation",
            "warning",
            f"gradients of {steps} micro-steps are summed in bf16, DeepSpeed's default: the error grows with every one "
            "(2.3 % over 256 of them, 0.8 % in fp32) and depends on how the batch is cut",
            settings.place("json.bf16.enabled", "json.bf16"),
            '"data_types": {"grad_accum_dtype": "fp32"} with stage 2 or 3, for 2 bytes a parameter and GPU',
        ),
    )


def _buckets(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find large buffers (docs/facts/deepspeed.md, Where memory goes)."""
    zero = deepspeed.zero
    element = 4 if deepspeed.precision == "fp32" else 2
    is_double = zero["overlap_comm"] and zero["stage"] in (1, 2)
    size = zero["reduce_bucket_size"] * element * (2 if is_double else 1)
    name = "the gradient bucket" if "reduce_bucket_size" in _zero(settings) else "DeepSpeed's default gradient bucket"
    twice = ", twice because of overlap_comm" if is_double else ""
    yield (
        zero["stage"] and zero["reduce_bucket_size"] * element >= LARGE_BUCKET_BYTES,
        Finding(
            "large-bucket",
            "warning",
            f"{name} of {zero['reduce_bucket_size']:,} elements takes {format_bytes(size)} of every GPU{twice}, "
            "whatever the model's size",
            settings.place("json.zero_optimization.reduce_bucket_size", "json.zero_optimization"),
            '"reduce_bucket_size": 20000000 is as fast',
        ),
    )
    yield (
        zero["stage"] == 3 and zero["stage3_max_live_parameters"] >= 1_000_000_000,
        Finding(
            "large-live-parameters",
            "note",
            "up to 1,000,000,000 gathered parameters stay on the GPU from the second step on: a smaller model "
            "is kept whole, in spite of stage 3",
            settings.place("json.zero_optimization.stage3_max_live_parameters", "json.zero_optimization"),
            "lower stage3_max_live_parameters and stage3_max_reuse_distance, to 50000000",
        ),
    )


def _auto_of_nobody(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find `auto` fields that DeepSpeed 0.19.8 drops (`runtime/config_utils.py`)."""
    for filled in deepspeed.filled:
        yield (
            not filled.by,
            Finding(
                "auto-of-nobody",
                "warning",
                f"`{filled.name}` is auto, which no tool fills in here: DeepSpeed drops it, and takes its default "
                f"{filled.value}",
                settings.place(f"json.{filled.name}"),
                "write the number that you mean",
            ),
        )


def _loss_scaling(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Explain fp16's skipped steps (`runtime/fp16/loss_scaler.py` of DeepSpeed 0.19.8)."""
    block = (settings.deepspeed or {}).get("fp16") or {}
    scale, power = block.get("loss_scale", 0), block.get("initial_scale_power", 16)
    place = settings.place("json.fp16.loss_scale", "json.fp16.initial_scale_power", "json.fp16")
    text = f"a fixed loss scale of {scale}: every step whose gradient overflows is skipped"
    if scale in (0, AUTO):
        text = (
            f"the loss scale starts at 2^{power}, and every step whose gradient overflows is skipped: the first steps "
            "train nothing, while Trainer's learning rate schedule advances"
        )
    yield deepspeed.precision == "fp16", Finding("loss-scale", "note", text, place, "use bf16 where the cards have it")


def _offloading(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find unpinned offloading (`runtime/zero/offload_config.py`: pinned by default in 0.19.8, not in older
    versions)."""
    zero = _zero(settings)
    for name in ("offload_optimizer", "offload_param"):
        block = zero.get(name) or {}
        yield (
            block.get("device", "none") not in ("none", None) and block.get("pin_memory") is False,
            Finding(
                "unpinned-offload",
                "warning",
                f"`{name}` without pinned memory: copies wait for the GPU, and do not overlap with its work",
                settings.place(f"json.zero_optimization.{name}.pin_memory"),
                '"pin_memory": true, if the host has the memory',
            ),
        )
    for name in ("cpu_offload", "cpu_offload_param"):
        yield (
            zero.get(name),
            Finding(
                "old-offload",
                "warning",
                f"`{name}` is an old name",
                settings.place(f"json.zero_optimization.{name}"),
                "use the block offload_optimizer or offload_param, with its device",
            ),
        )


def _wrong_options(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find options that are wrong or do nothing (docs/facts/deepspeed.md)."""
    config, zero = settings.deepspeed or {}, _zero(settings)
    yield (
        config.get("activation_checkpointing"),
        Finding(
            "activation-checkpointing-block",
            "warning",
            "DeepSpeed's block `activation_checkpointing` has no effect: models of transformers do not read it",
            settings.place("json.activation_checkpointing"),
            "" if settings.activation_checkpointing else "set gradient_checkpointing of the trainer",
        ),
    )
    removed = [f"zero_optimization.{name}" for name in REMOVED_OF_ZERO if name in zero]
    for name in (*(name for name in REMOVED if name in config), *removed):
        yield (
            True,
            Finding(
                "removed-block",
                "error",
                f"`{name}` was removed from DeepSpeed, which stops if it is still present",
                settings.place(f"json.{name}"),
                "take it out",
            ),
        )
    yield (
        zero.get("round_robin_gradients") and zero.get("stage") in (1, 2),
        Finding(
            "round-robin-gradients",
            "note",
            "with round_robin_gradients `safe_get_full_fp32_param` returns scrambled weights; training is right",
            settings.place("json.zero_optimization.round_robin_gradients"),
        ),
    )
    factor = config.get("gradient_predivide_factor")
    yield (
        zero.get("stage") == 3 and zero.get("reduce_scatter") is False and factor == arithmetic.world_size,
        Finding(
            "predivided-gradients",
            "error",
            "stage 3 without reduce_scatter and with gradient_predivide_factor equal to the GPUs: gradients "
            "are silently too small",
            settings.place("json.gradient_predivide_factor"),
            "take both out",
        ),
    )


def _known_faults(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find faults of the installed version of DeepSpeed (`frugal.tools.check.known_faults`)."""
    version = local_host.versions()["deepspeed"]
    has = {
        "half": deepspeed.precision == "bf16",
        "accumulation": arithmetic.accumulation_steps > 1,
        "ranks": arithmetic.world_size > 1,
        "overlap": bool(deepspeed.zero["overlap_comm"]),
    }
    for fault in known_faults.of_version(version):
        yield (
            deepspeed.zero["stage"] in fault.stages and all(has[need] for need in fault.needs),
            Finding(
                "wrong-gradients",
                "error",
                f"DeepSpeed {version} computes wrong gradients here ({fault.thread}): {fault.what}",
                settings.place("json.zero_optimization.stage", "json.zero_optimization"),
                fault.remedy + (f"; fixed in DeepSpeed {fault.until}" if fault.until else ""),
            ),
        )


# Of any tool


def _checkpointing(settings: Settings, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find wrong forms of torch.utils.checkpoint: the reentrant one needs an input that requires a gradient."""
    yield (
        settings.activation_checkpointing and settings.use_cache,
        Finding(
            "cache-with-checkpointing",
            "warning",
            "`use_cache` with activation checkpointing: transformers switches the cache off, with a warning at "
            "every step in some models",
            settings.place("use_cache"),
            "use_cache: false",
        ),
    )
    stage = _zero(settings).get("stage")
    is_frozen = settings.activation_checkpointing and settings.lora is not None
    yield (
        is_frozen and settings.use_reentrant,
        Finding(
            "reentrant-and-frozen",
            "warning",
            "reentrant activation checkpointing with a frozen model: adapters get no gradients unless the "
            "inputs ask for them (`enable_input_require_grads`)",
            settings.place("use_reentrant", "activation_checkpointing"),
            "" if stage == 3 else "use_reentrant: false",
        ),
    )
    yield (
        is_frozen and stage == 3 and settings.use_reentrant is False,
        Finding(
            "non-reentrant-at-stage-3",
            "warning",
            "adapters under ZeRO-3 with the non-reentrant form: transformers#47254, recomputed tensors have "
            "other shapes",
            settings.place("use_reentrant", "activation_checkpointing"),
            "use_reentrant: true, or stage 2",
        ),
    )


def _packing(settings: Settings, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find packed documents that see each other (docs/facts/memory.md, Padding)."""
    yield (
        settings.packing and settings.packs_apart is False,
        Finding(
            "packing-mixes-documents",
            "warning",
            "documents that are packed into one sample see each other: the chosen attention does not separate them",
            settings.place("packing"),
            "use flash attention (attn_implementation: flash_attention_2), or leave packing out",
        ),
    )


def _evaluation(settings: Settings, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find evaluations that take more memory than training (transformers#7158, axolotl#1813)."""
    micro = settings.raw.get("eval_micro_batch") or 0
    yield (
        micro > arithmetic.micro_batch,
        Finding(
            "evaluation-batch",
            "warning",
            f"an evaluation takes {plural(micro, 'sample')} at once, training {arithmetic.micro_batch}: it may "
            "run out of memory when training did not; this check is of training",
            settings.place("eval_micro_batch"),
            f"per_device_eval_batch_size: {arithmetic.micro_batch}",
        ),
    )
    yield (
        settings.raw.get("eval_keeps_logits"),
        Finding(
            "evaluation-keeps-logits",
            "note",
            "an evaluation keeps the logits of all its batches on the GPU",
            settings.place("prediction_loss_only", "eval_micro_batch"),
            "prediction_loss_only: true, or eval_accumulation_steps",
        ),
    )


def _of_trainer(settings: Settings, arithmetic: Arithmetic) -> Iterator[Row]:
    """Find batches that depend on the GPU, and means of means (docs/facts/peers.md, Batches): without averaging over
    two ranks the update error was 0.24 to 0.38."""
    yield (
        settings.raw.get("auto_find_batch_size"),
        Finding(
            "auto-find-batch-size",
            "error",
            "`auto_find_batch_size` makes the micro-batch smaller and does not change the accumulation: the "
            "global batch depends on the GPU; and it does not work with DeepSpeed (transformers#29058)",
            settings.place("auto_find_batch_size"),
            "leave it out: this check says what fits",
        ),
    )
    yield (
        settings.raw.get("average_tokens_across_devices") is False and arithmetic.world_size > 1,
        Finding(
            "mean-of-means",
            "warning",
            "each GPU averages over its own tokens, and the means are averaged: samples on a GPU with few "
            "tokens count more",
            settings.place("average_tokens_across_devices"),
            "average_tokens_across_devices: true",
        ),
    )


_OF_ANY: tuple[Callable[[Settings, Arithmetic], Iterator[Row]], ...] = (
    _checkpointing, _packing, _evaluation, _of_trainer,
)  # fmt: skip
_OF_DEEPSPEED: tuple[Callable[[Settings, Resolved, Arithmetic], Iterator[Row]], ...] = (
    _known_faults, _low_stages, _buckets, _auto_of_nobody, _loss_scaling, _offloading, _wrong_options,
)  # fmt: skip
