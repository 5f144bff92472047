"""Atomic writes: a name has all of its content, or what it had before."""

from pathlib import Path

import pytest

from frugal import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_and_nothing_else_is_left(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for data in (b"first", b"second"):
        files.write_file(path, data, durable=durable)
        assert path.read_bytes() == data
    assert names(tmp_path) == ["plan.json"]


def test_a_failed_write_leaves_the_old_content_and_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError) as caught:
        files.write_file(tmp_path / "taken", b"content")
    assert caught.value.filename == str(tmp_path / "taken")
    assert names(tmp_path) == ["taken"]


def test_a_folder_replaces_one_of_the_same_name(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "step.tmp").mkdir()
        (tmp_path / "step.tmp" / "file").write_text(text)
        files.replace_own_folder(tmp_path / "step.tmp", tmp_path / "step")
        assert (tmp_path / "step" / "file").read_text() == text
    assert names(tmp_path) == ["step", "written.json"]
