"""Output on a terminal, and in a pipe."""

import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import pytest

from frugal.cli import options, run, terminal
from frugal.planning.plan import UNPROVEN
from tests.commands import Capture, frugal_plan, with_formulas
from tests.planning.synthetic import SMALL

CARDS = ["--gpus", "4", "--mem", "12G"]
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, formulas in place of dry runs, and a cache that knows no other plans."""
    return with_formulas(tmp_path, monkeypatch, **SMALL, drafts=True)


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command whose standard output is a terminal of so many columns; what is written there."""

    def on(columns: int, *arguments: str, **environment: str) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ours, theirs = os.openpty()
        with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", terminal)
            with ThreadPoolExecutor(1) as threads:
                written = threads.submit(_read, ours)
                try:
                    code = run(arguments)
                finally:  # or the thread would wait for ever
                    print("\x04", flush=True)
        os.close(ours)
        assert code == 0
        return written.result().replace("\r\n", "\n")

    return on


def _read(terminal: int) -> str:
    """Return what is written to it up to an end of transmission."""
    written = b""
    while b"\x04" not in written:
        written += os.read(terminal, 1 << 12)
    return written.partition(b"\x04")[0].decode()


def plain(written: str) -> list[str]:
    return [line.rstrip() for line in _CODES.sub("", written).splitlines()]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_verdict_of_a_terminal_is_nine_lines_with_a_bar(on_terminal: Callable[..., str], columns: int) -> None:
    lines = plain(on_terminal(columns, "plan", *CARDS, "--global-batch", "480"))
    assert max(map(len, lines)) <= columns
    verdict = lines[lines.index("480 samples = 4 GPUs x micro-batch 10 x 12 accumulation steps") :]
    names = [line[:7].strip() for line in verdict[1:]]
    assert names == ["runs", "fits", "", "step", "rate", "binds", "helps", "proven"]
    assert verdict[-1] == "proven by a dry run of DeepSpeed's own code; more: `frugal plan -v`"
    bar = verdict[3].strip()
    assert len(bar) == columns - 7
    assert {"a", "x"} <= set(bar) and "a activations 9.54 GiB a" in bar


def test_files_are_named_with_the_proof_in_nine_lines_and_without_one_when_it_was_given(
    on_terminal: Callable[..., str],
) -> None:
    asked = ("plan", *CARDS, "--global-batch", "480", "-o", "run")
    proven, kept = (plain(on_terminal(80, *asked)) for _ in range(2))
    head = "480 samples = 4 GPUs x micro-batch 10 x 12 accumulation steps"
    files = "run/plan.json, run/ds_config.json and run/plan.html"
    assert len(proven[proven.index(head) :]) == 9
    assert proven[-1] == f"proven by a dry run; wrote {files}"
    assert kept[kept.index(head) + 8 :] == [f"wrote  {files}"]


def test_a_draft_is_shown_before_it_is_dry_run_and_what_replaces_it_as_well(
    on_terminal: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_formulas(here, monkeypatch, **SMALL, drafts=True, error=1.5)
    lines = plain(on_terminal(80, "plan", *CARDS, "--global-batch", "480"))
    heads = [line for line in lines if line.startswith("480 samples")]
    refused = [i for i, line in enumerate(lines) if line.startswith("draft  refused, a dry run takes more")]
    assert len(heads) == len(refused) + 1 > 1
    assert lines.index(heads[0]) < refused[0] < lines.index(heads[-1])
    assert sum(line.startswith("proven") for line in lines) == 1


def test_what_a_dry_run_adds_for_short_samples_does_not_refuse_the_draft(
    on_terminal: Callable[..., str], here: Path
) -> None:
    (here / "lengths.json").write_text(json.dumps({"100": 900, "512": 100}))
    lines = plain(on_terminal(120, "plan", *CARDS, "--global-batch", "480", "--lengths", "lengths.json"))
    assert any(line.startswith("proven") for line in lines)
    assert not any(line.startswith("draft") for line in lines)


def test_a_draft_alone_says_that_nothing_has_proven_it_and_is_not_kept(capsys: Capture, here: Path) -> None:
    code, out, _ = frugal_plan(capsys, *CARDS, "--draft", "-o", "run")
    assert code == 0
    assert "note   a draft: its memory is arithmetic, and no dry run has proven it\n" in out
    draft = json.loads((here / "run" / "plan.json").read_text())
    full = json.loads(frugal_plan(capsys, *CARDS, "--json")[1])
    assert [note for note in draft["warnings"] if note not in full["warnings"]] == [UNPROVEN]
    assert draft["batch"] == full["batch"]


def test_a_draft_and_its_plan_say_each_note_once(on_terminal: Callable[..., str], capsys: Capture) -> None:
    drafted = " ".join(" ".join(plain(on_terminal(120, "plan", *CARDS, "--global-batch", "500"))).split())
    assert drafted.count("ds_config.json alone would train 520 samples per step, not 500") == 1
    _, kept, _ = frugal_plan(capsys, *CARDS, "--global-batch", "500")
    for note in kept.split("\n\n")[0].splitlines():
        assert " ".join(note.split()) in drafted
    _, draft, _ = frugal_plan(capsys, *CARDS, "--global-batch", "500", "--seq-len", "1000", "--draft")
    assert "ds_config.json alone would train " in draft


def test_nothing_but_letters_is_left_of_the_bar_without_colours(on_terminal: Callable[..., str]) -> None:
    on_terminal(80, "plan", *CARDS)  # the next ones know the plan
    coloured = on_terminal(80, "plan", *CARDS)
    without = on_terminal(80, "plan", *CARDS, NO_COLOR="1")
    colour = re.compile(r"\x1b\[[0-9;]*(38|48);")
    assert colour.search(coloured) and not colour.search(without)
    assert plain(coloured) == plain(without)


@pytest.mark.parametrize("command", [["plan", *CARDS, "-v"], ["explain", *CARDS]])
def test_tables_keep_within_a_terminal_and_lose_no_word(
    on_terminal: Callable[..., str], capsys: Capture, command: list[str]
) -> None:
    lines = plain(on_terminal(80, *command))
    assert max(map(len, lines)) <= 80
    capsys.readouterr()
    assert run(command) == 0
    in_a_pipe = capsys.readouterr().out.split()
    assert set(in_a_pipe) <= set(" ".join(lines).split())


def test_a_pipe_gets_the_same_lines_whatever_the_terminal_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = frugal_plan(capsys, *CARDS)
    for columns, forced in (("40", "1"), ("200", "")):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", forced)
        assert frugal_plan(capsys, *CARDS) == (0, out, "")
    assert "\x1b" not in out


def test_a_pipe_is_told_once_it_has_to_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE", 0.01)
    said = Event()
    monkeypatch.setattr(terminal.click, "echo", lambda *words, **how: (print(*words, file=sys.stderr), said.set()))
    with terminal.waiting("tracing gpt2"):
        assert said.wait(60)
    assert capsys.readouterr() == ("", "tracing gpt2 ...\n")


def test_the_line_says_how_long_it_took_the_last_time_and_for_which_model(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same model, if there was one; nothing is estimated where nothing was measured."""
    lines: list[str] = []
    monkeypatch.setattr(options, "waiting", lambda line: nullcontext(lines.append(line)))
    monkeypatch.setattr(options, "PATIENCE", 0.0)
    for number, model in enumerate(("gpt2", "distilgpt2", "gpt2")):
        assert frugal_plan(capsys, *CARDS, "--model", model, "--global-batch", str(64 + number))[0] == 0
    traced, *again = [line for line in lines if line.startswith("tracing")]
    assert traced == "tracing gpt2 and searching; its trace is kept for other plans"
    ends = [re.sub(r"[\d.]+ (ms|s)", "TIME", line) for line in again]
    assert ends == [f"tracing {model} and searching, the last took TIME (gpt2)" for model in ("distilgpt2", "gpt2")]
    dry_run, *again = [line for line in lines if line.startswith("dry-running")]
    assert dry_run == "dry-running gpt2"
    assert all("the last took" in line for line in again)
