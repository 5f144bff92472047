"""LLaMA-Factory's YAML, version 0.9.5: TrainingArguments with fields for data, model and method."""

from frugal.tools.check.documents import command_line
from frugal.tools.check.documents.document import Document
from frugal.tools.check.documents.known_fields import finish
from frugal.tools.check.readers import trainer
from frugal.tools.check.settings import Fields, Settings

LENGTH, RANK = 2048, 8

_METHODS = (
    "use_galore",
    "use_apollo",
    "use_badam",
    "use_adam_mini",
    "use_muon",
    "use_llama_pro",
    "use_mca",
    "fp8",
    "mixture_of_depths",
)
"""Methods with other training or other states than frugal's."""


def read(document: Document) -> Settings:
    """Return the settings in the YAML.

    Raises:
        RequestError: a value is of the wrong kind.
    """
    settings = Settings(tool="LLaMA-Factory", fills_auto=True)
    settings.gpus, settings.nodes = command_line.num_processes(document.content)
    fields = Fields(document, settings)
    settings.model = fields.text("model_name_or_path", of="model")
    settings.seq_len = fields.whole("cutoff_len", of="seq_len") or LENGTH
    trainer.arguments(fields)
    if fields.flag("pure_bf16", of="precision"):
        settings.precision = "bf16"
        settings.deviate(
            "`pure_bf16` is evaluated with fp32 master weights, as DeepSpeed keeps them", fields.place("pure_bf16")
        )
    settings.activation_checkpointing = not fields.flag("disable_gradient_checkpointing", of="activation_checkpointing")
    fields.known("use_reentrant_gc")  # LLaMA-Factory has the inputs ask for gradients itself
    if fields.flag("enable_liger_kernel", of="tiled_loss"):
        settings.tiled_loss = True
        settings.deviate(trainer.LIGER, settings.place("tiled_loss"))
    _method(fields)
    _packing(fields)
    finish(fields, "transformers", "llama-factory")
    return settings


def _method(fields: Fields) -> None:
    settings = fields.settings
    stage, kind = fields.text("stage") or "sft", fields.text("finetuning_type", of="lora") or "lora"
    if stage not in ("sft", "pt"):
        settings.refuse(
            f"`stage: {stage}` trains against a reference or rewards, of which frugal has no dry run",
            fields.place("stage"),
        )
    for key in _METHODS:
        if fields.value(key) not in (None, False):
            settings.refuse(f"`{key}` trains otherwise than frugal does", fields.place(key))
    fields.known("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora")
    if kind == "lora":
        trainer.take_lora(
            fields,
            fields.whole("lora_rank", of="lora") or RANK,
            alpha=fields.number("lora_alpha"),
            dropout=fields.number("lora_dropout"),
            targets=fields.names("lora_target") or ["all"],
            dora=fields.flag("use_dora"),
        )
    elif kind != "full":
        settings.refuse(
            f"`finetuning_type: {kind}` trains some of the parameters only", fields.place("finetuning_type")
        )
    bits = fields.whole("quantization_bit", of="quantize")
    trainer.quantised(fields, four=bits == 4, eight=bits == 8)
    if fields.text("quantization_type") == "fp4":
        settings.deviate("fp4 is evaluated as nf4, which takes as much", fields.place("quantization_type"))
    if fields.flag("double_quantization") is False:
        trainer.plain_scales(fields, "double_quantization")
    library = fields.text("quantization_method")
    if settings.quantize is not None and library not in (None, "bitsandbytes", "bnb"):
        settings.refuse(f"weights that {library} quantises", fields.place("quantization_method"))
    if bits not in (None, 4, 8):
        settings.refuse(f"weights of {bits} bits", fields.place("quantization_bit"))


def _packing(fields: Fields) -> None:
    settings = fields.settings
    neat = bool(fields.flag("neat_packing", of="packing"))
    settings.packing = neat or bool(fields.flag("packing", of="packing")) or fields.text("stage") == "pt"
    settings.packs_apart = neat or fields.text("stage") == "pt"
