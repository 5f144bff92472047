"""axolotl's YAML, version 0.19.0: transformers' Trainer with names and defaults of its own."""

from typing import Any

from frugal.tools.check.documents import command_line
from frugal.tools.check.documents.document import Document
from frugal.tools.check.documents.known_fields import finish
from frugal.tools.check.readers import optimizers, trainer
from frugal.tools.check.settings import Fields, Settings

LENGTH, MICRO_BATCH, OPTIMIZER = 512, 1, "adamw_torch_fused"

_KEEP_DOCUMENTS_APART = ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "sage_attention")
_FUSED_LOSSES = ("CutCrossEntropyPlugin", "LigerPlugin")


def read(document: Document) -> Settings:
    """Return the settings in the YAML.

    Raises:
        RequestError: a value is of the wrong kind.
    """
    settings = Settings(tool="axolotl", fills_auto=True)
    settings.gpus, settings.nodes = command_line.num_processes(document.content)
    fields = Fields(document, settings)
    settings.model = fields.text("base_model", of="model")
    settings.seq_len = fields.whole("sequence_len", of="seq_len") or LENGTH
    settings.micro_batch = fields.whole("micro_batch_size", of="micro_batch") or MICRO_BATCH
    steps = fields.whole("gradient_accumulation_steps", of="accumulation_steps")
    of_node = fields.whole("batch_size", of="accumulation_steps" if steps is None else None)
    settings.accumulation_steps = steps or (of_node // settings.micro_batch if of_node else 1)
    settings.precision = _precision(fields)
    settings.learning_rate = fields.number("learning_rate", of="learning_rate") or trainer.LEARNING_RATE
    settings.weight_decay = fields.number("weight_decay") or 0.0
    clipping = fields.number("max_grad_norm")
    settings.gradient_clipping = 1.0 if clipping is None else clipping
    optimizers.take(settings, fields.text("optimizer", of="optimizer") or OPTIMIZER, settings.place("optimizer"))
    settings.raw["auto_find_batch_size"] = fields.flag("auto_find_batch_size", of="auto_find_batch_size")
    settings.raw["deepspeed"] = fields.value("deepspeed", of="deepspeed")
    _checkpointing(fields)
    _adapters(fields)
    _loss(fields)
    _packing(fields)
    _long_samples(fields)
    _refusals(fields)
    finish(fields, "axolotl")
    return settings


def _precision(fields: Fields) -> Any:
    if fields.flag("fp16", "float16", of="precision"):
        return "fp16"
    said = fields.value("bf16", "bfloat16", of="precision")
    if said == "full":
        fields.settings.deviate("`bf16: full` keeps no fp32 weights where DeepSpeed is not used", fields.place("bf16"))
    fields.known("float32")
    return "fp32" if said is False or str(said).lower() == "false" else "bf16"  # auto: where the card has it


def _checkpointing(fields: Fields) -> None:
    settings = fields.settings
    said = fields.value("gradient_checkpointing", of="activation_checkpointing")
    settings.activation_checkpointing = said not in (None, False, "false")
    if said in ("offload", "offload_disk", "unsloth"):
        settings.deviate(
            f"`gradient_checkpointing: {said}` is evaluated with layers' inputs on the GPU",
            fields.place("gradient_checkpointing"),
        )
    more = fields.value("gradient_checkpointing_kwargs", of="use_reentrant")
    if isinstance(more, dict) and "use_reentrant" in more:
        settings.use_reentrant = bool(more["use_reentrant"])


def _adapters(fields: Fields) -> None:
    settings = fields.settings
    kind = fields.text("adapter", of="lora")
    trainer.quantised(
        fields, four=fields.flag("load_in_4bit", of="quantize"), eight=fields.flag("load_in_8bit", of="quantize")
    )
    fields.known(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "peft_use_dora", "peft"
    )
    if kind is None:
        return
    if kind not in ("lora", "qlora"):
        settings.refuse(f"the adapter {kind} is not one that frugal trains", fields.place("adapter"))
        return
    if kind == "qlora" and settings.quantize is None:
        settings.quantize = "nf4"
    targets = ["all"] if fields.flag("lora_target_linear") else fields.names("lora_target_modules")
    trainer.take_lora(
        fields,
        fields.whole("lora_r", of="lora") or 8,
        alpha=fields.number("lora_alpha"),
        dropout=fields.number("lora_dropout"),
        targets=targets,
        dora=fields.flag("peft_use_dora"),
    )


def _loss(fields: Fields) -> None:
    settings = fields.settings
    plugins = [str(name).rpartition(".")[2] for name in fields.names("plugins", of="tiled_loss")]
    liger = fields.flag("liger_fused_linear_cross_entropy")
    fields.known("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_cross_entropy")
    cut = fields.flag("cut_cross_entropy")
    takes = ("CutCrossEntropyPlugin" in plugins and cut is not False) or ("LigerPlugin" in plugins and bool(liger))
    settings.tiled_loss = takes or bool(fields.flag("chunked_cross_entropy"))
    fields.known("chunked_cross_entropy_num_chunks")
    if settings.tiled_loss:
        settings.deviate("the fused loss is evaluated as frugal's tiled loss", settings.place("tiled_loss"))
    for name in plugins:
        if name not in _FUSED_LOSSES:
            settings.deviate(f"the plugin {name} is not followed", fields.place("plugins"))


def _packing(fields: Fields) -> None:
    settings = fields.settings
    settings.packing = bool(fields.flag("sample_packing", of="packing"))
    attention = fields.text("attn_implementation")
    settings.packs_apart = any(map(fields.flag, _KEEP_DOCUMENTS_APART)) or attention not in (None, "eager")
    if settings.packing and settings.micro_batch != 1:
        settings.deviate(
            f"a micro-batch of packed samples is one row of {settings.micro_batch} x sequence_len tokens in "
            "axolotl; it is evaluated as that many rows, which take the same memory except for attention",
            settings.place("packing"),
        )


def _long_samples(fields: Fields) -> None:
    """Read how many GPUs share samples, under the new name or the old one, and whether MLPs are tiled."""
    settings = fields.settings
    shared_by = fields.whole("context_parallel_size", "sequence_parallel_degree", of="sequence_parallel") or 1
    settings.sequence_parallel = shared_by
    fields.known("sequence_parallel_degree", "heads_k_stride", "ring_attn_func")
    if shared_by > 1:
        settings.deviate(
            "the attention of shared samples is evaluated with all-to-alls, as in DeepSpeed-Ulysses; axolotl's passes "
            "keys and values around a ring, in buffers of other sizes",
            settings.place("sequence_parallel"),
        )
    settings.tiled_mlp = bool(fields.flag("tiled_mlp", of="tiled_mlp"))
    fields.known("tiled_mlp_num_shards", "tiled_mlp_use_original_mlp")
    if settings.tiled_mlp:
        settings.deviate("the tiled MLP is evaluated as frugal's, whose slices may be of other sizes",
                         settings.place("tiled_mlp"))  # fmt: skip


def _refusals(fields: Fields) -> None:
    settings = fields.settings
    fields.known("fsdp_version", "fsdp_final_state_dict_type")
    if fields.value("fsdp", "fsdp_config"):
        settings.refuse(trainer.FSDP, fields.place("fsdp_config" if "fsdp_config" in fields else "fsdp"))
    for key in ("tensor_parallel_size", "dp_shard_size"):
        if (fields.whole(key) or 1) > 1:
            settings.refuse(f"`{key}` splits the model or its samples otherwise than ZeRO", fields.place(key))
    for key, what in (("rl", "trains against a reference model or rewards"), ("reward_model", "trains a reward model")):
        if fields.value(key):
            settings.refuse(f"`{key}` {what}, of which frugal has no dry run", fields.place(key))
    fields.known("trl")
