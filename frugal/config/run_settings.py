"""What a run is told besides its plan: the same in `frugal train`, in frugal.toml's [train] and on the ranks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from frugal import files
from frugal.config import learning_rate
from frugal.config.learning_rate import Curve, Schedule
from frugal.config.sample_lengths import TooLong
from frugal.config.setting import check_sizes, flag_of, setting, settings_of, unknown_setting
from frugal.errors import RequestError

MOST_CHARACTERS = 1 << 14
"""Of a rank's arguments in a command line: Linux takes 128 KiB a word, and over ssh all of a command is one."""

OnNan = Literal["stop", "skip"]
BestMode = Literal["min", "max"]

TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")
"""By accelerate's names, which are also those of their Python packages."""

Format = Literal["messages", "conversations", "prompt-completion", "instruction", "tokens", "text"]
"""Of the rows that a causal language model is trained on; what they are is `frugal.training.data.chat.formats`'s."""

TrainOn = Literal["completions", "all"]

RECORD = "train.json"
METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run. `steps` counts optimizer steps from the beginning, also for a run that is resumed."""

    data: tuple[str, ...] = setting(
        (),
        "Files, globs, folders, saved datasets, a hub name, `file.py:name` that gives rows, `stdlib` (Python's own "
        "sources, for a trial), or `@FILE` with one of these a line; repeatable. `PATH:0.7` is drawn with that weight.",
        "data", metavar="PATH", is_first=True,
    )  # fmt: skip
    text_column: str = setting("text", "Where texts are.", "data", metavar="NAME")
    label_column: str = setting("label", "Where classes are.", "data", metavar="NAME", is_expert=True)
    source_column: str = setting("source", "Of pairs, what is read.", "data", metavar="NAME", is_expert=True)
    target_column: str = setting("target", "Of pairs, what is written.", "data", metavar="NAME", is_expert=True)
    format: Format | None = setting(
        None, "What rows are, where their columns fit several formats.", "data", shown_default="by their columns",
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "A file with the Jinja template of chats, or `chatml`, or `llama3`.", "data", metavar="FILE",
        shown_default="the tokenizer's own",
    )  # fmt: skip
    train_on: TrainOn = setting(
        "completions", "Of chats, completions and labelled tokens: what the model writes, or every token.", "data"
    )
    tokenizer: str | None = setting(
        None, "A tokenizer's folder or hub name, or `byte`.", "data", metavar="NAME",
        shown_default="the model's own; `byte` where it has none and random weights",
    )  # fmt: skip
    limit: int | None = setting(
        None, "Use at most so many documents.", "data", least=1, shown_default="all", is_expert=True
    )
    skip_bad_rows: bool = setting(
        False, "Leave out rows that cannot be read, instead of stopping.", "data", is_expert=True
    )
    stream: bool = setting(
        False, "Read and tokenise the data while training, for what does not fit on disk as tokens; needs --steps.",
        "data",
    )  # fmt: skip
    shuffle_buffer: int = setting(
        10_000, "With --stream: rows that are shuffled among each other; 1: none.", "data", metavar="ROWS", least=1
    )
    too_long: TooLong = setting(
        "error",
        "What to do with chats, completions, pairs and classes that are longer than planned.",
        "data",
        is_expert=True,
    )
    validation_data: tuple[str, ...] = setting(
        (), "Like --data, in place of a part of it; repeatable.", "data", metavar="PATH"
    )
    validation_fraction: float = setting(0.05, "Part of the samples kept from training.", "data")
    validation_samples: int | None = setting(1000, "Evaluate on at most so many samples.", "data", least=1)
    test_data: tuple[str, ...] = setting(
        (), "Like --data: the model is evaluated on all of it at the end; repeatable.", "data", metavar="PATH"
    )
    steps: int | None = setting(
        None, "Optimizer steps, counted from the beginning.", "run", least=1, shown_default="--epochs", is_first=True
    )
    epochs: int | None = setting(None, "Passes over the data, instead of --steps.", "run", least=1, shown_default="1")
    seed: int = setting(0, "Of weights, data order and dropout.", "run", least=0)
    schedule: Schedule = setting(
        "cosine", f"Of the learning rate after warmup: {', '.join(get_args(Schedule))}.", "optimizer", metavar="NAME"
    )
    warmup_steps: int = setting(0, "Optimizer steps until the peak learning rate.", "optimizer", least=0)
    warmup_ratio: float | None = setting(
        None, "Part of the schedule that is warmup, instead of --warmup-steps.", "optimizer", least=0,
        shown_default="--warmup-steps",
    )  # fmt: skip
    min_lr_ratio: float = setting(
        0.0, "Part of the peak learning rate at which the schedule ends.", "optimizer", least=0
    )
    decay_ratio: float | None = setting(
        None, "Of --schedule warmup_stable_decay: part at the end in which the rate falls.", "optimizer", least=0,
        shown_default=str(learning_rate.DECAY_RATIO), is_expert=True,
    )  # fmt: skip
    schedule_power: float | None = setting(
        None, "Of --schedule polynomial.", "optimizer", least=0, shown_default="1", is_expert=True
    )
    schedule_steps: int | None = setting(
        None, "Optimizer steps over which the schedule goes, where the run is to end before: it can be resumed on the "
        "same curve.", "optimizer", least=1, shown_default="those of the run", is_expert=True,
    )  # fmt: skip
    tune: bool | None = setting(
        None, "Take the first steps in several ways (micro-batches, activation checkpointing, tiled loss) and continue "
        "in the fastest; --no-tune: as planned.", "run", shown_default="if the run is long enough to gain by it",
    )  # fmt: skip
    eval_every: int | None = setting(
        None, "Optimizer steps between evaluations; 0: never.", "run", least=0, shown_default="at the end"
    )
    metric: str | None = setting(
        None, "A function of your own, `file.py:name`, of predictions and labels of the validation samples.", "run",
        metavar="NAME",
    )  # fmt: skip
    best: str | None = setting(
        None, "What the best checkpoint is chosen by: `loss`, or a number of --metric by its name.", "run",
        metavar="NAME", shown_default="the first number of --metric; without one `loss`",
    )  # fmt: skip
    best_mode: BestMode | None = setting(
        None, "Whether the smallest or the largest is the best.", "run", shown_default="min of `loss`, max of a metric"
    )
    patience: int | None = setting(
        None, "End after so many evaluations without a better one.", "run", least=1, shown_default="never"
    )
    save_best_model: bool = setting(
        False, "Save each best evaluation's weights; those of the best are the final model.", "run"
    )
    save_every: int | None = setting(
        None, "Optimizer steps between checkpoints; 0: never.", "run", least=0, shown_default="at the end"
    )
    keep: int = setting(2, "Newest checkpoints kept, beside the best.", "run", least=1)
    async_save: bool = setting(
        False, "Write checkpoints while training goes on, from a copy in the host's memory.", "run", is_expert=True
    )
    track: tuple[str, ...] = setting(
        (), f"Also follow the run with {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}; repeatable.", "run", metavar="NAME"
    )
    push_to_hub: str | None = setting(
        None, "Upload the final model to this repository of the hub, made private unless it is there.", "run",
        metavar="REPO",
    )  # fmt: skip
    callback: tuple[str, ...] = setting(
        (), "A class of your own, `file.py:name`, that is told of steps, evaluations and checkpoints; repeatable.",
        "run", metavar="NAME",
    )  # fmt: skip
    on_nan: OnNan = setting(
        "stop", "When the loss or the gradient is not finite: stop, or leave the batch out.", "run", is_expert=True
    )
    grace: int = setting(
        600, "Asked to stop by a signal: time to end the step and save it.", "run", metavar="SECONDS", least=1
    )
    out: Path = setting(Path("run"), "The run's folder.", "run", metavar="DIR", is_first=True)
    resume: bool = setting(False, "Continue from the newest checkpoint in the run's folder.", "run")
    accept_changed_data: bool = setting(
        False, "Resume also on other data than the run was started with.", "run", is_expert=True
    )

    def __post_init__(self) -> None:
        check_sizes(self)
        self._check_names()
        if not 0 <= self.validation_fraction < 1:
            raise RequestError(
                f"--validation-fraction is {self.validation_fraction}",
                because="it is the part of the data that is not trained on: at least 0, less than 1",
            )
        for name in self.track:
            if name not in TRACKERS:
                raise RequestError(f"--track is {name}", because=f"it must be one of {', '.join(TRACKERS)}")
        if self.steps is not None and self.epochs is not None:
            raise RequestError("--steps and --epochs were both given", hint="leave one of them out")
        self._check_stream()
        self._check_schedule()
        self._check_best()
        if self.steps is not None:
            self.curve(1.0, self.steps)

    def _check_names(self) -> None:
        """Names of files are bytes; Python has those that are no text in the current encoding as surrogates."""
        for field in fields(self):
            value = getattr(self, field.name)
            for name in map(str, value if isinstance(value, tuple) else (value,)):
                try:
                    name.encode()
                except UnicodeEncodeError:
                    shown = os.fsencode(name).decode(errors="backslashreplace")
                    raise RequestError(
                        f"{flag_of(field.name)} {shown} is not UTF-8",
                        because="what a run was asked for is kept as text",
                        hint="rename it, or use a link of another name; if it is UTF-8, unset PYTHONUTF8",
                    ) from None

    def _check_stream(self) -> None:
        """What is not known of data that is read while training."""
        if self.stream and self.epochs is not None:
            raise RequestError(
                "--epochs was given with --stream",
                because="how many samples a stream has is known when all of it was read",
                hint="say how long to train: --steps N",
            )
        if self.stream and self.limit is not None:
            raise RequestError("--limit was given with --stream", hint="--steps N ends the run")

    def check_length(self) -> None:
        """Whether it is known how long to train.

        Raises:
            RequestError: it is not.
        """
        if self.stream and self.steps is None:
            raise RequestError(
                "--stream was given without --steps",
                because="how many samples a stream has is known when all of it was read",
                hint="say how long to train: --steps N",
            )

    def _check_schedule(self) -> None:
        learning_rate.check_options(
            self.schedule, self.warmup_ratio, self.min_lr_ratio, self.decay_ratio, self.schedule_power
        )
        if self.warmup_ratio is not None and self.warmup_steps:
            raise RequestError("--warmup-steps and --warmup-ratio were both given", hint="leave one of them out")

    def _check_best(self) -> None:
        """Whether there is something that the best is chosen by."""
        asked = {
            "--metric": self.metric, "--patience": self.patience, "--save-best-model": self.save_best_model or None,
        }  # fmt: skip
        flag = next((flag for flag, value in asked.items() if value is not None), None)
        if flag is not None and self.eval_every == 0:
            raise RequestError(f"{flag} was given with --eval-every 0", because="there is no evaluation to look at")
        if self.patience is not None and self.eval_every is None:
            raise RequestError(
                "--patience was given without --eval-every",
                because="the only evaluation is at the end",
                hint="add --eval-every N",
            )
        if self.best not in (None, "loss") and self.metric is None:
            raise RequestError(
                f"--best {self.best} was given without --metric",
                because="without a metric of your own, only `loss` is measured",
                hint="add --metric FILE.py:NAME",
            )
        if self.save_best_model and self.save_every == 0:
            raise RequestError(
                "--save-best-model was given with --save-every 0",
                because="the best weights are kept in a checkpoint",
                hint="leave --save-every out",
            )

    def curve(self, peak: float, steps: int) -> Curve:
        """The learning rate over a run of so many optimizer steps.

        Raises:
            RequestError: the schedule does not go with a run of this length.
        """
        total = self.schedule_steps or steps
        warmup = self.warmup_steps if self.warmup_ratio is None else ceil(self.warmup_ratio * total)
        is_decaying, decay = self.schedule == "warmup_stable_decay", self.decay_ratio
        curve = Curve(
            peak=peak, schedule=self.schedule, warmup_steps=warmup, total_steps=total, min_ratio=self.min_lr_ratio,
            decay_steps=ceil((learning_rate.DECAY_RATIO if decay is None else decay) * total) if is_decaying else 0,
            power=1.0 if self.schedule_power is None else self.schedule_power,
        )  # fmt: skip
        learning_rate.check_length(curve, steps, "--steps" if self.schedule_steps is None else "--schedule-steps")
        return curve

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.out / "checkpoints"

    def record(self) -> bytes:
        """The text of `train.json`: what a resumed run need not be told again."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_ONE_START}
        return msgspec.json.format(msgspec.json.encode(values | {"out": str(self.out)}), indent=2) + b"\n"

    def arguments(self) -> list[str]:
        """The flags that say the same: what launchers hand to the ranks."""
        arguments: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                arguments.append(flag_of(field.name if value else f"no_{field.name}"))
            else:
                for each in value if isinstance(value, tuple) else (value,):
                    arguments += [flag_of(field.name), str(each)]
        return arguments

    def rank_words(self, folder: Path) -> list[str]:
        """The same for a command line of any length: where they are many, one word that names a file in `folder`.

        Raises:
            RequestError: that file cannot be written.
        """
        words = self.arguments()
        if sum(map(len, words)) <= MOST_CHARACTERS:
            return words
        path = folder.absolute() / "arguments"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.write_file(path, b"\0".join(map(os.fsencode, words)))
        except OSError as error:
            raise RequestError(f"cannot write {path}", because=str(error.strerror)) from None
        return [f"@{path}"]


_WARMUPS = ("warmup_steps", "warmup_ratio")
_OF_ONE_START = ("resume", "accept_changed_data")  # not of the run, and so not in its record

DATA_NAMES = (
    "data", "text_column", "label_column", "source_column", "target_column", "tokenizer", "limit", "skip_bad_rows",
    "too_long", "format", "chat_template", "train_on", "stream", "shuffle_buffer",
)  # fmt: skip
SAMPLE_NAMES = (*DATA_NAMES, "validation_data", "validation_fraction")  # what is not kept for validation is trained on


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How `frugal train` starts the ranks."""

    master_port: int | None = setting(
        None, "Where ranks meet.", "launch", least=1, most=65535, shown_default="a free port", is_expert=True
    )
    ssh_port: int | None = setting(
        None, "With --hostfile: where ssh listens on the nodes.", "launch", least=1, most=65535, is_expert=True
    )
    nic: str | None = setting(
        None, "Several nodes: the network interface to talk over, such as eth0.", "launch", metavar="NAME",
        is_expert=True,
    )  # fmt: skip
    max_restarts: int = setting(0, "After a crash, go on so many times.", "launch", least=0)
    elastic: bool = setting(False, "With --max-restarts: plan anew when GPUs or hosts are gone.", "launch")

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.elastic and not self.max_restarts:
            raise RequestError("--elastic was given without --max-restarts", hint="add --max-restarts 3")


def run_settings(flags: Mapping[str, Any], file: Mapping[str, Any]) -> RunSettings:
    """The settings that flags and the table `[train]` of frugal.toml give; flags win, and others' names are ignored.

    Raises:
        RequestError: they cannot be.
    """
    rows = settings_of(RunSettings)
    _check_table(file)
    given = {name: value for name, value in flags.items() if name in rows and value not in (None, ())}
    settings = {name: value for name, value in file.items() if name in rows} | given
    for one, other in (("steps", "epochs"), ("epochs", "steps"), *(_WARMUPS, _WARMUPS[::-1])):
        if one in given and other not in given:  # what the file says of the other one is overruled
            settings.pop(other, None)
    for name, value in settings.items():
        if rows[name].is_repeatable:
            settings[name] = (value,) if isinstance(value, str) else tuple(value)
    if "out" in settings:
        settings["out"] = Path(settings["out"])
    return RunSettings(**settings)


def launch_settings(flags: Mapping[str, Any], file: Mapping[str, Any]) -> LaunchSettings:
    """The same, of how to start the ranks."""
    rows = settings_of(LaunchSettings)
    given = {name: value for name, value in flags.items() if name in rows and value is not None}
    return LaunchSettings(**{name: value for name, value in file.items() if name in rows} | given)


def _check_table(file: Mapping[str, Any]) -> None:
    """Whether [train] may say so."""
    rows = {**settings_of(RunSettings), **settings_of(LaunchSettings)}
    for name, value in file.items():
        if name not in rows:
            raise unknown_setting(name, value, rows, place=" in [train]", command="frugal train")
        rows[name].check(value, " in [train]")


def earlier_settings(folder: Path) -> dict[str, Any]:
    """What the run in `folder` was asked for, without what says nothing; empty where there is no record.

    Raises:
        RequestError: the record cannot be read.
    """
    path = folder / RECORD
    try:
        record = msgspec.json.decode(files.read_regular(path), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RequestError(f"cannot read what the run in {folder} was asked for", because=f"{path}: {reason}") from None
    return {name: value for name, value in record.items() if value not in (None, [])}
