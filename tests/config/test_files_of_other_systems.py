"""Files as editors of other systems write them are read, or refused with what they are."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.plans import plan_by_hand
from frugal.config import sample_lengths
from frugal.config.hardware.build_cluster import read_hostfile
from frugal.config.run_settings import RECORD, earlier_settings
from frugal.config.schema import read_toml
from frugal.errors import RequestError
from frugal.planning.plan import Plan

FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "frugal.toml": ('model = "gpt2"\n[train]\ndata = ["ü"]\n', read_toml),
    "hosts": ("n1 slots=1  # mem=12G\nn2 slots=2\n", read_hostfile),
    "lengths.json": ('{"7": 100,\n"12": 3}\n', lambda path: sample_lengths.of(path, source="").num_tokens),
    "plan.json": (
        plan_by_hand(world_size=1, global_batch=3, micro_batch=1, zero_stage=2).to_json().decode(),
        Plan.read,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    plain = read(path)
    path.write_bytes(codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode())
    assert read(path) == plain


@pytest.mark.parametrize("name", FILES)
def test_utf_16_is_refused(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    (tmp_path / name).write_text(text, encoding="utf-16")
    with pytest.raises(RequestError, match="UTF-16"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in FILES if name != "hosts"])
def test_what_is_nested_too_deep_is_refused(name: str, tmp_path: Path) -> None:
    read = FILES[name][1]
    for opening in (b"[", b'{"a": ') if name.endswith("json") else (b"a = " + b"[" * 200_000, b"{ a = "):
        (tmp_path / name).write_bytes(opening * (1 if len(opening) > 10 else 200_000))
        with pytest.raises(RequestError):
            read(tmp_path / name)


def test_a_record_of_a_run_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(b'{"data": ' * 200_000)
    with pytest.raises(RequestError, match="cannot read the settings of the run in"):
        earlier_settings(tmp_path)
