"""The list of public configurations is whole, and docs/check.md tells the kept answers of `frugal check`."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.check import plans, public
from bench.check.public import Listed, Reading, Repository, Seen, differences, fetched, summary
from tests import readme

LIST = Listed.kept()
RESULTS: dict[str, Any] = json.loads(public.RESULTS.read_text())


def test_the_list_names_each_file_by_commit_and_hash() -> None:
    names = Counter((row.repository, row.path) for row in LIST.rows)
    assert max(names.values()) == 1 and sum(not row.is_drawn for row in LIST.rows) >= 200
    assert len({row.repository for row in LIST.rows}) >= 10 and sum(row.is_drawn for row in LIST.rows) >= 60
    for row in LIST.rows:
        repository = LIST.repositories[row.repository]
        assert set(row.paths) <= repository.files.keys()
        assert repository.commit in repository.url and row.repository in repository.url
    hashes = [digest for each in LIST.repositories.values() for digest in each.files.values()]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes)
    assert all(re.fullmatch("[0-9a-f]{40}", each.commit) for each in LIST.repositories.values())


def test_each_reading_says_what_can_be_compared() -> None:
    for row in LIST.rows:
        reading = row.reading
        assert bool(reading.fields) == (reading.outcome == "not checked"), row.path
        assert reading.outcome != "refused" or not reading.batch, row.path
        assert all(word == word.lower() for word in reading.fields)


def test_the_kept_answers_are_those_of_the_list() -> None:
    answers = [
        msgspec.convert({key: value for key, value in row.items() if key not in ("repository", "path")}, Seen)
        for row in RESULTS["rows"]
    ]
    assert [(row["repository"], row["path"]) for row in RESULTS["rows"]] == [(r.repository, r.path) for r in LIST.rows]
    assert summary(LIST, answers) == RESULTS["summary"]
    for figures in RESULTS["summary"].values():
        if isinstance(figures, dict):
            assert figures["wrong_now"] == figures["verdicts_past_a_field"] == figures["wrong_batches"] == 0
            assert figures["tracebacks"] == 0


def test_the_docs_tell_the_numbers() -> None:
    text = " ".join(readme.text("check").split())
    read, drawn, others = (RESULTS["summary"][name] for name in public.GROUPS)
    assert f"{read['files']} were read" in text and f"{read['wrong_at_first']} answers were wrong" in text
    files, wrong = (drawn[name] + others[name] for name in ("files", "wrong_at_first"))
    assert f"Of {files} drawn by a seed, {wrong} were wrong" in text
    batches = sum(each["batches_compared"] for each in (read, drawn, others))
    assert f"all {batches} batches are right" in text
    assert all(each["wrong_now"] == each["wrong_batches"] == 0 for each in (read, drawn, others))
    kept = json.loads(plans.RESULTS.read_text())
    assert kept["compared"] == kept["same"] >= 20 and f"{kept['same']} of {kept['compared']} verdicts" in text


def test_missing_files_are_fetched_and_compared_with_their_hash(tmp_path: Path) -> None:
    (tmp_path / "there" / "a b.yaml").parent.mkdir()
    (tmp_path / "there" / "a b.yaml").write_text("bf16: true\n")
    url, digest = (tmp_path / "there").as_uri() + "/{path}", hashlib.sha256(b"bf16: true\n").hexdigest()
    at_hash = [Repository(commit="c", url=url, files={"a b.yaml": each}) for each in (digest, "0" * 64)]
    fetched(tmp_path, "owner/name", at_hash[0], ["a b.yaml"])
    assert (tmp_path / "owner" / "name" / "a b.yaml").read_text() == "bf16: true\n"
    with pytest.raises(SystemExit, match="not that of owner/name at c"):
        fetched(tmp_path, "owner/name", at_hash[1], ["a b.yaml"])


@pytest.mark.parametrize(
    ("reading", "answer", "found"),
    [
        (Reading(outcome="verdict"), Seen(outcome="fits"), []),
        (Reading(outcome="verdict"), Seen(outcome="traceback"), ["a traceback"]),
        (Reading(outcome="not checked", fields=("fsdp",)), Seen(outcome="fits"), ["a verdict, though"]),
        (Reading(outcome="not checked", fields=("a",)), Seen(outcome="not checked", why="images"), []),
        (Reading(outcome="not checked", fields=("b",)), Seen(outcome="not checked", why="images"), ["another reason"]),
        (Reading(outcome="refused"), Seen(outcome="not checked"), ["not checked instead of refused"]),
        (Reading(outcome="verdict", batch="2 x 4 x ?"), Seen(outcome="fits", global_batch=64), []),
        (Reading(outcome="verdict", batch="2 x 4 x 3"), Seen(outcome="fits", global_batch=8), ["a global batch of 8"]),
        (Reading(outcome="verdict", batch="2 x ? x 4 / 2"), Seen(outcome="fits", global_batch=4), []),
        (Reading(outcome="verdict", batch="= 96"), Seen(outcome="fits", global_batch=48), ["a global batch of 48"]),
        (Reading(outcome="verdict", batch="2 x 4 x ?"), Seen(outcome="fits", said_gpus=4), ["4 GPUs, which"]),
        (Reading(outcome="verdict", tool="TRL"), Seen(outcome="fits", tool="axolotl"), ["axolotl instead of TRL"]),
    ],
)  # fmt: skip
def test_each_kind_of_difference_is_found(reading: Reading, answer: Seen, found: list[str]) -> None:
    got = differences(reading, answer)
    assert len(got) == len(found) and all(a.startswith(b) for a, b in zip(got, found, strict=True))
