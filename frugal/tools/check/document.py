"""A file of another trainer: its values, the line of each, and which tool reads it.

JSON and YAML are read as they are. Any other file is taken for a shell script with the command that starts a training
script: its flags are the values, and the launcher's flags stand under `launcher`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from frugal import files
from frugal.deepspeed_adapter.json_config import MICRO_BATCH
from frugal.errors import RequestError
from frugal.tools.check.command_line import FILES, PROGRAM, parsed_script

Tool = Literal["deepspeed", "transformers", "trl", "axolotl", "llama-factory", "accelerate"]

NAMES: dict[Tool, str] = {
    "deepspeed": "DeepSpeed",
    "transformers": "transformers' Trainer",
    "trl": "TRL",
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "accelerate": "accelerate",
}

_MARKS: Mapping[Tool, str] = {
    "deepspeed": f"zero_optimization train_batch_size {MICRO_BATCH}",
    "accelerate": "compute_environment distributed_type deepspeed_config machine_rank",
    "axolotl": "base_model sequence_len",
    "llama-factory": "finetuning_type infer_backend export_dir",
    "trl": "use_peft packing packing_strategy completion_only_loss assistant_only_loss dataset_text_field "
    "use_bnb_nested_quant dataset_num_proc dataset_train_split dataset_test_split dataset_kwargs dataset_mixture "
    "dataset_prompt_column max_prompt_length max_completion_length num_generations reward_funcs",
    "transformers": "per_device_train_batch_size per_gpu_train_batch_size model_name_or_path parallelism_config",
}
"""Keys that only files of one tool have, asked in this order: TRL and LLaMA-Factory have Trainer's keys, too."""


@dataclass(frozen=True)
class Place:
    """The place of a value in a file. `line` counts from 1; None where it is not known."""

    path: Path
    key: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line is not None else str(self.path)


@dataclass(frozen=True)
class Document:
    """One file. `lines` has the line of each key, by its path from the top.

    `under`: a file whose values count where this one says nothing; they are in `content`, too.
    """

    path: Path
    tool: Tool
    content: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    under: "Document | None" = None

    def place(self, *keys: str) -> Place:
        """Return the place of a key, or of the innermost mapping around it that has a line."""
        line = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        if line is None and self.under is not None:
            return self.under.place(*keys)
        return Place(self.path, ".".join(keys), line)


def read(path: Path, tool: Tool | None = None) -> Document:
    """Read the file at `path`. `tool`: the tool it belongs to, where another file has said so.

    Raises:
        RequestError: it cannot be read, its content does not match its name, or no tool has such keys.
    """
    try:
        text = files.without_bom(files.read_regular(path)).decode()
    except OSError as error:
        raise RequestError(f"cannot read {path}", because=str(error.strerror)) from None
    except ValueError as error:
        raise RequestError(f"{path} is not text", because=str(error)) from None
    is_yaml = path.suffix in (".yaml", ".yml")
    if not is_yaml and path.suffix != ".json" and tool != "deepspeed":
        return _script(path, text, tool)
    try:
        content = yaml.safe_load(text) if is_yaml else json.loads(text, object_pairs_hook=_without_duplicates)
    except RequestError as error:
        raise RequestError(f"{path}: {error.what}", because=error.because) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "YAML" if is_yaml else "JSON"
        raise RequestError(f"{path} is not {kind}", because=" ".join(str(error).split())) from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} holds no settings", because=f"it is a {type(content).__name__}, not a mapping")
    content = {str(key): value for key, value in content.items()}
    if tool is None and _OF_SWIFT & content.keys():
        raise _not_swift(path, "is a file of")
    return Document(path, tool or _tool_of(path, content.keys()), content, dict(_lines(text)))


_OF_SWIFT = {"tuner_type", "train_type", "rlhf_type", "split_dataset_ratio"}


def _not_swift(path: Path, is_what: str) -> RequestError:
    return RequestError(
        f"{path} {is_what} ms-swift, whose arguments frugal does not read",
        because="it has defaults of its own, and builds what it trains of names such as `tuner_type` and `zero3`",
        hint="plan the same with frugal: frugal plan --model NAME --global-batch N --seq-len N --lora r=N",
    )


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary, refusing duplicates as DeepSpeed does (`dict_raise_error_on_duplicate_keys`)."""
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise RequestError(f"`{twice[0]}` is given twice", because="DeepSpeed refuses that, other tools take the last")
    return dict(pairs)


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the line of each key. JSON is parsed as YAML, once tabs are replaced."""
    try:
        root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*path, str(key.value))
                yield inner, key.start_mark.line + 1
                waiting.append((inner, value))


def _tool_of(path: Path, keys: Iterable[str], tools: Iterable[Tool] = tuple(NAMES)) -> Tool:
    for tool in _MARKS:
        if tool in tools and not set(_MARKS[tool].split()).isdisjoint(keys):
            return tool
    raise RequestError(
        f"{path} is no configuration that frugal knows",
        because=f"it has no key by which a file of {', '.join(NAMES.values())} is recognised",
        hint="give the file, or the script, that starts the training",
    )


_OF_SCRIPTS: tuple[Tool, ...] = ("llama-factory", "transformers")
"""Tools whose scripts' flags tell; TRL's scripts are known by their names."""


def _script(path: Path, text: str, tool: Tool | None) -> Document:
    content, lines = parsed_script(path, text)
    program = f"/{content[PROGRAM]}"
    if program.startswith(("/swift/", "/megatron/")) or "/swift/cli/" in program:
        raise _not_swift(path, "starts")
    if tool is None and ("/trl/" in program or Path(program).name.startswith("sft")):
        tool = "trl"
    if tool is None and content[FILES]:
        tool = "transformers"
    return Document(path, tool or _tool_of(path, content, _OF_SCRIPTS), content, lines)
