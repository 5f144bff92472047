"""The settings of a run besides its plan: flags of `frugal train`, and [train] and [schedule] of frugal.toml."""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from frugal import files, storages
from frugal.config.learning_rate import SCHEDULE, Schedule, ScheduleName
from frugal.config.sample_lengths import TooLong
from frugal.config.setting import Kind, check_sizes, flag_of, setting, settings_of
from frugal.errors import RequestError, refuse

MOST_CHARACTERS = 1 << 14
"""The limit of a rank's arguments in a command: Linux takes 128 KiB a word, and over ssh all of a command is one."""

OnNan = Literal["stop", "skip"]
BestMode = Literal["min", "max"]

COLUMNS = Kind(
    str,
    "text such as text=body,label=topic, or a table of these",
    lambda value: (
        isinstance(value, str) or (isinstance(value, dict) and all(isinstance(x, str) for x in value.values()))
    ),
    make=lambda value: ",".join(map("=".join, value.items())) if isinstance(value, dict) else value,
)
WARMUP = Kind(
    str,
    "a number of steps, or a part such as 5%",
    lambda value: re.fullmatch(r"\d{1,12}[kKmM]?|\d{0,12}\.?\d{1,12}%", str(value)) is not None,
    make=str,
)
_PART = re.compile(r"\d{0,12}\.?\d{1,12}%")
_NO_UTF_8 = re.compile(r"[\ud800-\udfff]")  # by which Python represents what is none
RENAMED_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "response", "system", "instruction", "input", "output",
    "tools", "input_ids", "labels",
)  # fmt: skip
"""Columns of formats that may have another name in the data."""

_COLUMNS = ("text", "label", "source", "target", *RENAMED_COLUMNS, "role", "content", "user", "assistant")

TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")
"""Names of accelerate, which are also those of the Python packages."""

Format = Literal["messages", "conversations", "prompt-completion", "prompt-response", "instruction", "tokens", "text"]
"""Formats of rows for causal language models, as `frugal.data.chat.formats` describes them."""

TrainOn = Literal["completions", "all"]

RECORD = "train.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run. `steps` counts optimizer steps from the beginning, also for a run that is resumed."""

    data: tuple[str, ...] = setting(
        (),
        "Files, globs, folders, saved datasets, addresses such as `s3://bucket/*.jsonl`, a hub name, `file.py:name` "
        "that gives rows, `stdlib` (Python's own sources, for a trial), or `@FILE` with one of these a line; "
        "repeatable. `PATH:0.7` is drawn with that weight.",
        "data", metavar="PATH", is_first=True,
    )  # fmt: skip
    columns: str = setting(
        "",
        "Names of columns: `text=` of texts, `label=` of classes, `source=` and `target=` of pairs, `prompt=`, "
        "`response=` and `system=` of questions and answers, `messages=` of chats with their `role=` and `content=`.",
        "data", kind=COLUMNS, metavar="text=NAME,...", is_expert=True,
    )  # fmt: skip
    format: Format | None = setting(
        None, f"Format of the rows, where their columns fit several: {', '.join(get_args(Format))}.", "data",
        shown_default="by their columns", metavar="NAME", is_expert=True,
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "Chat template: a file with Jinja, `chatml`, or `llama3`.", "data", metavar="FILE",
        shown_default="the tokenizer's own", is_expert=True,
    )  # fmt: skip
    train_on: TrainOn = setting(
        "completions", "Tokens of chats and completions that are trained on: the model's answers, or all.", "data"
    )
    tokenizer: str | None = setting(
        None, "A tokenizer's folder or hub name, or `byte`.", "data", metavar="NAME",
        shown_default="the model's own; `byte` where it has none and random weights", is_expert=True,
    )  # fmt: skip
    limit: int | None = setting(None, "Maximum number of documents.", "data", least=1, is_flag=False)
    skip_bad_rows: bool = setting(
        False, "Leave out rows that cannot be read, instead of stopping.", "data", is_expert=True
    )
    stream: bool = setting(
        False, "Read and tokenise the data while training, for what does not fit on disk as tokens; needs --steps.",
        "data",
    )  # fmt: skip
    shuffle_buffer: int = setting(
        10_000,
        "With --stream: size of the shuffle buffer, rows; 1: no shuffling.",
        "data",
        least=1,
        is_flag=False,
    )
    too_long: TooLong = setting(
        "error",
        "Action for chats, completions, pairs and classes that are longer than planned.",
        "data",
        is_expert=True,
    )
    validation_data: tuple[str, ...] = setting(
        ("5%",), "Validation data, like --data; repeatable. Or the part of --data that is kept for it, such as 10%.",
        "data", metavar="PATH|PART",
    )  # fmt: skip
    validation_samples: int | None = setting(
        1000, "Maximum number of validation samples.", "data", least=1, is_flag=False
    )
    test_data: tuple[str, ...] = setting(
        (), "Data for an evaluation at the end, like --data; repeatable.", "data", metavar="PATH", is_expert=True
    )
    steps: int | None = setting(
        None, "Optimizer steps, counted from the beginning.", "run", least=1, shown_default="--epochs", is_first=True
    )
    epochs: int | None = setting(None, "Passes over the data, instead of --steps.", "run", least=1, shown_default="1")
    seed: int = setting(0, "Seed of weights, data order and dropout.", "run", least=0, is_expert=True)
    schedule: Schedule = setting(
        Schedule(),
        f"Learning rate schedule after warmup: {', '.join(get_args(ScheduleName))}. With keys: min-lr-ratio=0.1, "
        "decay-ratio=0.2, power=2, steps=10k.",
        "optimizer", kind=Kind.of(SCHEDULE, Schedule.of), metavar="NAME[,...]",
    )  # fmt: skip
    warmup: str = setting(
        "0", "Optimizer steps until the peak learning rate, or a part of the schedule such as 5%.", "optimizer",
        kind=WARMUP, metavar="STEPS",
    )  # fmt: skip
    eval_every: int | None = setting(
        None, "Optimizer steps between evaluations; 0: never.", "run", least=0, shown_default="at the end"
    )
    metric: str | None = setting(
        None, "Your own metric: `file.py:name`, a function of predictions and labels of the validation samples.",
        "run", metavar="NAME", is_expert=True,
    )  # fmt: skip
    best: str | None = setting(
        None, "End with the weights of the best evaluation, by `loss` or a number of --metric. The smallest loss and "
        "the largest metric are best, unless `NAME:min` or `NAME:max` says otherwise.",
        "run", metavar="NAME", is_expert=True,
    )  # fmt: skip
    patience: int | None = setting(
        None, "Stop after N evaluations without a better one.", "run", least=1, metavar="N", shown_default="never",
        is_expert=True,
    )  # fmt: skip
    save_every: int | None = setting(
        None, "Optimizer steps between checkpoints; 0: never.", "run", least=0, shown_default="at the end"
    )
    keep: int = setting(2, "Newest checkpoints to keep, besides the best.", "run", least=1, is_expert=True)
    async_save: bool = setting(
        False, "Write checkpoints in the background, from a copy in host memory.", "run", is_flag=False
    )
    mirror: str | None = setting(
        None, "Copy checkpoints and metrics to a storage, such as s3://bucket/run; --resume on an empty disk fetches "
        "the newest.", "run", metavar="ADDRESS", is_expert=True,
    )  # fmt: skip
    track: tuple[str, ...] = setting(
        (), f"Experiment tracker: {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}; repeatable.", "run", metavar="NAME"
    )
    callback: tuple[str, ...] = setting(
        (), "Your own callbacks: `file.py:name`, a class whose methods are called after steps, evaluations and "
        "checkpoints; repeatable.",
        "run", metavar="NAME", is_flag=False,
    )  # fmt: skip
    on_nan: OnNan = setting(
        "stop", "Action when the loss or the gradient is not finite: stop, or skip the batch.", "run", is_expert=True
    )
    grace: int = setting(
        600, "Seconds after a signal to stop, to finish the step and save a checkpoint.", "run", least=1,
        is_flag=False,
    )  # fmt: skip
    out: Path = setting(Path("run"), "The run's folder.", "run", metavar="DIR", is_first=True)
    resume: bool = setting(False, "Continue from the newest checkpoint in the run's folder.", "run")
    accept_changed_data: bool = setting(False, "Resume although the data have changed.", "run", is_expert=True)

    def __post_init__(self) -> None:
        check_sizes(self)
        values = [
            (name, each)
            for name, row in settings_of(RunSettings).items()
            for each in (getattr(self, name) if row.is_repeatable else [getattr(self, name)])
        ]
        no_text = next((f"{flag_of(name)} {each}" for name, each in values if _NO_UTF_8.search(str(each))), "")
        unknown = [name for name in self.track if name not in TRACKERS]
        asked = {"--metric": self.metric, "--patience": self.patience, "--best": self.best}
        flag = next((flag for flag, value in asked.items() if value is not None), None)
        refuse(
            (
                no_text,
                f"{os.fsencode(no_text).decode(errors='backslashreplace')} is not UTF-8",
                "the settings of a run are kept as text",
                "rename it, or use a link of another name; if it is UTF-8, unset PYTHONUTF8",
            ),
            (
                self.validation_fraction >= 1,
                f"--validation-data is {', '.join(self.validation_data)}",
                "a part of the data that is not trained on must be less than 100%",
                None,
            ),
            (unknown, f"--track is {', '.join(unknown)}", f"it must be one of {', '.join(TRACKERS)}", None),
            (
                self.steps is not None and self.epochs is not None,
                "--steps and --epochs were both given",
                "",
                "leave one of them out",
            ),
            (
                self.stream and self.epochs is not None,
                "--epochs was given with --stream",
                "how many samples a stream has is known when all of it was read",
                "say how long to train: --steps N",
            ),
            (
                self.stream and self.limit is not None,
                "train.limit was given with --stream",
                "",
                "--steps N ends the run",
            ),
            (
                flag is not None and self.eval_every == 0,
                f"{flag} was given with --eval-every 0",
                "there is no evaluation to look at",
                None,
            ),
            (
                flag is not None and not self.validation_files and not self.validation_fraction,
                f"{flag} was given, and no sample is kept for validation",
                f"--validation-data is {', '.join(self.validation_data)}",
                "give validation data, or a part of the data such as 5%",
            ),
            (
                self.patience is not None and self.eval_every is None,
                "--patience was given without --eval-every",
                "the only evaluation is at the end",
                "add --eval-every N",
            ),
            (
                self.metric is None and self.best is not None and self.best.partition(":")[0] != "loss",
                f"--best {self.best} was given without --metric",
                "without a metric of your own, only `loss` is measured",
                "add --metric FILE.py:NAME",
            ),
            (
                self.best is not None and self.best.partition(":")[2] not in ("", "min", "max"),
                f"--best is {self.best}",
                "after the name it takes `:min` or `:max`",
                "write --best f1:max",
            ),
            (
                self.save_best_model and self.save_every == 0,
                "--best was given with --save-every 0",
                "the best weights are kept in a checkpoint",
                "leave --save-every out",
            ),
        )
        self.named_columns()
        if self.steps is not None:
            self.schedule.curve(1.0, self.steps, self.warmup)

    def check_addresses(self) -> None:
        """Refuse addresses that no storage can have, before they are in a record. Raises as `storages.check`."""
        storages.check("--mirror", *filter(None, [self.mirror]))
        storages.check("--data", *filter(storages.is_address, (*self.data, *self.validation_files, *self.test_data)))

    def check_length(self) -> None:
        """Check that the length of the run is given.

        Raises:
            RequestError: it is not.
        """
        refuse(
            (
                self.stream and self.steps is None,
                "--stream was given without --steps",
                "how many samples a stream has is known when all of it was read",
                "say how long to train: --steps N",
            )
        )

    def named_columns(self) -> dict[str, str]:
        """Return the names that --columns gives, by role: of columns, and of what is in a message.

        Raises:
            RequestError: --columns cannot be read.
        """
        parts = re.split(r",(?=\s*\w+=)", self.columns)  # a name may have commas itself
        given = dict(part.strip().partition("=")[::2] for part in filter(None, parts))
        wrong = [name for name, column in given.items() if name not in _COLUMNS or not column]
        refuse(
            (
                wrong,
                f"--columns is {self.columns}",
                f"it names {', '.join(_COLUMNS)}",
                "write --columns text=body, or --columns prompt=question,response=answer",
            )
        )
        return given

    @property
    def validation_fraction(self) -> float:
        """The part of --data that is kept for validation, if there are no files for it."""
        return 0.0 if self.validation_files else sum(float(part[:-1]) / 100 for part in self.validation_data)

    @property
    def validation_files(self) -> tuple[str, ...]:
        """The validation data, if it is not a part of --data."""
        return (
            () if len(self.validation_data) == 1 and _PART.fullmatch(self.validation_data[0]) else self.validation_data
        )

    @property
    def save_best_model(self) -> bool:
        """True if the weights of each best evaluation are saved, and become the final model."""
        return self.best is not None

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.out / CHECKPOINTS

    @property
    def of_run(self) -> dict[str, Any]:
        """The settings of the run, by name, without those of one start."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_ONE_START}

    def record(self) -> bytes:
        """Return the text of `train.json`, from which a resumed run takes its settings."""
        return msgspec.json.format(msgspec.json.encode(self.of_run | {"out": str(self.out)}), indent=2) + b"\n"

    def arguments(self) -> list[str]:
        """Return the words from which a rank parses these settings.

        Raises:
            RequestError: they are too many for a command.
        """
        words: list[str] = []
        for name, row in settings_of(RunSettings).items():
            value = getattr(self, name)
            if value == row.default:
                continue
            if isinstance(value, bool):
                words.append(flag_of(name if value else f"no_{name}"))
                continue
            for each in map(str, value if row.is_repeatable else [value]):
                words += [f"{flag_of(name)}={each}"] if each.startswith("-") else [flag_of(name), each]
        if (number := sum(map(len, words))) > MOST_CHARACTERS:
            raise RequestError(
                f"the settings of this run are {number:,} characters, and a command takes {MOST_CHARACTERS:,}",
                hint="name the data in a file: --data @FILE, with a name a line",
            )
        return words


_OF_ONE_START = ("resume", "accept_changed_data")  # not of the run, and so not in its record

DATA_NAMES = (
    "data", "columns", "tokenizer", "limit", "skip_bad_rows", "too_long", "format", "chat_template", "train_on",
    "stream", "shuffle_buffer",
)  # fmt: skip
LENGTH_NAMES = ("steps", "epochs")
SAMPLE_NAMES = (*DATA_NAMES, "validation_data", "test_data")


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings of how `frugal train` starts the ranks."""

    master_port: int | None = setting(
        None, "Port of the rendezvous.", "launch", least=1, most=65535, shown_default="a free port", is_expert=True
    )
    max_restarts: int = setting(0, "Maximum automatic restarts after a crash.", "launch", least=0)
    elastic: bool = setting(
        False, "With --max-restarts: plan again when GPUs or hosts are lost.", "launch", is_expert=True
    )

    def __post_init__(self) -> None:
        check_sizes(self)
        refuse(
            (
                self.elastic and not self.max_restarts,
                "--elastic was given without --max-restarts",
                "",
                "add --max-restarts 3",
            )
        )


def earlier_settings(folder: Path) -> dict[str, Any]:
    """Return the recorded settings of the run in `folder`, without those that are not set; empty without a record.

    Raises:
        RequestError: the record cannot be read, or another version of frugal has written it.
    """
    path = folder / RECORD
    try:
        record = msgspec.json.decode(files.read_regular(path), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RequestError(f"cannot read the settings of the run in {folder}", because=f"{path}: {reason}") from None
    rows = settings_of(RunSettings)
    if unknown := [name for name in record if name not in rows]:
        raise RequestError(
            f"the run in {folder} was started by another version of frugal",
            because=f"{path} has settings that this version does not know: {', '.join(unknown)}",
            hint="resume it with that version, or start over in another folder with --out DIR",
        )
    return {name: rows[name].read(value, f" in {path}") for name, value in record.items() if value not in (None, [])}
