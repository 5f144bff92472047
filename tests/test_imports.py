"""What stands in a user's folder, and what is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from frugal.imports import python_words

ASKED = "import random, sys; random.random; print(sys.path[0])"


def test_files_in_a_users_folder_are_no_libraries_unless_python_itself_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(sys.executable).parent), *sys.path])  # as of the command `frugal`
    assert subprocess.run([*python_words(), "-c", ASKED], capture_output=True).returncode == 0
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as `python -m frugal` in a clone, which has no other path to it
    assert python_words() == [sys.executable]
