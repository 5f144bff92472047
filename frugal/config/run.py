"""What a training run is told besides its plan: one field a flag, the same in `frugal train` and on the ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import click
import msgspec

from frugal.config.learning_rate import Schedule
from frugal.errors import RequestError

TooLong = Literal["error", "truncate", "skip"]
OnNan = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `steps` counts optimizer steps from the beginning, also for a run that is resumed.

    Attributes:
        data: files, globs, folders, saved datasets, a hub name, `file.py:name` that gives rows, or `stdlib`.
        text_column: of texts.
        label_column: of classes.
        source_column: of pairs, what is read.
        target_column: of pairs, what is written.
        tokenizer: `byte`, or a tokenizer's folder or hub name.
        limit: use at most so many documents.
        skip_bad_rows: leave out rows that cannot be read, instead of stopping.
        too_long: what to do with samples that cannot be cut and are longer than planned.
        validation_data: like `data`, in place of a part of it.
        validation_fraction: of the samples, kept from training.
        validation_samples: evaluate on at most so many.
        test_data: like `data`; the model is evaluated on all of it at the end, and on as many training samples as on
            validation samples.
        steps: optimizer steps; None: `epochs`.
        epochs: passes over the data.
        seed: of weights, order of the data and dropout.
        schedule: of the learning rate after warmup.
        warmup_steps: optimizer steps until the peak learning rate.
        eval_every: optimizer steps between evaluations; None: at the end only; 0: never.
        save_every: optimizer steps between checkpoints; None: at the end only; 0: never.
        keep: newest checkpoints kept, beside the best.
        async_save: write checkpoints while training goes on, from a copy in the host's memory.
        on_nan: what to do when the loss or the gradient is not finite: stop, or leave the batch out.
        out: the run's folder.
        resume: continue from the newest checkpoint in `out`.
        accept_changed_data: resume also on other data than the run was started with.
    """

    data: tuple[str, ...] = ("stdlib",)
    text_column: str = "text"
    label_column: str = "label"
    source_column: str = "source"
    target_column: str = "target"
    tokenizer: str = "byte"
    limit: int | None = None
    skip_bad_rows: bool = False
    too_long: TooLong = "error"
    validation_data: tuple[str, ...] = ()
    validation_fraction: float = 0.05
    validation_samples: int | None = 1000
    test_data: tuple[str, ...] = ()
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    eval_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    async_save: bool = False
    on_nan: OnNan = "stop"
    out: Path = Path("run")
    resume: bool = False
    accept_changed_data: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{_flag(name)} is {value}", because=f"it must be at least {least}")
        if not 0 <= self.validation_fraction < 1:
            raise RequestError(
                f"--validation-fraction is {self.validation_fraction}",
                because="it is the part of the data that is not trained on: at least 0, less than 1",
            )
        if self.steps is not None and self.epochs is not None:
            raise RequestError("--steps and --epochs were both given", hint="leave one of them out")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise RequestError(
                f"--warmup-steps {self.warmup_steps} is more than --steps {self.steps}",
                because="the learning rate would never reach its peak",
            )

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.out / "checkpoints"

    def record(self) -> bytes:
        """The text of `train.json`: what a resumed run need not be told again."""
        values = {name: getattr(self, name) for name in NAMES if name not in _NOW} | {"out": str(self.out)}
        return msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n"

    def arguments(self) -> list[str]:
        """The flags that say the same: what the launcher hands to the ranks."""
        arguments: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                arguments.append(_flag(field.name))
            else:
                for each in value if isinstance(value, tuple) else (value,):
                    arguments += [_flag(field.name), str(each)]
        return arguments


_LEAST = {
    "steps": 1, "epochs": 1, "seed": 0, "warmup_steps": 0, "eval_every": 0, "save_every": 0, "keep": 1,
    "validation_samples": 1, "limit": 1,
}  # fmt: skip
_NOW = ("resume", "accept_changed_data")  # of one start, not of the run
NAMES = tuple(field.name for field in fields(Settings))


RECORD = "train.json"
METRICS = "metrics.jsonl"


def earlier(folder: Path) -> dict[str, Any]:
    """What the run in `folder` was asked for, without what says nothing; empty where there is no record.

    Raises:
        RequestError: the record cannot be read.
    """
    path = folder / RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read what the run in {folder} was asked for", because=f"{path}: {error}") from None
    return {name: value for name, value in record.items() if value not in (None, [])}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# No option has a default here: `None` (or nothing) means that neither file nor default has been overruled.
_OPTIONS = (
    click.option("--data", multiple=True, metavar="PATH", help="Files, folder, saved dataset, file.py:name, `stdlib`."),
    click.option("--text-column", metavar="NAME", help="Where texts are."),
    click.option("--label-column", metavar="NAME", help="Where classes are."),
    click.option("--source-column", metavar="NAME", help="Where the first of a pair is."),
    click.option("--target-column", metavar="NAME", help="Where the second of a pair is."),
    click.option("--tokenizer", metavar="NAME", help="`byte`, or a tokenizer's folder or hub name."),
    click.option("--limit", type=int, help="Use at most so many documents."),
    click.option("--skip-bad-rows", is_flag=True, default=None, help="Leave out rows that cannot be read."),
    click.option("--too-long", type=click.Choice(get_args(TooLong)), help="Pairs and classes longer than planned."),
    click.option("--validation-data", multiple=True, metavar="PATH", help="Instead of a part of the data; repeatable."),
    click.option("--validation-fraction", type=float, help="Part of the data kept from training."),
    click.option("--validation-samples", type=int, help="Evaluate on at most so many samples."),
    click.option("--test-data", multiple=True, metavar="PATH", help="To evaluate on at the end; repeatable."),
    click.option("--steps", type=int, help="Optimizer steps, counted from the beginning."),
    click.option("--epochs", type=int, help="Passes over the data, instead of --steps.  [default: 1]"),
    click.option("--seed", type=int, help="Of weights, data order and dropout."),
    click.option("--schedule", type=click.Choice(get_args(Schedule)), help="Of the learning rate."),
    click.option("--warmup-steps", type=int, help="Optimizer steps until the peak learning rate."),
    click.option(
        "--eval-every", type=int, help="Optimizer steps between evaluations; 0: never.  [default: at the end]"
    ),
    click.option(
        "--save-every", type=int, help="Optimizer steps between checkpoints; 0: never.  [default: at the end]"
    ),
    click.option("--keep", type=int, help="Newest checkpoints kept, beside the best."),
    click.option("--async-save", is_flag=True, default=None, help="Write checkpoints while training goes on."),
    click.option("--on-nan", type=click.Choice(get_args(OnNan)), help="When the loss or the gradient is not finite."),
    click.option("--out", type=click.Path(path_type=Path), help="The run's folder."),
    click.option("--resume", is_flag=True, default=None, help="Continue from the newest checkpoint in the folder."),
    click.option("--accept-changed-data", is_flag=True, default=None, help="Resume on other data than it began with."),
)


DATA_NAMES = (
    "data", "text_column", "label_column", "source_column", "target_column", "tokenizer", "limit", "skip_bad_rows",
    "too_long",
)  # fmt: skip
SAMPLE_NAMES = (*DATA_NAMES, "validation_data", "validation_fraction")  # what is not kept for validation is trained on


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the flags of a run that say which samples there are, `DATA_NAMES`."""
    return _with_defaults(command, _OPTIONS[: len(DATA_NAMES)])


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the flags of a run; pass what it receives to `collect`."""
    return _with_defaults(command, _OPTIONS)


def _with_defaults(command: Callable[..., Any], chosen: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    defaults = {field.name: field.default for field in fields(Settings)}
    for option in reversed(chosen):
        command = option(command)
    for parameter in command.__click_params__:  # type: ignore[attr-defined]  # click keeps them there
        default = defaults.get(parameter.name)
        if parameter.help and default not in (None, MISSING, (), False) and "[default" not in parameter.help:
            shown = " ".join(default) if isinstance(default, tuple) else default
            parameter.help += f"  [default: {shown}]"
    return command


def collect(flags: Mapping[str, Any], file: Mapping[str, Any]) -> Settings:
    """The settings that flags and the table `[train]` of frugal.toml give; flags win.

    Raises:
        RequestError: an unknown or a wrong setting.
    """
    for name, value in file.items():
        _check(name, value)
    given = {name: value for name, value in flags.items() if name in NAMES and value not in (None, ())}
    settings = dict(file) | given
    if len({"steps", "epochs"} & given.keys()) == 1:  # then the other one, from the file, is overruled
        settings.pop("epochs" if "steps" in given else "steps", None)
    for name in _LISTS & settings.keys():
        settings[name] = (settings[name],) if isinstance(settings[name], str) else tuple(settings[name])
    if "out" in settings:
        settings["out"] = Path(settings["out"])
    return Settings(**settings)


_LISTS = {"data", "validation_data", "test_data"}
_CHOICES = {"schedule": get_args(Schedule), "too_long": get_args(TooLong), "on_nan": get_args(OnNan)}


def _check(name: str, value: Any) -> None:
    """Whether [train] may say so."""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=1)
        raise RequestError(
            f"unknown setting `{name}` in [train]",
            hint=f"did you mean `{close[0]}`?" if close else "see `frugal train --help`",
        )
    if name in _CHOICES:
        kind, right = f"one of {', '.join(_CHOICES[name])}", value in _CHOICES[name]
    elif name in _LISTS:
        words = value if isinstance(value, list) else [value]
        kind, right = "a path or a list of paths", bool(words) and all(isinstance(word, str) for word in words)
    elif name in ("resume", "skip_bad_rows", "accept_changed_data", "async_save"):
        kind, right = "true or false", isinstance(value, bool)
    elif name == "validation_fraction":
        kind, right = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    elif name == "out" or name == "tokenizer" or name.endswith("_column"):
        kind, right = "text", isinstance(value, str)
    else:
        kind, right = "a whole number", isinstance(value, int) and not isinstance(value, bool)
    if not right:
        raise RequestError(f"`{name}` in [train] is {value!r}", because=f"it must be {kind}")
