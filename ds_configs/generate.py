"""Writes what frugal decides in the cases of cases.toml: `python ds_configs/generate.py [FOLDER]`, from the root."""

import json
import sys
import tomllib
from pathlib import Path

import frugal
from frugal.planning.ds_config import deepspeed_config
from frugal.planning.report import report

HERE = Path(__file__).parent


def generate(folder: Path) -> None:
    """NAME.json and NAME.txt of every case, into `folder`."""
    for name, settings in tomllib.loads((HERE / "cases.toml").read_text()).items():
        plan = frugal.plan(**settings, calibration=False)
        (folder / f"{name}.json").write_text(json.dumps(deepspeed_config(plan), indent=2) + "\n")
        (folder / f"{name}.txt").write_text(report(plan) + "\n")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
