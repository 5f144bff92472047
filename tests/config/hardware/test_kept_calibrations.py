"""The calibration that a request is planned with, and this machine's description of itself."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frugal.config.hardware import calibration, local_host
from tests.config.hardware.test_calibration import CPU, GPU

DRIVER = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPU and one GPU are calibrated; the driver is that of the GPU's calibration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    version = local_host.library_versions()["torch"]
    replace(CPU, device=local_host.cpu_name(), torch=version).write(calibration.calibration_folder())
    replace(GPU, torch=version).write(calibration.calibration_folder())
    (tmp_path / "version").write_text(DRIVER)
    monkeypatch.setattr(local_host, "_DRIVER", tmp_path / "version")


def test_cpu_ranks_go_by_this_machines_processor() -> None:
    found, _ = calibration.chosen({"device": "cpu", "gpus": 2, "mem": "2G"})
    assert found is not None and found.kind == "cpu"


def test_a_calibration_that_is_no_file_or_nested_too_deep_is_told(tmp_path: Path) -> None:
    folder = calibration.calibration_folder()
    os.mkfifo(folder / "pipe.json")
    (folder / "deep.json").write_bytes(b"[" * 200_000)
    known, notes = calibration.read_all(folder)
    assert len(known) == 2
    assert [note.split(" cannot be read")[0] for note in notes] == [
        f"the calibration {folder / name}" for name in ("deep.json", "pipe.json")
    ]


def test_a_folder_of_calibrations_that_may_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)  # root may read all folders
    known, (note,) = calibration.read_all(calibration.calibration_folder())
    assert not known and note.endswith("cannot be read and are ignored: Permission denied")


def test_the_driver_names_its_version_and_no_driver_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_host.cuda_driver() == "580.95.05"
    monkeypatch.setattr(local_host, "_DRIVER", tmp_path / "none")
    assert local_host.cuda_driver() == ""


def test_the_peak_of_the_resident_set_follows_what_a_process_takes() -> None:
    before = local_host.forget_peak_rss()
    taken = bytearray(b"x" * 50_000_000)
    del taken
    assert local_host.peak_rss() - before >= 49_000_000
