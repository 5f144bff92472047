"""What differs between runs, and whether their numbers may be held against each other."""

from collections.abc import Sequence
from dataclasses import fields

from frugal.errors import RequestError
from frugal.report.run import RecordedRun

MOST_RUNS = 9
"""As many as a chart has colours and dashes for."""


def check(runs: Sequence[RecordedRun]) -> None:
    """Refuse more runs than one page can compare.

    Raises:
        RequestError: there are too many.
    """
    if len(runs) > MOST_RUNS:
        raise RequestError(
            f"{len(runs)} runs are too many for one page",
            because=f"a chart has colours and dashes for {MOST_RUNS} of them",
            hint="compare fewer at a time",
        )


def speaks_one_unit(runs: Sequence[RecordedRun]) -> bool:
    """Return whether losses and speeds of all runs are of the same unit."""
    return len({run.unit for run in runs}) == 1


def renamed(names: Sequence[str], longer: Sequence[str]) -> list[str]:
    """Return the names, longer ones where two are the same."""
    return [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]


def differing(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return rows of settings and versions that are not the same in all runs: the name, and its value in each."""
    return [row for row in everything(runs) if len(set(row[1:])) > 1]


def everything(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return rows of all settings and versions: the name, and its value in each run."""
    sources = [
        {
            **run.facts,
            **(_planned(run) if len(runs) > 1 else {}),
            **{f"version of {name}": value for name, value in run.versions.items()},
        }
        for run in runs
    ]
    names = list(dict.fromkeys(name for facts in sources for name in facts))
    return [[name.replace("_", " "), *(facts.get(name, "-") for facts in sources)] for name in names]


def _planned(run: RecordedRun) -> dict[str, str]:
    """Return each choice of the planned strategy by name."""
    if run.plan is None:
        return {}
    strategy = run.plan.strategy
    decided = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    decided["activation_checkpointing"] = strategy.checkpointing  # with its layers
    return {f"planned {name}": str(value) for name, value in decided.items() if name != "layer_modes"}
