"""Commands that tests start have their imports done."""

import os
import subprocess
import sys

import pytest

from tests import forked


def test_a_command_is_forked_whatever_was_imported_before() -> None:
    """Otherwise each of some hundred would spend seconds on imports, and nobody would notice."""
    import torch._inductor.runtime.cache_dir_utils  # noqa: F401 - sets a variable

    assert forked._can_be_forked([sys.executable, "-m", "frugal", "train"], dict(os.environ))


def test_one_with_other_settings_of_the_interpreter_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUTF8", "0")
    assert not forked._can_be_forked([sys.executable, "-m", "frugal", "train"], dict(os.environ))
    assert not forked._can_be_forked([sys.executable, "-c", "import frugal"], dict(os.environ))


def test_it_is_the_command_s_own_process_with_its_input_output_and_code() -> None:
    words = [sys.executable, "-m", "frugal", "explain", "--no-such-flag"]
    done = subprocess.run(words, capture_output=True, text=True, input="", timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and "--no-such-flag" in done.stderr
