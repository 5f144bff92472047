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
        files.replace_folder(tmp_path / "step.tmp", tmp_path / "step")
        assert (tmp_path / "step" / "file").read_text() == text
    assert names(tmp_path) == ["step"]


def test_a_new_folder_is_there_once_it_is_complete(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "corpus") as temporary:
        (temporary / "train.arrow").write_text("samples")
        assert not (tmp_path / "corpus").exists()
    assert names(tmp_path) == ["corpus"] and names(tmp_path / "corpus") == ["train.arrow"]


def test_a_new_folder_that_fails_is_removed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text"), files.new_folder(tmp_path / "corpus"):
        raise ValueError("no text")
    assert names(tmp_path) == []


def test_of_two_new_folders_the_first_stays(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "corpus") as late:
        with files.new_folder(tmp_path / "corpus") as early:
            (early / "by").write_text("early")
        (late / "by").write_text("late")
    assert (tmp_path / "corpus" / "by").read_text() == "early"
    assert names(tmp_path) == ["corpus"]
