"""The named files, the files that these name, and the flags, combined into one `Settings`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from frugal.errors import RequestError
from frugal.tools.check.documents import command_line
from frugal.tools.check.documents.document import NAMES, Document, Tool, read
from frugal.tools.check.readers import accelerate, axolotl, deepspeed_json, llama_factory, trainer
from frugal.tools.check.settings import Settings

FLAGS = ("model", "task", "seq_len", "micro_batch", "accumulation_steps", "precision", "lora", "expandable_segments")
"""Settings of frugal's own that a command may give, for what the files leave open; they win over the files."""


def gather(
    paths: Sequence[Path], flags: Mapping[str, Any], tool: Tool | None = None
) -> tuple[Settings, list[Document]]:
    """Return the combined settings of the files and `flags`, and the files that were read. `tool`: the tool of the
    first file, where its keys do not tell.

    Raises:
        RequestError: a file cannot be read or is of no tool that is known, two are of the same kind, or one that they
            name is not there.
    """
    given = [
        document
        for number, path in enumerate(paths)
        for document in _with_files(read(path, tool if number == 0 else None))
    ]
    trainers = [document for document in given if document.tool not in ("deepspeed", "accelerate")]
    launchers = [document for document in given if document.tool == "accelerate"]
    jsons = [document for document in given if document.tool == "deepspeed"]
    for group in (trainers, launchers, jsons):
        if len(group) > 1:
            raise RequestError(
                f"{group[0].path} and {group[1].path} are both files of {NAMES[group[1].tool]}",
                hint="check them one by one: of each kind a run has one",
            )
    settings = _of_trainer(trainers[0]) if trainers else Settings(tool="accelerate" if launchers else "DeepSpeed")
    documents = list(given)
    for launcher in launchers:
        accelerate.read(launcher, settings, documents)
    config = _deepspeed(settings, trainers, jsons, documents)
    if config is not None:
        if settings.deepspeed is not None:
            raise RequestError(
                f"{config.path} and {launchers[0].path} both say how DeepSpeed is to run",
                because="accelerate takes its own configuration, and transformers refuses both together",
                hint="leave one of them out",
            )
        deepspeed_json.read(config, settings)
    for name in FLAGS:
        if flags.get(name) is not None:
            setattr(settings, name, flags[name])
            settings.places.pop(name, None)
    return settings, documents


def _with_files(document: Document) -> list[Document]:
    """Return a script's file of settings merged under its flags, and the launcher's own file; other files stay
    alone."""
    documents = []
    for name in document.content.get(command_line.FILES, ()):
        path = command_line.beside(document.path, name)
        if path is not None and name != document.content.get("deepspeed"):
            document = document.over(read(path, document.tool if document.tool == "trl" else None))
            break
    documents.append(document)
    launcher = document.content.get(command_line.LAUNCHER, {})
    path = command_line.beside(document.path, launcher.get("config_file"))
    if path is not None:
        documents.append(read(path, "accelerate"))
    return documents


def _of_trainer(document: Document) -> Settings:
    if document.tool == "axolotl":
        return axolotl.read(document)
    if document.tool == "llama-factory":
        return llama_factory.read(document)
    return trainer.read(document, document.tool)


def _deepspeed(
    settings: Settings, trainers: Sequence[Document], jsons: Sequence[Document], documents: list[Document]
) -> Document | None:
    """Return DeepSpeed's JSON: a file that was given, one that the trainer names, or a section of the trainer's
    file."""
    if jsons:
        return jsons[0]
    said = settings.raw.get("deepspeed")
    if said is None or not trainers:
        return None
    place = settings.places["deepspeed"]
    if isinstance(said, str) and said.lstrip().startswith("{"):
        try:
            said = msgspec.json.decode(said)
        except msgspec.DecodeError as error:
            raise RequestError(f"`deepspeed` in {place} is no JSON", because=str(error)) from None
    if isinstance(said, dict):
        lines = {keys[1:]: line for keys, line in trainers[0].lines.items() if keys[0] == "deepspeed" and keys[1:]}
        return Document(trainers[0].path, "deepspeed", said, lines)
    path = command_line.beside(trainers[0].path, said)
    if path is None:
        raise RequestError(
            f"`deepspeed` in {place} is {said}, which is not there",
            because="it is looked for from here, and beside the file",
            hint=f"give it, too: frugal check {trainers[0].path} {said}",
        )
    documents.append(read(path, "deepspeed"))
    return documents[-1]
