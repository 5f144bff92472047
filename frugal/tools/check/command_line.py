"""The command line that starts a training script, taken out of a shell script: its flags, and those of the launcher.

Read are `deepspeed`, `torchrun`, `accelerate launch` and `python`, with lines continued by a backslash, and variables
that the script sets itself. Nothing is run: values that a shell would compute (`$(nvidia-smi ...)`) are unknown.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from frugal.errors import RequestError

LAUNCHER, ENVIRONMENT, FILES, PROGRAM = "(launcher)", "(environment)", "(files)", "(program)"
"""Keys under which the launcher's flags, the variables, the files that the training script reads and its name stand,
beside its flags."""

_STARTS = ("deepspeed", "torchrun", "accelerate", "python", "python3", "trl", "axolotl", "llamafactory-cli")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\S*|\"[^\"]*\"|'[^']*')\s*$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)")
_OF_LAUNCHERS = {
    "num_gpus", "num_nodes", "include", "hostfile", "nproc_per_node", "nnodes", "num_processes", "num_machines",
    "config_file",
}  # fmt: skip
"""Flags of launchers that say how many processes there are; the others concern no memory."""


def parsed_script(path: Path, text: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the flags by name, with `_` for `-`, and the line of each flag.

    A flag without a value is true, one with several is a list. Files that the training script reads itself
    (`train.py config.yaml`) are listed under `FILES`.

    Raises:
        RequestError: no command that starts a training script is in it.
    """
    variables: dict[str, str] = {}
    for line in _commands(text):
        assignment = _ASSIGNMENT.fullmatch(line.strip())
        if assignment:
            variables[assignment[1]] = _expanded(assignment[2].strip("\"'"), variables)
            continue
        words = _words(_expanded(line, variables))
        own = dict(map(_pair, words[: _first(words)]))
        words = words[_first(words) :]
        if words and Path(words[0]).name in _STARTS:
            return _flags(words, variables | own, text)
    raise RequestError(
        f"{path} starts no training script",
        because=f"no line of it begins with {', '.join(_STARTS)}",
        hint="give a .json or .yaml file, or a script with the command line of the training",
    )


def _commands(text: str) -> Iterator[str]:
    """Yield the lines without comments; lines that a backslash continues are joined."""
    joined = re.sub(r"\\\s*(\n|$)", " ", re.sub(r"(?m)^\s*#.*$", "", text))
    return (line for line in joined.splitlines() if line.strip())


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or match[0]), text)


def _words(line: str) -> list[str]:
    """Return the words of a line; none of a text over several lines, which starts nothing."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def _first(words: Sequence[str]) -> int:
    """Return the index of the first word that is not an assignment of a variable."""
    return next((i for i, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _flags(words: Sequence[str], variables: dict[str, str], text: str) -> tuple[dict[str, Any], Any]:
    """Return the flags of the command (the launcher's stand before the script's name) and their lines."""
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if start is None:  # `trl sft ...`, `llamafactory-cli train FILE`, `python -m package`
        start = next((i for i, word in enumerate(words[1:], 1) if not word.startswith("-")), len(words) - 1)
    content = dict(_named(words[start + 1 :]))
    content[PROGRAM] = "/".join((Path(words[0]).name, words[start])) if words[0] == "trl" else words[start]
    content[LAUNCHER] = {name: value for name, value in _named(words[1:start]) if name in _OF_LAUNCHERS}
    content[ENVIRONMENT] = {name: value for name, value in variables.items() if name.isupper()}
    numbered = list(enumerate(text.splitlines(), 1))
    lines = {
        (name,): next(number for number, line in numbered if _is_named(name, line))
        for name in content
        if any(_is_named(name, line) for _, line in numbered)
    }
    config = content.get("config")
    if isinstance(config, str):  # `--config FILE` of TRL's scripts
        content[FILES] = [*content[FILES], config]
    return content, lines


def _is_named(flag: str, line: str) -> bool:
    return bool(re.search(rf"--{re.escape(flag).replace('_', '[-_]')}\b", line))


def _named(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield flags with their values parsed as YAML, and finally the files that are given without a flag."""
    files, i = [], 0
    while i < len(words):
        if not words[i].startswith("--"):
            if words[i].endswith((".yaml", ".yml", ".json")):
                files.append(words[i])
            i += 1
            continue
        name, is_given, value = words[i].removeprefix("--").partition("=")
        values = [value] if is_given else []
        i += 1
        while not is_given and i < len(words) and not words[i].startswith("--"):
            values.append(words[i])
            i += 1
        read = [_value(word) for word in values]
        yield name.replace("-", "_"), True if not read else read[0] if len(read) == 1 else read
    yield FILES, files


def _value(word: str) -> Any:
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    return word if value is None and word.lower() not in ("null", "~") else value


def num_processes(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return processes per node and nodes from the launcher's flags or `CUDA_VISIBLE_DEVICES`; None if not given."""
    launcher, variables = content.get(LAUNCHER, {}), content.get(ENVIRONMENT, {})
    said = {name: value for name, value in launcher.items() if type(value) is int}
    nodes = said.get("num_nodes", said.get("nnodes", said.get("num_machines")))
    ranks = said.get("num_gpus", said.get("nproc_per_node"))
    if ranks is None and "num_processes" in said:
        ranks = said["num_processes"] // (nodes or 1)
    included, visible = str(launcher.get("include", "")), variables.get("CUDA_VISIBLE_DEVICES", "")
    if ranks is None and included and "@" not in included:
        ranks = included.partition(":")[2].count(",") + 1
    if ranks is None and visible and "$" not in visible:
        ranks = visible.count(",") + 1
    return ranks, nodes


def expandable_segments(content: Mapping[str, Any]) -> bool | None:
    """Return the setting of expandable segments for torch's allocator; None if the script has none."""
    variables = content.get(ENVIRONMENT, {})
    said = variables.get("PYTORCH_CUDA_ALLOC_CONF", variables.get("PYTORCH_ALLOC_CONF"))
    return None if said is None else "expandable_segments:True" in said


def beside(path: Path, name: Any) -> Path | None:
    """Return the file that `path` names, relative to the working directory or to `path` itself; None if there is
    none."""
    if not isinstance(name, str | os.PathLike):
        return None
    places = (Path(os.path.normpath(each)) for each in (Path(name), path.parent / name))
    return next((each for each in places if each.is_file()), None)
