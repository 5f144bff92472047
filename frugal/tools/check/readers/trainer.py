"""transformers' TrainingArguments and the arguments of its example scripts, and TRL's, which add to them.

Defaults are those of transformers 5.23.0 and TRL 1.16.0.
"""

from frugal.config.adapters import ALL_LINEAR, Lora
from frugal.config.request import Precision
from frugal.tools.check.documents import command_line
from frugal.tools.check.documents.document import Document, Tool
from frugal.tools.check.documents.known_fields import finish
from frugal.tools.check.readers import optimizers
from frugal.tools.check.settings import Fields, Settings

MICRO_BATCH, OPTIMIZER, LEARNING_RATE = 8, "adamw_torch_fused", 5e-5
TRL_LEARNING_RATE, TRL_LENGTH = 2e-5, 1024

LIGER = "Liger's fused loss is evaluated as frugal's tiled loss; its other kernels keep fewer activations"
FSDP = "FSDP is not DeepSpeed: its units, prefetching and precision take other memory, of which frugal has no dry run"

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
_KWARGS = tuple(f"{name}_kwargs" for name in _CHECKPOINTING)


def read(document: Document, tool: Tool) -> Settings:
    """Return the settings in TrainingArguments; `tool` is transformers or trl.

    Raises:
        RequestError: a value is of the wrong kind.
    """
    is_trl = tool == "trl"
    settings = Settings(tool="TRL" if is_trl else "transformers' Trainer", fills_auto=True)
    settings.gpus, settings.nodes = command_line.num_processes(document.content)
    settings.expandable_segments = command_line.expandable_segments(document.content)
    fields = Fields(document, settings)
    settings.model = fields.text("model_name_or_path", of="model")
    length = fields.whole("max_length", "max_seq_length", "block_size", "max_source_length", of="seq_len")
    settings.seq_len = TRL_LENGTH if is_trl and length is None else length
    fields.known("max_target_length")
    arguments(fields, is_trl=is_trl)
    if is_trl:
        _trl(fields)
    _attention(fields, is_trl=is_trl)
    finish(fields, "transformers", *(("trl",) if is_trl else ()))
    return settings


def arguments(fields: Fields, *, is_trl: bool = False) -> None:
    """Read the arguments that every script with TrainingArguments has, LLaMA-Factory's included."""
    settings = fields.settings
    micro = fields.whole("per_device_train_batch_size", "per_gpu_train_batch_size", of="micro_batch")
    settings.micro_batch = MICRO_BATCH if micro is None else micro
    settings.accumulation_steps = fields.whole("gradient_accumulation_steps", of="accumulation_steps") or 1
    settings.precision = _precision(fields, default="bf16" if is_trl else "fp32")
    rate = fields.number("learning_rate", of="learning_rate")
    settings.learning_rate = (TRL_LEARNING_RATE if is_trl else LEARNING_RATE) if rate is None else rate
    settings.weight_decay = fields.number("weight_decay", of="weight_decay") or 0.0
    clipping = fields.number("max_grad_norm", of="gradient_clipping")
    settings.gradient_clipping = 1.0 if clipping is None else clipping
    optimizers.take(settings, fields.text("optim", of="optimizer") or OPTIMIZER, settings.place("optimizer"))
    recomputes = fields.flag(*_CHECKPOINTING, of="activation_checkpointing")
    settings.activation_checkpointing = is_trl if recomputes is None else recomputes
    more = fields.value(*_KWARGS, of="use_reentrant")
    settings.use_reentrant = bool(more.get("use_reentrant", False)) if isinstance(more, dict) else None
    settings.use_cache = fields.flag("use_cache", of="use_cache")
    settings.tiled_loss = bool(fields.flag("use_liger_kernel", of="tiled_loss"))
    if settings.tiled_loss:
        settings.deviate(LIGER, settings.place("tiled_loss"))
    settings.raw["deepspeed"] = fields.value("deepspeed", of="deepspeed")
    _fsdp(fields)
    _evaluation(fields)
    for name in ("auto_find_batch_size", "average_tokens_across_devices"):
        settings.raw[name] = fields.flag(name, of=name)
    parallelism(fields)


PARALLELISM = "parallelism_config"


def parallelism(fields: Fields, prefix: str = "") -> None:
    """Read accelerate's `ParallelismConfig`, whose fields begin with `prefix`. Sequence parallelism through DeepSpeed
    (`sp_size`) is followed; every other split is refused."""
    if not fields.value(PARALLELISM):
        return
    section = Fields(fields.document, fields.settings, (PARALLELISM,))
    shared_by = section.whole(f"{prefix}sp_size", of="sequence_parallel") or 1
    backend = section.text(f"{prefix}sp_backend") or "deepspeed"
    if shared_by > 1 and backend != "deepspeed":
        fields.settings.refuse(
            f"`{prefix}sp_backend: {backend}` is none that accelerate has", section.place(f"{prefix}sp_backend")
        )
    fields.settings.sequence_parallel = shared_by
    sizes = ["tp_size", "cp_size"] + ([] if shared_by > 1 else ["dp_replicate_size", "dp_shard_size"])
    for name in sizes:
        if (section.whole(prefix + name) or 1) > 1:
            fields.settings.refuse(
                f"`{prefix}{name}` splits the model or its samples otherwise than ZeRO", section.place(prefix + name)
            )
    section.known(*(prefix + name for name in _OF_PARALLELISM))
    section.list_unknown()


_OF_PARALLELISM = (
    "dp_replicate_size", "dp_shard_size", "tp_handler", "cp_backend", "cp_comm_strategy", "cp_handler", "sp_handler",
    "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip


def _precision(fields: Fields, default: Precision) -> Precision:
    half, brain = fields.flag("fp16", of="precision"), fields.flag("bf16", of="precision")
    if half:
        return "fp16"
    if brain is None:
        return default
    return "bf16" if brain else "fp32"


def _fsdp(fields: Fields) -> None:
    settings = fields.settings
    fields.known("fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
    if fields.value("fsdp"):
        settings.refuse(
            FSDP,
            fields.place("fsdp"),
        )


def _evaluation(fields: Fields) -> None:
    """Read the batch size of evaluations during training, and whether they keep logits."""
    settings = fields.settings
    strategy = fields.text("eval_strategy", "evaluation_strategy")
    evaluates = bool(fields.flag("do_eval")) or strategy not in (None, "no", "False")
    micro = fields.whole("per_device_eval_batch_size", "per_gpu_eval_batch_size", of="eval_micro_batch")
    settings.raw["eval_micro_batch"] = (MICRO_BATCH if micro is None else micro) if evaluates else None
    settings.raw["eval_keeps_logits"] = (
        evaluates
        and not fields.flag("prediction_loss_only", of="prediction_loss_only")
        and fields.whole("eval_accumulation_steps") is None
    )
    settings.places.setdefault("eval_micro_batch", fields.place("eval_strategy"))


def _attention(fields: Fields, *, is_trl: bool) -> None:
    """Read the attention implementation, and whether it keeps packed documents apart."""
    settings = fields.settings
    attention = fields.text("attn_implementation", of="attention")
    init = fields.value("model_init_kwargs")
    if attention is None and isinstance(init, dict):
        attention = init.get("attn_implementation")
    settings.raw["attention"] = attention
    if is_trl and settings.packing:
        settings.packs_apart = "flash" in str(attention) and settings.raw.get("packing_strategy") != "wrapped"


def _trl(fields: Fields) -> None:
    settings = fields.settings
    settings.packing = bool(fields.flag("packing", of="packing"))
    settings.raw["packing_strategy"] = fields.text("packing_strategy")
    fields.known("padding_free")
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora")
    fields.known(*names)
    if fields.flag("use_peft"):
        dropout = fields.number("lora_dropout")
        take_lora(
            fields,
            fields.whole("lora_r", of="lora") or 16,
            alpha=fields.number("lora_alpha") or 32,
            dropout=0.05 if dropout is None else dropout,
            targets=fields.names("lora_target_modules"),
            dora=fields.flag("use_dora"),
        )
    quantised(fields, four=fields.flag("load_in_4bit", of="quantize"), eight=fields.flag("load_in_8bit", of="quantize"))
    kind = fields.text("bnb_4bit_quant_type")
    if settings.quantize == "nf4" and kind not in (None, "nf4"):
        settings.deviate(f"{kind} is evaluated as nf4, which takes as much", fields.place("bnb_4bit_quant_type"))
    if not fields.flag("use_bnb_nested_quant"):
        plain_scales(fields, "use_bnb_nested_quant" if "use_bnb_nested_quant" in fields else "load_in_4bit")


def quantised(fields: Fields, *, four: bool | None, eight: bool | None) -> None:
    """Set the quantisation of the base weights."""
    fields.settings.quantize = "nf4" if four else "int8" if eight else None


def plain_scales(fields: Fields, key: str) -> None:
    """Note that the scales of weights in 4 bits are not quantised themselves, which is 4 bytes for 64 weights."""
    if fields.settings.quantize == "nf4":
        fields.settings.deviate(
            "scales of 4 bits are evaluated quantised, which takes 0.37 bits a weight less", fields.place(key)
        )


PEFTS_OWN = "(peft's own)"
"""A placeholder for the target modules that peft chooses where none are named."""


def take_lora(
    fields: Fields, rank: int, *, alpha: float | None, dropout: float | None, targets: list[str], dora: bool | None
) -> None:
    """Set the adapters. `all` is all linear layers, no targets leave them to peft."""
    names = [ALL_LINEAR] if targets in (["all"], [ALL_LINEAR]) else targets
    fields.settings.lora = Lora(
        rank=rank,
        alpha=float(2 * rank if alpha is None else alpha),
        dropout=dropout or 0.0,
        targets=tuple(names) or (PEFTS_OWN,),
        dora=bool(dora),
    )
