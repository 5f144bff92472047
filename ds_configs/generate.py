"""Writes what frugal decides in the cases of cases.toml: `python ds_configs/generate.py [FOLDER [CASE ...]]`."""

import json
import sys
import tomllib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from frugal.config.schema import understand
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.planner import make_plan
from frugal.errors import NothingFitsError
from frugal.planning.report import summary

HERE = Path(__file__).parent


def cases(*, slow: bool) -> dict[str, dict[str, Any]]:
    """The settings of each case that is slow to plan, or of each that is not."""
    known = tomllib.loads((HERE / "cases.toml").read_text())
    return {name: settings for name, settings in known.items() if settings.pop("slow", False) == slow}


def generate(folder: Path, wanted: dict[str, dict[str, Any]]) -> None:
    """NAME.txt of every case into `folder`, and NAME.json where there is a plan."""
    with closing(workers()) as pool:  # one for all: starting processes takes longer than most plans
        for name, settings in wanted.items():
            try:
                plan = make_plan(*understand(settings), dry_run=partial(DryRunSource, pool=pool))
            except NothingFitsError as error:
                (folder / f"{name}.txt").write_text(f"error: {error}\n")
                continue
            (folder / f"{name}.json").write_text(json.dumps(deepspeed_config(plan), indent=2) + "\n")
            (folder / f"{name}.txt").write_text(summary(plan) + "\n")


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or [str(HERE)]
    known = cases(slow=False) | cases(slow=True)
    generate(Path(folder), {name: known[name] for name in names or known})
