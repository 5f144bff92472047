"""`python -m bench.planning.choice`: is the strategy that frugal chooses the fastest that fits?

The machine is probed once for each number of ranks, as `frugal measure --calibrate` does. For each case the budget is
what one strategy takes in its dry run, and 2 % more; with it frugal plans. Then every strategy that fits, each with
its own best batch from the search, really trains for a few optimizer steps, in turns; the best step counts, because
other work on the machine only ever adds. Who is the fastest of many by that is so partly by chance: the chosen one and
the fastest of the others take turns once more, and the median of the ratios of these turns is the result. Goal: the
chosen one takes at most 5 % longer than the fastest, in 90 % of cases. On GPUs the cases are presets in bf16; that has
not been run yet.

`--unseen N` takes N models of random shapes and families that nobody has fitted the planner to (`choice_random`). Goal:
in 80 % of cases the plan is within 5 % of the fastest of all. Rows with `tuning` are of a version that could also try
other micro-batches and modes in a run's first steps, which kept the plan in all of them.

A table takes an hour and a half. `--ranks 1` and `--ranks 2` are its halves, and `--rest` are the cases that the file
does not have yet: with `--record` the others stay in it. `--again` only repeats the turns at the end, for all cases of
the file. Where ranks end early, what they have measured is kept.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}

from bench.planning import choice_cases, choice_random
from bench.planning.choice_cases import Case
from bench.planning.choice_worker import Again, Job, Timed
from frugal.cli.measure import calibrate
from frugal.config.hardware.calibration import Calibration, Probe
from frugal.config.hardware.cluster import ALLOCATOR_SHARE, Cluster, DeviceKind
from frugal.config.hardware.local_host import cpu_name
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.launch import local
from frugal.planning.plan import Plan
from frugal.planning.search.candidate import Candidate, SearchResult
from frugal.planning.search.search import Search

RESULTS = Path(__file__).parents[1] / "results"
ROOM = 1.02  # of what the binding strategy takes
NEAR, SHARE = 1.05, 0.9  # the goal
UNSEEN_SHARE = 0.8  # the same for models that nobody fitted the planner to
QUICK = 6  # every so manieth case


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The plans for a case: frugal's choice first, then every other strategy that fits."""

    case: Case
    request: Request
    cluster: Cluster
    budget_bytes: int
    options: tuple[Candidate, ...]
    plans: tuple[Plan, ...]
    num_strategies: int


def settings(case: Case, kind: DeviceKind, memory_bytes: int) -> dict[str, Any]:
    """A case as flags."""
    return {
        "model": case.model, "device": kind, "gpus": case.world_size, "mem": memory_bytes, "seq_len": case.seq_len,
        "global_batch": case.global_batch, "precision": "fp32" if kind == "cpu" else "bf16", "offload": "none",
    }  # fmt: skip


def decide(case: Case, kind: DeviceKind, calibration: Calibration | None, pool: Pool, folder: Path) -> Decision:
    """Dry-run the strategy that binds, take its memory as the budget, and choose. `folder` keeps what was traced."""
    plenty = 1 << 40
    request, cluster, _ = understand(settings(case, kind, plenty), calibration)
    with DryRunSource(request, cluster, folder, pool=pool) as source:
        search = Search(request, cluster, source)
        (binding,) = (
            strategy
            for strategy in search.strategies("none")
            if (strategy.zero_stage, strategy.activation_checkpointing, strategy.loss)
            == (case.zero_stage, case.activation_checkpointing, case.loss)
        )
        steps = case.global_batch // (case.micro_batch * case.world_size)
        device = cluster.devices[0]
        needed = ROOM * source.dry_run(binding, case.micro_batch, steps).total_bytes + device.context_above_bytes
        budget = int(needed if kind == "cpu" else needed / (1 - ALLOCATOR_SHARE))
    request, cluster, _ = understand(settings(case, kind, budget), calibration)
    with DryRunSource(request, cluster, folder, pool=pool) as source:
        search = Search(request, cluster, source)
        *_, choice = search.run()
        assert isinstance(choice, SearchResult), f"nothing fits: {case.name}"
        strategies = search.strategies("none")
        looked_at = [
            search.evaluation.evaluate(strategy) for strategy in strategies if strategy != choice.chosen.strategy
        ]
        options = [choice.chosen, *(option for option in looked_at if option.fits)]
        plans = [_plan(request, cluster, choice, option) for option in options]
    return Decision(
        case=case,
        request=request,
        cluster=cluster,
        budget_bytes=budget,
        options=tuple(options),
        plans=tuple(plans),
        num_strategies=1 + len(looked_at),
    )


def _plan(request: Request, cluster: Cluster, choice: SearchResult, option: Candidate) -> Plan:
    assert option.batch is not None and option.time is not None and option.memory is not None
    return Plan(
        frugal_version=version("frugal-trainer"),
        versions={},
        request=request,
        defaults=(),
        model=choice.model,
        cluster=cluster,
        strategy=option.strategy,
        batch=option.batch,
        memory=option.memory,
        time=option.time,
        why=(),
        warnings=(),
        rejected=(),
    ).sealed()


def measure(decisions: Sequence[Decision], kind: DeviceKind, folder: Path, again: Again = "no") -> dict[str, Timed]:
    """Train with all plans of all decisions, in one launch of the ranks for each number of them."""
    found: dict[str, Timed] = {}
    for world_size in sorted({decision.case.world_size for decision in decisions}):
        jobs, out = folder / f"jobs-{world_size}.json", folder / f"timed-{world_size}.jsonl"
        mine = [
            Job(decision.case.name, tuple(plan.to_json().decode() for plan in decision.plans), again)
            for decision in decisions
            if decision.case.world_size == world_size
        ]
        jobs.write_bytes(msgspec.json.encode(mine))
        arguments = ["--jobs", str(jobs), "--out", str(out)]
        code = local.start_ranks(kind, world_size, "bench.planning.choice_worker", arguments, to_stderr=True)
        lines = out.read_bytes().splitlines() if out.exists() else []
        found |= {timed.name: timed for timed in (msgspec.json.decode(line, type=Timed) for line in lines)}
        if code:
            print(f"ranks of {world_size} ended with exit code {code}", file=sys.stderr)
    return found


def row(decision: Decision, timed: Timed) -> dict[str, Any]:
    """One case of the results. The first strategy is frugal's choice."""
    best = [min(seconds) for seconds in timed.seconds]
    predicted = [option.seconds for option in decision.options]
    strategies = [
        {
            "strategy": str(option.strategy),
            "micro_batch": option.micro_batch,
            "accumulation_steps": plan.batch.accumulation_steps,
            "predicted_seconds": option.seconds,
            "predicted_parts": msgspec.to_builtins(option.time),
            "measured_seconds": list(seconds),
            "headroom_bytes": option.headroom_bytes,
        }
        for option, plan, seconds in zip(decision.options, decision.plans, timed.seconds, strict=True)
    ]
    made = {
        "case": asdict(decision.case) | {"model": decision.case.model.rpartition("/")[2]},
        "budget_bytes": decision.budget_bytes,
        "num_strategies": decision.num_strategies,
        "num_fitting": len(best),
        "ratio": best[0] / min(best),
        "rank_correlation": _rank_correlation(predicted, best),
        "predicted_over_measured": predicted[0] / best[0],
        "strategies": strategies,
    }
    return measured_again(made, timed.again)


def measured_again(row: dict[str, Any], again: dict[int, Sequence[float]]) -> dict[str, Any]:
    """A row whose ratios are those of the turns at the end, by the numbers of its strategies, where there were any."""
    if not again:
        return row
    of_plan = again[0]
    relative = {
        number: statistics.median(each / own for each, own in zip(seconds, of_plan, strict=True))
        for number, seconds in again.items()
    }
    fastest = min(relative.values())
    turns = {str(number): list(seconds) for number, seconds in again.items()}
    return row | {"ratio": relative[0] / fastest, "again": turns, "ratio_at_first": row["ratio"]}


def again(rows: Sequence[dict[str, Any]], decisions: Sequence[Decision], kind: DeviceKind, folder: Path) -> list[Any]:
    """Rows whose turns at the end were repeated, those that could be; `decisions` are about the same cases."""
    known = {_name(row): row for row in rows}
    asked: dict[str, list[int]] = {}
    these: list[Decision] = []
    for decision in decisions:
        row, name = known[decision.case.name], decision.case.name
        seconds = [min(each["measured_seconds"]) for each in row["strategies"]]
        fastest_other = min(range(1, len(seconds)), key=seconds.__getitem__, default=0)
        numbers = sorted({0, fastest_other})
        plans = {
            (str(plan.strategy), option.micro_batch, plan.batch.accumulation_steps): plan
            for option, plan in zip(decision.options, decision.plans, strict=True)
        }
        of_row = [row["strategies"][number] for number in numbers]
        ways = [(each["strategy"], each["micro_batch"], each["accumulation_steps"]) for each in of_row]
        if len(numbers) < 2 or not all(way in plans for way in ways):
            print(f"not measured again: {name}", file=sys.stderr)
            continue
        asked[name] = numbers
        these.append(replace(decision, plans=tuple(plans[way] for way in ways)))
    timed = measure(these, kind, folder, "only")
    return [
        measured_again(known[name], dict(zip(asked[name], found.again.values(), strict=True)))
        for name, found in timed.items()
    ]


def _calibrations(kind: DeviceKind, before: dict[str, Any]) -> dict[int, Calibration]:
    """Return what the plans of a file of results were made with."""
    own = {name: before["device"] if name == "device" else "" for name in ("device", "driver", "torch", "command")}
    return {
        int(ranks): Calibration(
            kind=kind, card=None, num_ranks=int(ranks), date=before["date"], probe=msgspec.convert(probe, Probe), **own
        )
        for ranks, probe in before["probes"].items()
    }


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; None where there is nothing to order."""
    if len(first) < 3:
        return None
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count how often the goal is met. Ratios are the choice's seconds, divided by those of the fastest that fits."""
    ratios = [row["ratio"] for row in rows]
    correlations = [row["rank_correlation"] for row in rows if row["rank_correlation"] is not None]
    return {
        "cases": len(rows),
        "within_5_percent": sum(ratio <= NEAR for ratio in ratios),
        "fastest": sum(ratio == 1 for ratio in ratios),
        "median_ratio": statistics.median(ratios),
        "worst_ratio": max(ratios),
        "median_rank_correlation": statistics.median(correlations) if correlations else None,
        "strategies_timed": sum(row["num_fitting"] for row in rows),
    }


def environment(kind: DeviceKind, calibrations: dict[int, Calibration], command: str) -> dict[str, Any]:
    """Return the head of a file of results."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "device": next(iter(calibrations.values())).device
        if kind == "cuda"
        else f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("frugal-trainer", "torch", "deepspeed", "transformers")},
        },
        "probes": {str(ranks): msgspec.to_builtins(each.probe) for ranks, each in calibrations.items()},
    }


def joined(before: dict[str, Any], head: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the rows of a file that were not measured again, if the command was the same; its probes, too."""
    if (before["command"], before["device"]) != (head["command"], head["device"]):
        return rows
    head["probes"] = before["probes"] | head["probes"]
    again = {_name(each) for each in rows}
    kept = [each for each in before["rows"] if _name(each) not in again]
    return sorted([*kept, *rows], key=lambda each: each["case"]["world_size"])


def rest(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> list[Case]:
    """The cases that have no row."""
    known = {_name(each) for each in rows}
    return [case for case in cases if case.name not in known]


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name") or Case(**row["case"]).name)


def _line(row: dict[str, Any]) -> str:
    chosen = row["strategies"][0]
    fastest = min(row["strategies"], key=lambda each: min(each["measured_seconds"]))
    correlation = row["rank_correlation"]
    text = f"{Case(**row['case']).name:<56} {row['num_fitting']:>3} of {row['num_strategies']:<3} {row['ratio']:>6.3f} "
    text += f"{correlation:>6.2f} " if correlation is not None else "       "
    text += f"{row['predicted_over_measured']:>6.2f}  {chosen['strategy']}, {chosen['micro_batch']}"
    if row["ratio"] > NEAR:
        text += f"\n{'':<88}fastest: {fastest['strategy']}, {fastest['micro_batch']}"
    return text


def _decided(
    case: Case, kind: DeviceKind, calibrations: dict[int, Calibration], pool: Pool, folder: str, asked: Any
) -> list[Decision]:
    """The decision, or none where what is to bind cannot be had of this model."""
    try:
        return [decide(case, kind, calibrations[case.world_size], pool, Path(folder))]
    except (FrugalError, ValueError) as error:
        if not asked.unseen:
            raise
        print(f"left out: {case.name}: {error}", file=sys.stderr)
        return []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning.choice", description="The plan's choice against all others."
    )
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th case; nothing is written")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains it; nothing is written")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}/choice-DEVICE.json")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was measured there, whatever was run")
    parser.add_argument("--unseen", type=int, metavar="N", help="N cases of random models")
    parser.add_argument("--seed", type=int, metavar="DATE", help="of --unseen, such as 20261123: today's if left out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, metavar="N", help="cases on so many ranks")
    parser.add_argument("--rest", action="store_true", help="cases that the file does not have yet")
    parser.add_argument("--again", action="store_true", help="repeat the turns at the end of the cases of the file")
    asked = parser.parse_args()
    if asked.again and not (asked.record and not (asked.quick or asked.only)):
        parser.error("--again needs --record: it repeats what the file has")
    if asked.record and not (asked.quick or asked.only):
        asked.out = RESULTS / f"choice-{'unseen-' if asked.unseen else ''}{asked.device}.json"
    return asked


def main() -> int:
    """Plan, train, compare, print; 1 if the goal is missed."""
    asked = _arguments()
    kind: DeviceKind = asked.device
    seed = asked.seed or int(datetime.now(UTC).strftime("%Y%m%d"))
    before = json.loads(asked.out.read_bytes()) if asked.record and asked.out and asked.out.exists() else {"rows": []}
    with TemporaryDirectory(prefix="frugal-") as folder, closing(workers()) as pool:
        if asked.unseen:
            all_cases = choice_random.cases(asked.unseen, seed, Path(folder) / "models")
        else:
            all_cases = choice_cases.CPU if kind == "cpu" else choice_cases.CUDA
        cases = [
            case for case in all_cases if (asked.only or "") in case.name and asked.ranks in (None, case.world_size)
        ][:: QUICK if asked.quick else 1]
        others = rest(cases, before["rows"])
        cases = [case for case in cases if case not in others] if asked.again else others if asked.rest else cases
        if asked.again:
            calibrations = _calibrations(kind, before)
        else:
            calibrations = {ranks: calibrate(kind, ranks) for ranks in sorted({case.world_size for case in cases})}
        for ranks, calibration in calibrations.items():
            print(f"{ranks} ranks: {calibration.probe}", flush=True)
        decisions = [decision for case in cases for decision in _decided(case, kind, calibrations, pool, folder, asked)]
        pool.close()
        if asked.again:
            rows = again(before["rows"], decisions, kind, Path(folder))
        else:
            timed = measure(decisions, kind, Path(folder), "too")
            rows = [row(each, timed[each.case.name]) for each in decisions if each.case.name in timed]
    command = "python -m bench.planning.choice" + " --device cuda" * (kind == "cuda")
    command += f" --unseen {asked.unseen} --seed {seed}" if asked.unseen else ""
    head = environment(kind, calibrations, command)
    if before["rows"]:
        rows = joined(before, head, rows)
    measured = {_name(each) for each in rows}
    missing = [case.name for case in all_cases if case.name not in measured]
    print(f"{'case and what binds':<56} {'fitting':>10}  ratio  ranks  pred.  choice")
    for each in rows:
        print(_line(each))
    if not rows:
        return 1
    found = summary(rows) | {"not_measured": missing}
    print("\n" + "\n".join(f"{name:<24} {value}" for name, value in found.items()))
    if asked.out is not None:
        asked.out.parent.mkdir(exist_ok=True)
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(head | found | {"rows": rows})) + b"\n")
        print(f"\nwrote {asked.out}")
    if asked.unseen:
        return int(found["within_5_percent"] < UNSEEN_SHARE * len(rows))
    return int(found["within_5_percent"] < SHARE * (len(rows) + len(missing)))


if __name__ == "__main__":
    sys.exit(main())
