"""The files of one run, those that they name, and the flags, combined into one `Settings`.

accelerate's file (1.15.0) says how many processes there are. Of its section `deepspeed_config`, `DeepSpeedPlugin`
(`utils/dataclasses.py`) makes a JSON, with sizes left to DeepSpeed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import RequestError, failure
from frugal.tools.check import command_line, deepspeed_json, tools
from frugal.tools.check.document import AUTO, NAMES, Document, Settings, Tool, read


def gather(
    paths: Sequence[Path], flags: Mapping[str, Any], tool: Tool | None = None
) -> tuple[Settings, list[Document]]:
    """Return the combined settings of the files and `flags`, and the files that were read. `tool`: the tool of the
    first file, where its keys do not tell.

    Raises:
        RequestError: a file cannot be read or is of no tool that is known, or two are of the same kind.
    """
    documents = _joined(
        [each for number, path in enumerate(paths) for each in _with_files(read(path, None if number else tool))]
    )
    by_kind: dict[str, Document] = {}
    for document in documents:
        kind = document.tool if document.tool in ("deepspeed", "accelerate") else "trainer"
        if (other := by_kind.setdefault(kind, document)) is not document:
            raise RequestError(
                f"{other.path} and {document.path} are both files of {NAMES[document.tool]}",
                hint="check them one by one: of each kind a run has one",
            )
    given = [name for name in tools.FLAGS if flags.get(name) is not None]
    trainer, launcher, config = (by_kind.get(kind) for kind in ("trainer", "accelerate", "deepspeed"))
    settings = tools.read(trainer, given) if trainer else Settings(tool="accelerate" if launcher else "DeepSpeed")
    named = None if trainer is None else trainer.content.get(command_line.LAUNCHER, {}).get("config_file")
    if trainer is not None and named and launcher is None:
        settings.refuse(
            f"accelerate's `--config_file {named}` is not there; give it, too", trainer.place("config_file")
        )
    if trainer is not None and (launch := command_line.of_accelerate(trainer.content)):
        below = {} if launcher is None else launcher.content
        content = {**below, **launch, _SECTION: {**(below.get(_SECTION) or {}), **launch.get(_SECTION, {})}}
        known = {
            key: value for key, value in content.items() if value is not None
        }  # what a flag leaves unknown is dropped
        lines = {**trainer.lines, **{(_SECTION, *key): line for key, line in trainer.lines.items()}}
        launcher = Document(trainer.path, "accelerate", known, lines, launcher)
    if launcher is not None:
        documents += _of_accelerate(launcher, settings)
    if config is None and trainer is not None and settings.raw.get("deepspeed_file") is not None:
        config = _named(trainer, settings.raw["deepspeed_file"], settings)
        documents += [config] if config is not None and config.path != trainer.path else []
    if config is not None:
        if settings.deepspeed is not None:
            raise RequestError(
                f"{config.path} and {by_kind['accelerate'].path} both say how DeepSpeed is to run",
                because="accelerate takes its own configuration, and transformers refuses both together",
                hint="leave one of them out",
            )
        deepspeed_json.read(config, settings)
    for name in given:
        setattr(settings, name, flags[name])
        settings.places.pop(name, None)
    return settings, documents


def _with_files(document: Document) -> list[Document]:
    """Return a script's file of settings merged under its flags, and the launcher's own file; other files stay
    alone."""
    content = document.content
    names = (name for name in content.get(command_line.FILES, ()) if name != content.get("deepspeed"))
    path = next(filter(None, (command_line.beside(document.path, name) for name in names)), None)
    if path is not None:
        document = _over(document, read(path, document.tool if document.tool == "trl" else None))
    path = command_line.beside(document.path, content.get(command_line.LAUNCHER, {}).get("config_file"))
    return [document, *([read(path, "accelerate")] if path is not None else [])]


def _over(script: Document, under: Document) -> Document:
    """Return a script with a file of settings that it reads, of which its flags win."""
    return Document(script.path, under.tool, {**under.content, **script.content}, script.lines, under)


def _joined(documents: list[Document]) -> list[Document]:
    """Return the files of a run, of which one may be a script's settings that it knows by a name of its caller's,
    such as `$1`."""
    given = [each for each in documents if not {"deepspeed", "accelerate"} & {each.tool}]
    scripts = [each for each in given if command_line.missing(each.path, each.content)]
    others = [each for each in given if each not in scripts]
    if len(scripts) == len(others) == 1:
        return [_over(scripts[0], others[0]), *(each for each in documents if each not in given)]
    return documents


def _named(document: Document, said: Any, settings: Settings) -> Document | None:
    """Return DeepSpeed's JSON, a file that is named or a section of the trainer's own file. If it is not there, note
    that memory is not checked."""
    place = settings.places["deepspeed_file"]
    if isinstance(said, str) and said.lstrip().startswith("{"):
        with failure(f"`{place.key}` in {place} is no JSON", msgspec.DecodeError):
            said = msgspec.json.decode(said)
    if isinstance(said, dict):
        lines = {keys[1:]: line for keys, line in document.lines.items() if keys[0] == place.key and keys[1:]}
        return Document(document.path, "deepspeed", said, lines)
    path = command_line.beside(document.path, said)
    if path is not None:
        return read(path, "deepspeed")
    settings.refuse(f"`{place.key.rpartition('.')[2]}: {said}` is not there; give it, too", place)
    return None


_SECTION = "deepspeed_config"


def _of_accelerate(document: Document, settings: Settings) -> list[Document]:
    """Add the settings of accelerate's file, and return the DeepSpeed JSON that it names.

    Raises:
        RequestError: a value is of the wrong kind.
    """
    said = tools.take(document, settings, tools.table_of("accelerate"))
    if "gpus" in said:
        settings.nodes = max(1, said.get("nodes", 1))
        settings.gpus = max(1, said["gpus"] // settings.nodes)
    if str(said.get("kind")).upper() in ("NO", "FALSE"):
        settings.gpus = settings.nodes = 1  # accelerate starts one process, whatever `num_processes` is
    if settings.precision in (None, "fp32"):
        precision = said.get("mixed_precision")
        settings.precision = precision if precision in ("bf16", "fp16") else "fp32"
    settings.sequence_parallel = said.get("sequence_parallel", settings.sequence_parallel)
    settings.fills_auto = True
    tools.refuse_other_splits(settings, said)
    if str(said.get("kind")).upper() != "DEEPSPEED":
        return []
    if "deepspeed_file" in said:
        if (config := _named(document, said["deepspeed_file"], settings)) is None:
            return []
        deepspeed_json.read(config, settings)
        return [config]
    keys = ((tuple(to.split(".")), document.lines.get((_SECTION, key))) for key, to in _KEYS.items())
    lines = {to: line for to, line in keys if line is not None}
    if (_SECTION,) in document.lines:
        lines["zero_optimization",] = document.lines[_SECTION,]  # for what it leaves to defaults
    devices = {name: str(said.get(f"json_{name}", "none")).lower() for name in ("offload_optimizer", "offload_param")}
    blocks = {
        name: {"device": device, **({"nvme_path": said.get(f"json_{name}_path")} if device == "nvme" else {})}
        for name, device in devices.items()
    }
    content = {  # that `DeepSpeedPlugin.__post_init__` builds where no file is named
        **({"gradient_clipping": said["json_clipping"]} if "json_clipping" in said else {}),
        "train_batch_size": AUTO,
        MICRO_BATCH: AUTO,
        "gradient_accumulation_steps": said.get("json_steps") or AUTO,
        "zero_optimization": {"stage": said.get("json_stage", 2), **blocks},
    }
    deepspeed_json.read(Document(document.path, "deepspeed", content, lines), settings)
    return []


_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
