"""Checkpoints of any Python are read by any other, and none asks for more than plain data and DeepSpeed's scalers."""

import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from frugal.deepspeed_adapter import checkpoint_files
from frugal.deepspeed_adapter.checkpoint_files import CheckpointWriter

DEBIANS = Path("/usr/bin/python3")
BY_NAME = (  # by Python 3.11.2 of `{"zero_stage": ZeroStageEnum.weights}`
    b"\x80\x02}q\x00X\n\x00\x00\x00zero_stageq\x01c__builtin__\ngetattr\nq\x02cdeepspeed.runtime.zero.config\n"
    b"ZeroStageEnum\nq\x03X\x07\x00\x00\x00weightsq\x04\x86q\x05Rq\x06s."
)
PICKLED = """
import pickle, sys, types
for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.zero.config"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
exec(
    "from enum import Enum\\nclass ZeroStageEnum(int, Enum):\\n    weights = 3",
    module.__dict__ | {"__name__": name}, module.__dict__,
)
module.ZeroStageEnum.__module__ = name
sys.stdout.buffer.write(pickle.dumps({"zero_stage": module.ZeroStageEnum.weights}, protocol=2))
"""


def written(path: Path, content: bytes) -> Path:
    """A file of torch.save's with another pickle in it."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, kept in entries.items():
            archive.writestr(name, content if name.endswith("data.pkl") else kept)
    return path


def test_a_checkpoint_of_python_3_11_2_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "states.pt", BY_NAME)
    assert checkpoint_files.foreign(path) == []
    assert checkpoint_files.read(path) == {"zero_stage": ZeroStageEnum.weights}


@pytest.mark.skipif(not DEBIANS.exists(), reason="the system has no Python of its own")
def test_a_checkpoint_of_the_system_s_python_is_read(tmp_path: Path) -> None:
    pickled = subprocess.run([DEBIANS, "-c", PICKLED], capture_output=True, check=True).stdout
    assert checkpoint_files.read(written(tmp_path / "states.pt", pickled)) == {"zero_stage": ZeroStageEnum.weights}


@pytest.mark.parametrize("name", [b"__class__", b"mro\x00\x00\x00\x00\x00\x00"])
def test_no_other_attribute_can_be_asked_for(name: bytes, tmp_path: Path) -> None:
    asked = BY_NAME.replace(b"\x07\x00\x00\x00weights", bytes([len(name)]) + b"\x00\x00\x00" + name)
    with pytest.raises(pickle.UnpicklingError, match="no ZeRO stage"):
        checkpoint_files.read(written(tmp_path / "states.pt", asked))


def test_an_enum_of_deepspeed_is_saved_and_read(tmp_path: Path) -> None:
    states = {"zero_stage": ZeroStageEnum.gradients, "nested": [(ZeroStageEnum.weights,)]}
    CheckpointWriter().save(states, tmp_path / "states.pt")
    assert checkpoint_files.foreign(tmp_path / "states.pt") == []
    assert checkpoint_files.read(tmp_path / "states.pt") == states
