"""The trainers that pass settings on to transformers' Trainer: one table of their fields, and one reader.

`tools.toml` has the fields and the defaults of each tool. What is here is what a table cannot say.
"""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from importlib.resources import files
from typing import Any

import msgspec

from frugal.config.adapters import ALL_LINEAR, Lora
from frugal.config.optimizers import Optimizer
from frugal.config.request import Precision
from frugal.errors import RequestError, refuse
from frugal.tools.check import command_line
from frugal.tools.check.document import MAY_DECIDE_MEMORY, NAMES, Document, Place, Settings, Tool

FLAGS = ("model", "task", "seq_len", "micro_batch", "accumulation_steps", "precision", "lora")
"""Settings of frugal's own that a command may give, for what the files leave open; they win over the files."""

PEFTS_OWN = "(peft's own)"
"""A placeholder for the target modules that peft chooses where none are named."""


@cache
def tables() -> Mapping[str, Any]:
    """Return `tools.toml`."""
    return tomllib.loads(files("frugal.tools.check").joinpath("tools.toml").read_text())


def table_of(tool: Tool) -> Mapping[str, Any]:
    """Return the section of a tool in `tools.toml`, added to that of the tool it is `under`."""
    table = tables()[tool]
    if "under" in table:
        under = tables()[table["under"]]
        sections = {*under, *table} - {"under", "no_effect"}
        no_effect = " ".join((under["no_effect"], table["no_effect"]))
        table = {name: under.get(name, {}) | table.get(name, {}) for name in sections} | {"no_effect": no_effect}
    return {"default": {}} | table


KINDS: Mapping[str, tuple[Any, str]] = {
    "whole": (int, "a whole number"),
    "number": (float, "a number"),
    "text": (str, "text"),
    "flag": (bool, "true or false"),
    "names": (list[str], "a list of names"),
    "value": (Any, ""),
}
"""The types of values, and what a message calls them."""


def take(document: Document, settings: Settings, table: Mapping[str, Any], *prefix: str) -> dict[str, Any]:
    """Return the values of a document, or of the block `prefix` in it, by the names of the table. Note the fields that
    frugal does not follow, and list those that are in no table.

    Raises:
        RequestError: a value is of the wrong kind.
    """
    content: Any = document.content
    for key in prefix:
        content = content.get(key) or {}
    refuse(
        (
            not isinstance(content, dict),
            f"`{'.'.join(prefix)}` in {document.place(*prefix)} is {content!r}",
            "it must be a mapping",
            None,
        )
    )
    place_of = partial(document.place, *prefix)
    said, known = {}, {*table.get("elsewhere", "").split(), *table.get("only", {}), *table.get("block", {})}
    for kind in KINDS:
        for name, row in table.get(kind, {}).items():
            known |= set(row.split())
            if (field := _first_set(row, content, (None,))) is not None and name not in settings.given:
                settings.places[name] = place_of(field)
                flag = (
                    f"say --{name.replace('_', '-')}" if name in FLAGS else "write the value into a copy of the script"
                )
                said[name] = _converted(content[field], kind, field, settings.places[name], flag)
    for row, why in table.get("deviations", {}).items():
        known |= {each.partition("=")[0] for each in row.split()}
        if (field := _first_set(row, content)) is not None:
            settings.deviate(f"{_written(field, content[field])} is not followed: {why.strip()}", place_of(field))
    for why, row in table.get("refusals", {}).items():
        known |= {each.partition("=")[0] for each in row.split()}
        if (field := _first_set(row, content)) is not None:
            settings.refuse(why.format(field=_written(field, content[field])), place_of(field))
    for key, (followed, why) in table.get("only", {}).items():
        value = content.get(key)
        if value is not None and str(value).lower() not in followed.split():
            settings.refuse(why.format(field=_written(key, value), value=value), place_of(key))
    for name, block in table.get("block", {}).items():
        if content.get(name) is not None:
            said |= take(document, settings, block, *prefix, name)
    own = [key for key in content if not key.startswith("(")]
    settings.read += [place_of(key) for key in own if key in known and not isinstance(content[key], dict)]
    unknown = [key for key in own if key not in known.union(table["no_effect"].split())]
    settings.unknown += map(place_of, unknown)
    decisive = [key for key in unknown if content[key] and MAY_DECIDE_MEMORY.search(key.replace("-", "_"))]
    if decisive:
        names = ", ".join(f"`{key}`" for key in decisive)
        settings.refuse(f"{names}: unknown to frugal, and may decide memory", place_of(decisive[0]))
    return said


_OFF: tuple[Any, ...] = (None, False, 0, "none", "", [], {})


def _first_set(row: str, content: Mapping[str, Any], off: Sequence[Any] = _OFF) -> str | None:
    """Return the first field of a row that is set, or set as after `=`; None if none is."""
    for each in row.split():
        key, _, wanted = each.partition("=")
        value = content.get(key)
        if str(value).lower() == wanted if wanted else value not in off:
            return key
    return None


def _converted(value: Any, kind: str, key: str, place: Place, way_out: str) -> Any:
    """Return a value as one of `KINDS`, also where a number is given as text: YAML 1.1 reads `2e-5` as text."""
    wanted, must_be = KINDS[kind]
    if kind == "text":
        return str(value)
    if kind == "names" and isinstance(value, str):
        return value.replace(",", " ").split()
    if kind == "flag" and str(value).lower() in ("yes", "no"):
        return str(value).lower() == "yes"
    try:
        return msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError:
        is_open = "$" in str(value)
        raise RequestError(
            f"`{key}` in {place} is {value!r}",
            because="its value is only known when the script runs" if is_open else f"it must be {must_be}",
            hint=way_out if is_open else None,
        ) from None


def _written(key: str, value: Any) -> str:
    return f"`{key}`" if isinstance(value, bool | dict | list) else f"`{key}: {value}`"


def read(document: Document, given: Collection[str] = ()) -> Settings:
    """Return the settings in a trainer's file, but for those of `FLAGS` that are `given` otherwise.

    Raises:
        RequestError: a value is of the wrong kind.
    """
    settings = Settings(tool=NAMES[document.tool], fills_auto=True, given=given)
    settings.gpus, settings.nodes = command_line.num_processes(document.content)
    settings.expandable_segments = command_line.expandable_segments(document.content)
    _refuse_other_work(document)
    table = table_of(document.tool)
    given = take(document, settings, table)
    if given.get("deepspeed_file") in (True, False, "") and given.pop("deepspeed_file"):
        settings.refuse(
            "`deepspeed` names no file: the script itself decides how DeepSpeed runs", settings.place("deepspeed_file")
        )
    settings.raw = said = table["default"] | given
    others = (each.key for each in settings.unknown if MAY_DECIDE_MEMORY.search(each.key))
    if any(
        re.search(r"batch|(^|_)bsz?(_|$)", key) for key in others
    ):  # a script with other names, and so with other defaults
        said["micro_batch"] = given.get("micro_batch")
    for name in said.keys() & {each.name for each in fields(Settings)}:
        setattr(settings, name, said[name])
    if settings.accumulation_steps is None:  # axolotl's `batch_size` is that of a GPU in all its forwards
        settings.accumulation_steps = max(1, said.get("batch_of_gpu", 0) // (said["micro_batch"] or 1))
    bf16 = str(said.get("bf16", said["precision"] != "fp32")).lower()  # axolotl's is true, false, auto or full
    of_flags: Precision = "fp16" if said.get("fp16") else "fp32" if bf16 == "false" else "bf16"
    settings.precision = "bf16" if said.get("pure_bf16") else of_flags
    take_optimizer(settings, said["optim"], settings.place("optim"))
    recomputes = str(said.get("activation_checkpointing", False)).lower() != "false"  # axolotl's may be a word
    settings.activation_checkpointing = recomputes and not said.get("keeps_activations")
    more = said.get("use_reentrant")
    settings.use_reentrant = bool(more.get("use_reentrant", False)) if isinstance(more, dict) else None
    _adapters(settings)
    _packing(settings, document.tool)
    evaluates = bool(said.get("do_eval")) or said.get("eval_strategy", "no") not in ("no", "False")
    keeps = not said.get("prediction_loss_only") and said.get("eval_accumulation_steps") is None
    said["eval_micro_batch"] = said.get("eval_micro_batch") if evaluates else None
    said["eval_keeps_logits"] = evaluates and keeps
    if (place := settings.place("eval_micro_batch", "eval_strategy", "do_eval")) is not None:
        settings.places["eval_micro_batch"] = place
    if settings.sequence_parallel > 1 and document.tool == "axolotl":
        settings.deviate(
            "the attention of shared samples is evaluated with all-to-alls, as in DeepSpeed-Ulysses; axolotl's passes "
            "keys and values around a ring, in buffers of other sizes",
            settings.place("sequence_parallel"),
        )
    refuse_other_splits(settings, said)
    init = said.get("model_init_kwargs")
    said["dtype"] = init.get("dtype", said.get("dtype")) if isinstance(init, dict) else said.get("dtype")
    if document.tool == "llama-factory":  # `init_adapter` of its `model/adapter.py` casts what is trained
        said["dtype"] = "float32" if said["adapter"] == "full" and not said.get("pure_bf16") else "same"
    if document.tool == "trl":
        settings.deviate("TRL's loss, which never holds whole logits, is evaluated as frugal's tiled loss")
    if document.tool == "axolotl":
        _fused_losses(settings)
    if document.tool in ("transformers", "trl"):
        _method(document, settings)
    return settings


_OF_TRAINING = """
per_device_train_batch_size per_gpu_train_batch_size micro_batch_size gradient_accumulation_steps learning_rate
num_train_epochs num_epochs max_steps
"""


def _refuse_other_work(document: Document) -> None:
    """Raise an error for files that merge, evaluate or preprocess: they say nothing about a training step."""
    says = {key for key in _OF_TRAINING.split() if document.content.get(key) is not None}
    only_predicts = document.content.get("do_predict") and not document.content.get("do_train")
    if only_predicts or not (says or {"output_dir", "deepspeed"} <= document.content.keys()):
        missing = " or ".join(command_line.missing(document.path, document.content))
        refuse(
            (missing, f"{document.path} reads its settings from {missing}, which is not there",
             "it has no batch, learning rate or duration itself", f"give both: frugal check {document.path} FILE"),
            (True, f"{document.path} trains nothing",
             "it predicts without `do_train`" if only_predicts
             else f"it has no batch, learning rate or duration of {NAMES[document.tool]}",
             "give the file, or the script, that starts the training"),
        )  # fmt: skip


_METHOD = re.compile(
    r"(?<![a-z])(dpo|ipo|kto|orpo|simpo|cpo|apo|grpo|gspo|ppo|rloo|gkd|rlhf|prm|rm|reward)(?![a-z])", re.I
)


def _method(document: Document, settings: Settings) -> None:
    """Refuse a training against a reference or rewards that its names tell: the arguments may be those of SFT."""
    keys = ("output_dir", "run_name", "hub_model_id", "trainer_type", command_line.PROGRAM)
    for key, name in (
        *((key, str(document.content.get(key))) for key in keys),
        ("the file's name", document.path.stem),
    ):
        if match := _METHOD.search(name):
            text = {command_line.PROGRAM: name, "the file's name": key}.get(key, f"`{key}: {name}`")
            settings.refuse(
                f"{text} says {match[1].upper()}, a training against a reference or rewards", document.place(key)
            )
            return


def _adapters(settings: Settings) -> None:
    """Set the adapters and the quantisation of the base weights. No targets leave them to peft."""
    said = settings.raw
    adapter, bits = str(said.get("adapter")).lower(), said.get("bits")
    has_four = said.get("four_bits") or bits == 4
    if not has_four and (said.get("eight_bits") or bits == 8):
        settings.quantize = "int8"
    elif has_four or adapter == "qlora":
        settings.quantize = "nf4"
    if settings.quantize == "nf4" and said.get("nested") is False:
        settings.deviate(
            "scales of 4 bits are evaluated quantised, which takes 0.37 bits a weight less",
            settings.place("nested", "four_bits"),
        )
    if adapter in ("lora", "qlora", "true"):
        targets = ["all"] if said.get("all_linear") else said.get("targets", [])
        settings.lora = Lora(
            rank=said["rank"],
            alpha=float(said.get("alpha", 2 * said["rank"])),
            dropout=said.get("dropout", 0.0),
            targets=(ALL_LINEAR,) if targets in (["all"], [ALL_LINEAR]) else tuple(targets) or (PEFTS_OWN,),
            dora=said.get("dora", False),
        )


def _packing(settings: Settings, tool: Tool) -> None:
    """Read whether samples are packed, and whether the documents in one are kept apart."""
    said = settings.raw
    keeps_apart = bool(said.get("neat_packing")) or said.get("stage") == "pt"
    settings.packing = settings.packing or keeps_apart
    init = said.get("model_init_kwargs")
    attention = said.get("attention", init.get("attn_implementation") if isinstance(init, dict) else None)
    if tool == "axolotl":
        names = ("flash", "sdp", "xformers", "flex", "sage")
        keeps_apart = attention not in (None, "eager") or any(said.get(f"{name}_attention") for name in names)
        if settings.packing and settings.micro_batch != 1:
            settings.deviate(
                f"a micro-batch of packed samples is one row of {settings.micro_batch} x sequence_len tokens in "
                "axolotl; it is evaluated as that many rows, which take the same memory except for attention",
                settings.place("packing"),
            )
    elif tool == "trl":
        keeps_apart = "flash" in str(attention) and said.get("packing_strategy") != "wrapped"
    settings.packs_apart = keeps_apart


def refuse_other_splits(settings: Settings, said: Mapping[str, Any]) -> None:
    """Count GPUs that split the model, whose samples are the same ones, and refuse sizes of data parallelism without
    shared samples: they are FSDP's."""
    settings.sequence_parallel = max(1, settings.sequence_parallel)
    for name in ("tensor", "pipeline", "context"):
        settings.sequence_parallel *= max(1, said.get(name, 1))
    for name in ("replicas", "shards"):
        if said.get(name, 1) > 1 and said.get("sequence_parallel", 1) == 1:
            place = settings.place(name)
            settings.refuse("data parallelism that is not DeepSpeed's splits the model otherwise than ZeRO", place)


def _fused_losses(settings: Settings) -> None:
    said = settings.raw
    plugins = [name.rpartition(".")[2] for name in said.get("plugins", [])]
    cuts = "CutCrossEntropyPlugin" in plugins and said.get("cut_loss", True)
    settings.tiled_loss = bool(
        cuts or ("LigerPlugin" in plugins and said.get("liger_loss")) or said.get("chunked_loss")
    )
    if settings.tiled_loss:
        settings.deviate(
            "the fused loss is evaluated as frugal's tiled loss", settings.place("plugins", "chunked_loss")
        )
    for name in plugins:
        if name not in ("CutCrossEntropyPlugin", "LigerPlugin", "SwanLabPlugin"):
            settings.refuse(f"`plugins`: frugal does not follow {name}", settings.place("plugins"))


def take_optimizer(settings: Settings, name: str, place: Place | None, of: str = "trainer") -> None:
    """Set the optimizer of `settings`, or refuse one that resembles none of frugal's. `of`: whose name it is, a table
    in `tools.toml`."""
    near = tables()["optimizers"][of].get(name.lower())
    if near is None:
        settings.refuse(f"the optimizer {name} keeps states that frugal does not know", place)
    else:
        settings.optimizer = Optimizer(**{key: value for key, value in near.items() if key not in ("how", "runs")})
        settings.raw["optim"] = near.get("runs", name)
        if "how" in near:
            settings.deviate(f"{name}: {near['how']}", place)
