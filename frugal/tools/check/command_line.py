"""The command line that starts a training script, taken out of a shell script: its flags, and those of the launcher.

Read are `deepspeed`, `torchrun`, `accelerate launch`, `python` and the tools' own commands, also behind `srun`, `uv
run` and any other that starts what it names. `shell` expands the words, and runs nothing.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from frugal.errors import RequestError
from frugal.tools.check import shell

LAUNCHER, ENVIRONMENT, FILES, PROGRAM = "(launcher)", "(environment)", "(files)", "(program)"
"""Keys under which the launcher's flags, the variables, the files that the training script reads and its name stand,
beside its flags."""

_STARTS = ("deepspeed", "torchrun", "accelerate", "python", "trl", "axolotl", "llamafactory-cli", "swift", "megatron")
_PRINTS = ("echo", "printf", "cat", "logger")
"""Commands that start nothing of what they name."""

_MODULES = ("-m", "--module")
_LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")
_TRAINS = re.compile(r"\.py\b|\s(-m|--module|launch|train|sft|pt|rlhf)\s|\.ya?ml\b")
"""Words of a command that starts a script, unlike those of one that installs or looks for what has its name."""
_BATCH = re.compile(r"--(per[_-](device|gpu)[_-]train|micro|train)[_-]batch[_-]size\b")
_MANY_FLAGS = 5
"""A command with fewer flags prepares something, if a later one has as many."""

_OF_DEEPSPEED = {
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping",
}  # fmt: skip
_KINDS = {
    "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU",
    "cpu": "MULTI_CPU",
}  # fmt: skip
_OF_LAUNCHERS = {
    "num_gpus", "num_nodes", "include", "hostfile", "nproc_per_node", "nnodes", "num_processes", "num_machines",
    "config_file", "mixed_precision", *_OF_DEEPSPEED, *_KINDS,
}  # fmt: skip
"""Flags of launchers that say how many processes there are, and how accelerate is to train; the others concern no
memory."""


def parsed_script(path: Path, text: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Return the flags by name, with `_` for `-`, and the line of each flag.

    A flag without a value is true, one with several is a list. Files that the training script reads itself
    (`train.py config.yaml`) are listed under `FILES`.

    Raises:
        RequestError: no command that starts a training script is in it.
    """
    variables: shell.Variables = {}
    started: list[tuple[list[str], dict[str, str]]] = []
    for words in shell.commands(text, variables):
        if "--" in words:
            rest = words[words.index("--") + 1 :]
            rest = rest[rest.index("&&") + 1 :] if "&&" in rest else rest
            words = rest if _first(rest) < len(rest) else words
        first = _first(words)
        if first < len(words) and not {"-c", "pip", "venv"} & {*words[first : first + 3]}:
            known = {name: value[0] for name, value in variables.items() if len(value) == 1}
            of_srun = _named(words[:first]) if "srun" in words[:first] else {}
            known |= {name: str(of_srun[flag]) for flag, name in _OF_SRUN.items() if type(of_srun.get(flag)) is int}
            started.append((words[first:], known))
    if started:
        # from what prepares, merges or evaluates, a training is known by its batch, a file of settings, or many flags
        return _flags(*max(started, key=lambda each: (
            any(map(_BATCH.match, each[0])),
            Path(each[0][0]).name != "python" and each[0][-1].endswith((".yaml", ".yml")),
            sum(word.startswith("--") for word in each[0]) >= _MANY_FLAGS,
        )), text)  # fmt: skip
    raise RequestError(
        f"{path} starts no training script",
        because=f"none of its commands is {', '.join(_STARTS)}",
        hint=f"`frugal dryrun {path}` predicts the memory of a training loop in Python"
        if path.suffix == ".py"
        else "give a .json or .yaml file, or a script with the command line of the training",
    )


def _first(words: Sequence[str]) -> int:
    """Return the index of the word that starts a script, behind what starts it; the number of words if none does."""
    names = [
        "python" if word[:1] == "$" and after.endswith(".py") else re.sub(r"^(python)[\d.]+$", r"\1", Path(word).name)
        for word, after in pairwise((*words, ""))
    ]
    first = next((i for i, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    if names[first:] and names[first] not in (*_STARTS, *_PRINTS):  # of srun, uv run, timeout, a function's "$@"
        later = range(first + 1, len(words))
        return next((i for i in later if names[i] in _STARTS and _TRAINS.search(" ".join(words[i:]))), len(words))
    return first if names[first:] and names[first] in _STARTS else len(words)


def _program(words: Sequence[str]) -> int:
    """Return the index of the training script, of the module behind `-m`, or of a tool's own command."""
    module = next((i + 1 for i, word in enumerate(words[:-1]) if word in _MODULES), None)
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    if module is not None and module < script and words[module] not in _LAUNCHING_MODULES:
        return module
    if script < len(words):
        return script
    return next((i for i, word in enumerate(words[1:], 1) if not word.startswith("-")), len(words) - 1)


def _flags(words: Sequence[str], variables: dict[str, str], text: str) -> tuple[dict[str, Any], Any]:
    """Return the flags of the command (the launcher's stand before the script's name) and their lines."""
    start = _program(words)
    content = _named(words[start + 1 :])
    content[PROGRAM] = (
        "/".join((Path(words[0]).name, words[start])) if words[0] in ("trl", "swift", "megatron") else words[start]
    )
    launcher = [word for word in words[1:start] if word not in _MODULES]
    content[LAUNCHER] = {name: value for name, value in _named(launcher).items() if name in _OF_LAUNCHERS}
    content[ENVIRONMENT] = {name: value for name, value in variables.items() if name.isupper()}
    lines: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for flag in re.findall(r"--([\w-]+)", line):
            lines.setdefault((flag.replace("-", "_"),), number)
    config = content.get("config")
    config = config[0] if isinstance(config, list) else config
    if isinstance(config, str):  # `--config FILE` of TRL's scripts
        content[FILES] = [*content[FILES], config]
    return content, lines


def _named(words: Sequence[str]) -> dict[str, Any]:
    """Return flags with their values parsed as YAML, and under `FILES` those that are given without a flag."""
    flags: dict[str, list[str]] = {}
    files: list[str] = []
    values = None
    for word in words:
        if word.startswith("--"):
            name, is_given, value = word.removeprefix("--").partition("=")
            flags[name.replace("-", "_")] = values = [value] if is_given else []
            values = None if is_given else values
        elif values is not None:
            values.append(word)
        elif word.endswith((".yaml", ".yml", ".json")) and "=" not in word:
            files.append(word)
    of_caller = not (flags or files) and all("$" in word and "=" not in word for word in words)
    content: dict[str, Any] = {FILES: list(words) if of_caller else files}
    for name, given in flags.items():
        read = [_value(word) for word in given] or [True]
        content[name] = read[0] if len(read) == 1 else read
    return content


def _value(word: str) -> Any:
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    return word if value is None and word.lower() not in ("null", "~") else value


_OF_SRUN = {"nodes": "SLURM_NNODES", "ntasks": "SLURM_NTASKS", "ntasks_per_node": "SLURM_NTASKS_PER_NODE"}
"""Flags of srun, and the variables in which its tasks find them."""


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
    tasks = {name: int(value) for name, value in variables.items() if name in _OF_SRUN.values() and value.isdecimal()}
    if ranks is None and not launcher and tasks:
        nodes = tasks.get("SLURM_NNODES") or 1
        each = tasks.get("SLURM_NTASKS_PER_NODE", tasks.get("SLURM_NTASKS", 0) // nodes)
        ranks = each if each > 1 else None  # a single task may start more processes itself
    if ranks is None and visible and "$" not in visible:
        ranks = visible.count(",") + 1
    return ranks, nodes


def of_accelerate(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of `accelerate launch` as they stand in its file; empty if there are none. A value that is not
    known is None."""
    said = {name: None if "$" in str(value) else value for name, value in content.get(LAUNCHER, {}).items()}
    kind = next(({"distributed_type": kind} for name, kind in _KINDS.items() if said.get(name)), {})
    same = {name: said[name] for name in ("num_processes", "num_machines", "mixed_precision") if name in said}
    deepspeeds = {name: said[name] for name in _OF_DEEPSPEED & said.keys()}
    return {**same, **kind, **({"deepspeed_config": deepspeeds} if deepspeeds else {})}


def expandable_segments(content: Mapping[str, Any]) -> bool | None:
    """Return the setting of expandable segments for torch's allocator; None if the script has none."""
    variables = content.get(ENVIRONMENT, {})
    said = variables.get("PYTORCH_CUDA_ALLOC_CONF", variables.get("PYTORCH_ALLOC_CONF"))
    return None if said is None else "expandable_segments:True" in said


def missing(path: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the names of files with settings that a script reads, and that are not there; none if it has one."""
    names = content.get(FILES, ())
    return [] if any(beside(path, name) for name in names) else list(dict.fromkeys(names))


def beside(path: Path, name: Any) -> Path | None:
    """Return the file that `path` names, relative to the working directory or to `path` itself; None if there is
    none."""
    if not isinstance(name, str | os.PathLike):
        return None
    places = (Path(os.path.normpath(each)) for each in (Path(name), path.parent / name))
    return next((each for each in places if each.is_file()), None)
