"""accelerate's configuration, version 1.15.0: how many processes there are, and DeepSpeed's JSON that it makes.

`DeepSpeedPlugin` (`utils/dataclasses.py`) makes a JSON of the section `deepspeed_config`, with sizes left to DeepSpeed.
"""

from typing import Any

from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import RequestError
from frugal.tools.check.documents import command_line
from frugal.tools.check.documents.document import Document
from frugal.tools.check.documents.document import read as read_document
from frugal.tools.check.documents.known_fields import finish
from frugal.tools.check.readers import deepspeed_json, trainer
from frugal.tools.check.settings import AUTO, Fields, Settings

_SECTION = "deepspeed_config"


def read(document: Document, settings: Settings, documents: list[Document]) -> None:
    """Add the file's settings to `settings`, and the DeepSpeed JSON that it names to `documents`.

    Raises:
        RequestError: a value is of the wrong kind, or the file that it names is not there.
    """
    fields = Fields(document, settings)
    total, nodes = fields.whole("num_processes", of="gpus"), fields.whole("num_machines") or 1
    if total is not None:
        settings.gpus, settings.nodes = max(1, total // nodes), nodes
    precision = fields.text("mixed_precision", of="precision" if settings.precision is None else None)
    if not settings.tool or settings.precision is None:
        settings.precision = {"bf16": "bf16", "fp16": "fp16"}.get(str(precision), "fp32")  # type: ignore[assignment]  # literals
    if precision == "fp8":
        settings.refuse("fp8", fields.place("mixed_precision"))
    kind = (fields.text("distributed_type") or "NO").upper()
    trainer.parallelism(fields, "parallelism_config_")
    fields.known("fsdp_config", "megatron_lm_config", "fp8_config", "use_cpu", _SECTION)
    if kind == "FSDP":
        settings.refuse(trainer.FSDP, fields.place("distributed_type"))
    elif kind == "MEGATRON_LM":
        settings.refuse("the model is split over GPUs otherwise than by ZeRO", fields.place("distributed_type"))
    elif kind == "DEEPSPEED":
        _deepspeed(document, settings, documents)
    settings.fills_auto = True
    finish(fields, "accelerate")


def _deepspeed(document: Document, settings: Settings, documents: list[Document]) -> None:
    section = Fields(document, settings, (_SECTION,))
    name = section.text("deepspeed_config_file")
    if name is not None:
        path = command_line.beside(document.path, name)
        if path is None:
            raise RequestError(
                f"`deepspeed_config_file` in {section.place('deepspeed_config_file')} is {name}, which is not there",
                hint=f"give it, too: frugal check {document.path} {name}",
            )
        documents.append(read_document(path, "deepspeed"))
        deepspeed_json.read(documents[-1], settings)
    else:
        config = _json_of(section)
        lines = {tuple(to.split(".")): document.lines.get((_SECTION, key)) for key, to in _KEYS.items()}
        lines["zero_optimization",] = document.lines.get((_SECTION,))  # for what it leaves to defaults
        known = {keys: line for keys, line in lines.items() if line is not None}
        deepspeed_json.read(Document(document.path, "deepspeed", config, known), settings)
    for key in _KEYS:
        section.known(key)
    finish(section, "accelerate", prefix="deepspeed_")


_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}


def _json_of(section: Fields) -> dict[str, Any]:
    """Return the JSON that `DeepSpeedPlugin.__post_init__` builds where no file is named."""
    stage = section.whole("zero_stage")
    clipping = section.value("gradient_clipping")
    config: dict[str, Any] = {
        "train_batch_size": AUTO,
        MICRO_BATCH: AUTO,
        "gradient_accumulation_steps": section.value("gradient_accumulation_steps") or AUTO,
        "zero_optimization": {
            "stage": 2 if stage is None else stage,
            "offload_optimizer": _place(section, "optimizer"),
            "offload_param": _place(section, "param"),
        },
    }
    return config | ({"gradient_clipping": clipping} if clipping is not None else {})


def _place(section: Fields, what: str) -> dict[str, Any]:
    device = (section.text(f"offload_{what}_device") or "none").lower()
    path = section.text(f"offload_{what}_nvme_path")
    return {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
