"""Known traps, found in the settings alone. Each trap has its source in docs/facts, or at its place.

A row of a table has a condition, and what is found where it is true: rule, level, text, the settings whose place is
named (the first that was read), and the remedy.
"""

from frugal.tools.check.deepspeed_json import REMOVED, REMOVED_OF_ZERO, Arithmetic, Resolved
from frugal.tools.check.document import AUTO, Finding, Level, Settings
from frugal.units import format_bytes, plural

LARGE_BUCKET_BYTES = 500_000_000
"""The smallest gradient bucket that is reported: a few MB already saturate a link."""

Row = tuple[object, str, Level, str, tuple[str, ...], str]
_ZERO = "json.zero_optimization"


def traps(settings: Settings, deepspeed: Resolved | None, arithmetic: Arithmetic) -> list[Finding]:
    """Return all traps that the settings show, the worst first."""
    rows = _of_any(settings, arithmetic)
    if deepspeed is not None:
        rows += _of_numbers(settings, deepspeed, arithmetic) + _of_options(settings, arithmetic)
    shown = [
        Finding(rule, level, text, settings.place(*names), hint or None)
        for applies, rule, level, text, names, hint in rows
        if applies
    ]
    return sorted([*settings.findings, *shown], key=lambda finding: ("error", "warning", "note").index(finding.level))


def _of_any(settings: Settings, arithmetic: Arithmetic) -> list[Row]:
    """Return traps of any tool.

    torch's reentrant activation checkpointing needs an input that requires a gradient; packed documents that see each
    other are in docs/facts/memory.md (Padding), evaluations that take more memory than training in transformers#7158
    and axolotl#1813. Means of means are in docs/facts/peers.md (Batches): without averaging over two ranks the update
    error was 0.24 to 0.38.
    """
    said, micro = settings.raw, settings.raw.get("eval_micro_batch") or 0
    stage = settings.block("zero_optimization").get("stage")
    is_frozen = settings.activation_checkpointing and settings.lora is not None
    return [
        (
            settings.activation_checkpointing and said.get("use_cache"), "cache-with-checkpointing", "warning",
            "`use_cache` with activation checkpointing: transformers switches the cache off, with a warning at every "
            "step in some models",
            ("use_cache",), "use_cache: false",
        ),
        (
            is_frozen and settings.use_reentrant, "reentrant-and-frozen", "warning",
            "reentrant activation checkpointing with a frozen model: adapters get no gradients unless the inputs ask "
            "for them (`enable_input_require_grads`)",
            ("use_reentrant", "activation_checkpointing"), "" if stage == 3 else "use_reentrant: false",
        ),
        (
            is_frozen and stage == 3 and settings.use_reentrant is False, "non-reentrant-at-stage-3", "warning",
            "adapters under ZeRO-3 with the non-reentrant form: transformers#47254, recomputed tensors have other "
            "shapes",
            ("use_reentrant", "activation_checkpointing"), "use_reentrant: true, or stage 2",
        ),
        (
            settings.packing and settings.packs_apart is False, "packing-mixes-documents", "warning",
            "documents that are packed into one sample see each other: the chosen attention does not separate them",
            ("packing",), "use flash attention (attn_implementation: flash_attention_2), or leave packing out",
        ),
        (
            micro > arithmetic.micro_batch, "evaluation-batch", "warning",
            f"an evaluation takes {plural(micro, 'sample')} at once, training {arithmetic.micro_batch}: it may run "
            "out of memory when training did not; this check is of training",
            ("eval_micro_batch",), f"per_device_eval_batch_size: {arithmetic.micro_batch}",
        ),
        (
            said.get("eval_keeps_logits"), "evaluation-keeps-logits", "note",
            "an evaluation keeps the logits of all its batches on the GPU",
            ("prediction_loss_only", "eval_micro_batch"), "prediction_loss_only: true, or eval_accumulation_steps",
        ),
        (
            said.get("auto_find_batch_size"), "auto-find-batch-size", "error",
            "`auto_find_batch_size` makes the micro-batch smaller and does not change the accumulation: the global "
            "batch depends on the GPU; and it does not work with DeepSpeed (transformers#29058)",
            ("auto_find_batch_size",), "leave it out: this check says what fits",
        ),
        (
            said.get("average_tokens_across_devices") is False and arithmetic.world_size > 1,
            "mean-of-means", "warning",
            "each GPU averages over its own tokens, and the means are averaged: samples on a GPU with few tokens count "
            "more",
            ("average_tokens_across_devices",), "average_tokens_across_devices: true",
        ),
    ]  # fmt: skip


def _of_numbers(settings: Settings, deepspeed: Resolved, arithmetic: Arithmetic) -> list[Row]:
    """Return traps of DeepSpeed's numbers and buffers.

    docs/facts/deepspeed.md has low stages (Precision), long sums in bf16 (Exactness) and large buffers (Where memory
    goes). DeepSpeed 0.19.8 drops an `auto` that nobody fills in (`runtime/config_utils.py`) and skips steps
    (`runtime/fp16/loss_scaler.py`).
    """
    zero, steps = deepspeed.zero, arithmetic.accumulation_steps
    stage, is_bf16 = zero["stage"], deepspeed.precision == "bf16"
    sums = settings.block("data_types").get("grad_accum_dtype")
    element = 4 if deepspeed.precision == "fp32" else 2
    is_double = zero["overlap_comm"] and stage in (1, 2)
    bucket = format_bytes(zero["reduce_bucket_size"] * element * (2 if is_double else 1))
    name = (
        "the gradient bucket"
        if "reduce_bucket_size" in settings.block("zero_optimization")
        else "DeepSpeed's default gradient bucket"
    )
    block = settings.block("fp16")
    scale = block.get("loss_scale", 0)
    scaling = f"a fixed loss scale of {scale}: every step whose gradient overflows is skipped"
    if scale in (0, AUTO):
        scaling = (
            f"the loss scale starts at 2^{block.get('initial_scale_power', 16)}, and every step "
            "whose gradient overflows is skipped: the first steps train nothing, while Trainer's learning rate "
            "schedule advances"
        )
    return [
        (
            stage == 0 and deepspeed.precision != "fp32", "half-precision-stage-0", "error",
            f"{deepspeed.precision} at stage 0 starts Adam at its second step: after ten steps the change of the "
            "weights is off by 15 %",
            (f"{_ZERO}.stage", _ZERO, "json.bf16"), "use stage 2, also on one GPU",
        ),
        (
            is_bf16 and stage == 1 and sums in ("fp32", "float32"), "bf16-stage-1-fp32-sums", "warning",
            "stage 1 with gradients summed in fp32 silently becomes BF16_Optimizer, which takes more memory than stage "
            "2",
            ("json.data_types.grad_accum_dtype",), "use stage 2",
        ),
        (
            is_bf16 and sums in (None, "bf16", "bfloat16") and steps >= 8, "bf16-accumulation", "warning",
            f"gradients of {steps} micro-steps are summed in bf16, DeepSpeed's default: the error grows with every one "
            "(2.3 % over 256 of them, 0.8 % in fp32) and depends on how the batch is cut",
            ("json.bf16.enabled", "json.bf16"),
            '"data_types": {"grad_accum_dtype": "fp32"} with stage 2 or 3, for 2 bytes a parameter and GPU',
        ),
        (
            stage and zero["reduce_bucket_size"] * element >= LARGE_BUCKET_BYTES, "large-bucket", "warning",
            f"{name} of {zero['reduce_bucket_size']:,} elements takes {bucket} of every GPU"
            f"{', twice because of overlap_comm' if is_double else ''}, whatever the model's size",
            (f"{_ZERO}.reduce_bucket_size", _ZERO), '"reduce_bucket_size": 20000000 is as fast',
        ),
        (
            stage == 3 and zero["stage3_max_live_parameters"] >= 1_000_000_000, "large-live-parameters", "note",
            "up to 1,000,000,000 gathered parameters stay on the GPU from the second step on: a smaller model is kept "
            "whole, in spite of stage 3",
            (f"{_ZERO}.stage3_max_live_parameters", _ZERO),
            "lower stage3_max_live_parameters and stage3_max_reuse_distance, to 50000000",
        ),
        *(
            (
                not filled.by, "auto-of-nobody", "warning",
                f"`{filled.name}` is auto, which no tool fills in here: DeepSpeed drops it, and takes its default "
                f"{filled.value}",
                (f"json.{filled.name}",), "write the number that you mean",
            )
            for filled in deepspeed.filled
        ),
        (
            deepspeed.precision == "fp16", "loss-scale", "note", scaling,
            ("json.fp16.loss_scale", "json.fp16.initial_scale_power", "json.fp16"), "use bf16 where the cards have it",
        ),
    ]  # fmt: skip


def _of_options(settings: Settings, arithmetic: Arithmetic) -> list[Row]:
    """Return options of DeepSpeed that are wrong or do nothing (docs/facts/deepspeed.md). Offloading is pinned by
    default in 0.19.8 (`runtime/zero/offload_config.py`), not in older versions."""
    config, zero = settings.deepspeed or {}, settings.block("zero_optimization")
    blocks = {name: zero.get(name) or {} for name in ("offload_optimizer", "offload_param")}
    removed = [name for name in REMOVED if name in config]
    removed += [f"zero_optimization.{name}" for name in REMOVED_OF_ZERO if name in zero]
    return [
        *(
            (
                block.get("device", "none") not in ("none", None) and block.get("pin_memory") is False,
                "unpinned-offload", "warning",
                f"`{name}` without pinned memory: copies wait for the GPU, and do not overlap with its work",
                (f"{_ZERO}.{name}.pin_memory",), '"pin_memory": true, if the host has the memory',
            )
            for name, block in blocks.items()
        ),
        *(
            (
                zero.get(name), "old-offload", "warning", f"`{name}` is an old name", (f"{_ZERO}.{name}",),
                "use the block offload_optimizer or offload_param, with its device",
            )
            for name in ("cpu_offload", "cpu_offload_param")
        ),
        (
            config.get("activation_checkpointing"), "activation-checkpointing-block", "warning",
            "DeepSpeed's block `activation_checkpointing` has no effect: models of transformers do not read it",
            ("json.activation_checkpointing",),
            "" if settings.activation_checkpointing else "set gradient_checkpointing of the trainer",
        ),
        *(
            (
                True, "removed-block", "error",
                f"`{name}` was removed from DeepSpeed, which stops if it is still present", (f"json.{name}",),
                "take it out",
            )
            for name in removed
        ),
        (
            zero.get("round_robin_gradients") and zero.get("stage") in (1, 2), "round-robin-gradients", "note",
            "with round_robin_gradients `safe_get_full_fp32_param` returns scrambled weights; training is right",
            (f"{_ZERO}.round_robin_gradients",), "",
        ),
        (
            zero.get("stage") == 3
            and zero.get("reduce_scatter") is False
            and config.get("gradient_predivide_factor") == arithmetic.world_size,
            "predivided-gradients", "error",
            "stage 3 without reduce_scatter and with gradient_predivide_factor equal to the GPUs: gradients are "
            "silently too small",
            ("json.gradient_predivide_factor",), "take both out",
        ),
    ]  # fmt: skip
