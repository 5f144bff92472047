"""`python -m bench.check.public`: `frugal check` on public configurations, against a reading of each by hand.

`public.json` lists files of public repositories by commit and SHA-256, and for each what a reader expects who has not
seen frugal's answer: the tool, whether memory can be checked and otherwise which field forbids it, and the batch. Files
marked `is_drawn` were drawn by a seed (others by the next ones, the last 169 of repositories that were new) after the
others had been compared and frugal mended; `first` is what was wrong with frugal's first answer. A reading that turned
out to be wrong says so in `reread`.

    python -m bench.check.public [--folder FOLDER] [--only WORD]

FOLDER has the files as OWNER/NAME/PATH; those that are missing are fetched from GitHub. Nothing of them is kept in the
repository. The model is a small Llama for all, so that an answer depends on the settings and on no download. Results go
to `bench/results/check-public.json`.
"""

import argparse
import hashlib
import json
import os
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import chdir, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from bench.environment import environment
from frugal.dryrun.client import workers
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError, RequestError
from frugal.tools.check.checked import Check, check
from frugal.tools.check.gather import gather

LIST = Path(__file__).with_name("public.json")
RESULTS = Path(__file__).parents[1] / "results" / "check-public.json"
GPUS, MICRO_BATCH, STEPS = 8, 2, 1
"""Flags for what a file does not say."""
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 1 << 20, "tie_word_embeddings": False,
}  # fmt: skip

GROUPS = ("read_before", "drawn", "drawn_of_other_repositories")
"""Files that were read and compared first; files drawn from the same repositories afterwards, and from others."""

Outcome = Literal["verdict", "not checked", "refused", "no verdict"]


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome that a reader expects of `frugal check`.

    Attributes:
        outcome: `verdict`, that it fits or does not; `not checked`, with the batch and the reason; `refused`, an error,
            because it is no training or no file of a tool that is read; `no verdict`, either of these two.
        tool: as in `Settings.tool`; empty if that is open.
        batch: micro-batch x accumulation steps x GPUs, `/ N` if N GPUs share each sample, `?` for what the file does
            not say; or `= N`, the whole; empty if the file says nothing that can be compared.
        gpus: to be checked on, where the file needs a number of its own.
        fields: one of these words is in the reason why it is not checked.
    """

    outcome: Outcome
    tool: str = ""
    batch: str = ""
    gpus: int | None = None
    fields: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[int | None, ...]:
        """Micro-batch, accumulation steps and GPUs, None for what the file does not say."""
        if "x" not in self.batch:
            return None, None, None
        return tuple(None if part.strip() == "?" else int(part) for part in self.batch.partition("/")[0].split("x"))

    @property
    def flags(self) -> dict[str, Any]:
        """Settings that a user has to give."""
        micro, steps, _ = self.parts
        of_nobody = not self.batch and self.outcome == "verdict"
        return {
            **({"precision": "bf16"} if self.tool == "DeepSpeed" else {}),  # of an `auto` that no tool fills in
            **({"micro_batch": MICRO_BATCH} if micro is None and ("x" in self.batch or of_nobody) else {}),
            **({"accumulation_steps": STEPS} if steps is None and ("x" in self.batch or of_nobody) else {}),
        }

    @property
    def global_batch(self) -> int | None:
        """Samples of an optimizer step, with the flags for what the file does not say; None if it is not compared."""
        if self.batch.startswith("="):
            return int(self.batch.removeprefix("="))
        if not self.batch:
            return None
        given = zip(self.parts, (MICRO_BATCH, STEPS, self.gpus or GPUS), strict=True)
        micro, steps, gpus = (flag if part is None else part for part, flag in given)
        return micro * steps * gpus // int(self.batch.partition("/")[2] or 1)


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of the list. `folder`: of the repository, where the training starts; `given`: files that are given with
    it; `needs`: files that it names. Paths are the repository's."""

    repository: str
    path: str
    reading: Reading
    folder: str = ""
    given: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    is_drawn: bool = False
    first: tuple[str, ...] = ()
    reread: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """All its files."""
        return self.path, *self.given, *self.needs


class Repository(msgspec.Struct, frozen=True, kw_only=True):
    """A repository at a commit. `files`: SHA-256 by path."""

    commit: str
    url: str
    files: dict[str, str]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """The whole list. `seed`: of the files that were drawn."""

    seed: int
    repositories: dict[str, Repository]
    rows: tuple[Row, ...]

    @classmethod
    def kept(cls) -> "Listed":
        """Return the list of this repository."""
        return msgspec.json.decode(LIST.read_bytes(), type=cls)


class Seen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """frugal's answer. `why`: the reasons of an outcome other than a verdict; `said_gpus`: GPUs by the file alone."""

    outcome: Literal["fits", "does not fit", "not checked", "refused", "traceback"]
    tool: str = ""
    global_batch: int | None = None
    said_gpus: int | None = None
    why: str = ""


def fetched(folder: Path, name: str, repository: Repository, paths: Sequence[str]) -> None:
    """Put the files of a repository into `folder`, where they are not there yet, and compare their SHA-256."""
    for path in paths:
        file = folder / name / path
        if not file.exists():
            with urllib.request.urlopen(repository.url.format(path=quote(path))) as answer:
                content = answer.read()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != repository.files[path]:
            raise SystemExit(f"{file} has SHA-256 {found}, not that of {name} at {repository.commit}")


def checked(row: Row, folder: Path, model: Path, pool: Pool) -> tuple[Check, int | None]:
    """Check a row as a user in its folder does, and return the result with the number of GPUs that the files say."""
    reading = row.reading
    with chdir(folder / row.repository / row.folder):
        files = [Path(os.path.relpath(path, row.folder or ".")) for path in (row.path, *row.given)]
        settings, documents = gather(files, {"model": str(model), **reading.flags})
        said = None if settings.gpus is None else settings.gpus * (settings.nodes or 1)
        hardware: dict[str, Any] = {"mem": "80G"}
        if reading.parts[2] is None and not (said and not reading.batch):
            hardware |= {"gpus": reading.gpus or GPUS}
        return check(settings, documents, hardware, with_plan=False, pool=pool), said


def seen(row: Row, folder: Path, model: Path, pool: Pool) -> Seen:
    """Return frugal's answer on a row."""
    try:
        done, said = checked(row, folder, model, pool)
    except FrugalError as error:
        return Seen(outcome="refused", why=" ".join(str(error).split()))
    except Exception:  # the finding itself
        return Seen(outcome="traceback", why=traceback.format_exc(limit=-3))
    errors = [each.text for each in done.findings if each.level == "error"]
    why = "; ".join((*(each.text for each in done.settings.refusals), *errors))
    does_not_start = done.exit_code == RequestError.exit_code
    outcome: Any = "not checked" if does_not_start else "fits" if done.exit_code == 0 else "does not fit"
    batch = done.arithmetic.global_batch
    return Seen(outcome=outcome, tool=done.settings.tool, global_batch=batch, said_gpus=said, why=why)


def differences(reading: Reading, answer: Seen) -> list[str]:
    """Return how frugal's answer differs from the reading."""
    has_verdict = answer.outcome in ("fits", "does not fit")
    found = []
    if answer.outcome == "traceback":
        found.append("a traceback")
    elif reading.outcome == "verdict" and not has_verdict:
        found.append(f"no verdict: {answer.why}")
    elif reading.outcome != "verdict" and has_verdict:
        found.append("a verdict, though it is not to be checked")
    elif reading.outcome in ("not checked", "refused") and answer.outcome != reading.outcome:
        found.append(f"{answer.outcome} instead of {reading.outcome}: {answer.why}")
    elif reading.outcome == "not checked" and not any(word in answer.why.lower() for word in reading.fields):
        found.append(f"another reason: {answer.why}")
    if reading.tool and answer.tool and answer.tool != reading.tool:
        found.append(f"{answer.tool} instead of {reading.tool}")
    wanted = reading.global_batch
    if None not in (wanted, answer.global_batch) and wanted != answer.global_batch:
        found.append(f"a global batch of {answer.global_batch} instead of {wanted}")
    if "x" in reading.batch and reading.parts[2] is None and answer.said_gpus is not None:
        found.append(f"{answer.said_gpus} GPUs, which the file does not say")
    return found


def summary(listed: Listed, answers: Sequence[Seen]) -> dict[str, Any]:
    """Return the counts: of files, and of answers that differ, at first and now, for files read and drawn."""
    figures: dict[str, Any] = {}
    first = {row.repository for row in listed.rows if not row.is_drawn}
    groups: tuple[Callable[[Row], bool], ...] = (
        lambda row: not row.is_drawn,
        lambda row: row.is_drawn and row.repository in first,
        lambda row: row.repository not in first,
    )
    for name, belongs in zip(GROUPS, groups, strict=True):
        pairs = [pair for pair in zip(listed.rows, answers, strict=True) if belongs(pair[0])]
        figures[name] = {
            "files": len(pairs),
            "outcomes": dict(Counter(answer.outcome for _, answer in pairs).most_common()),
            "wrong_at_first": sum(bool(row.first) for row, _ in pairs),
            "wrong_now": sum(bool(differences(row.reading, answer)) for row, answer in pairs),
            "verdicts_past_a_field": sum(
                answer.outcome in ("fits", "does not fit") and row.reading.outcome != "verdict" for row, answer in pairs
            ),
            "wrong_batches": sum(
                None not in (row.reading.global_batch, answer.global_batch)
                and row.reading.global_batch != answer.global_batch
                for row, answer in pairs
            ),
            "batches_compared": sum(
                None not in (row.reading.global_batch, answer.global_batch) for row, answer in pairs
            ),
            "tracebacks": sum(answer.outcome == "traceback" for _, answer in pairs),
            "readings_corrected": sum(bool(row.reread) for row, _ in pairs),
        }
    return figures | {"repositories": len({row.repository for row in listed.rows})}


def main() -> None:
    """Check all files, print the differences and the counts, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/public"), help="of the files")
    parser.add_argument("--only", default="", metavar="WORD", help="files with WORD in their name; writes no results")
    asked = parser.parse_args()
    listed, folder = Listed.kept(), asked.folder.resolve()
    rows = [row for row in listed.rows if asked.only in f"{row.repository}/{row.path}"]
    answers = []
    with TemporaryDirectory() as scratch, closing(workers()) as pool:
        model = Path(scratch) / "config.json"
        model.write_text(json.dumps(MODEL))
        for row in rows:
            fetched(folder, row.repository, listed.repositories[row.repository], row.paths)
            answers.append(seen(row, folder, model, pool))
            for difference in differences(row.reading, answers[-1]):
                print(f"{row.repository}/{row.path}: {difference}", flush=True)
    if asked.only:
        return
    figures = summary(listed, answers)
    print(json.dumps(figures, indent=1))
    lines = [
        json.dumps({"repository": row.repository, "path": row.path, **msgspec.to_builtins(answer)})
        for row, answer in zip(rows, answers, strict=True)
    ]
    head = json.dumps(environment("python -m bench.check.public") | {"summary": figures}, indent=1)
    RESULTS.write_text(head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
