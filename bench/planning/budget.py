"""`python -m bench.planning.budget`: is activation checkpointing by layer worth it, and is the mixture the best one?

A case has memory between what `full` and what `off` takes for all layers. frugal plans; the plan, the fastest
strategies with one mode for all layers and the fastest of all mixtures that there are (by prediction, every one
evaluated) really train on CPU ranks, in turns, as in `bench.planning.choice`. Goals: the plan is no slower than one
mode for all layers but for noise, and within 2 % of the best mixture by prediction. `--ranks` and `--rest` as there.
"""

import argparse
import json
import os
import statistics
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}

from bench.planning import choice
from bench.planning.choice import RESULTS, Decision
from bench.planning.choice_cases import Case
from bench.planning.choice_worker import Timed
from bench.plans import all_mixtures
from frugal.cli.measure import calibrate
from frugal.config.hardware.calibration import Calibration
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool
from frugal.planning.search.candidate import Candidate, SearchResult
from frugal.planning.search.mixtures import base_of, mixture
from frugal.planning.search.search import Search
from frugal.planning.strategy import LAYER_MODES

NOISE, NEAR = 1.03, 1.02  # of what is measured, and of what is predicted
WHOLE = 3  # strategies with one mode that train
QUICK = 5  # every so manieth case


@dataclass(frozen=True, kw_only=True)
class BudgetCase(Case):
    """A case with a share of what `off` takes more than `full` under the same strategy."""

    share: float

    @property
    def name(self) -> str:
        """For people."""
        where = f"{self.model.rpartition(':')[2]} on {self.world_size} ZeRO-{self.zero_stage}"
        return f"{where} micro-batch {self.micro_batch}: {self.share:.0%} between full and off"


def _cases() -> tuple[BudgetCase, ...]:
    shapes = (
        ("deep", 1, 8, 64, 0, 4), ("deep", 2, 16, 64, 2, 4), ("classic", 1, 8, 128, 0, 4),
        ("classic", 2, 16, 128, 3, 4),
        ("encoder", 1, 8, 128, 0, 4), ("encoder", 2, 16, 128, 1, 2), ("long", 1, 4, 512, 0, 1),
    )  # fmt: skip
    return tuple(
        BudgetCase(
            model=f"bench/planning/choice_models.py:{model}", world_size=ranks, global_batch=batch, seq_len=length,
            zero_stage=stage, activation_checkpointing="off", loss="plain", micro_batch=micro, share=share,
        )
        for model, ranks, batch, length, stage, micro in shapes
        for share in (0.3, 0.6, 0.9)
    )  # fmt: skip


def decide(case: BudgetCase, calibration: Calibration | None, pool: Pool, folder: Path) -> tuple[Decision, float]:
    """The plan, then what it is compared with; and its predicted seconds by those of the best mixture of all."""
    request, cluster, _ = understand(choice.settings(case, "cpu", 1 << 40), calibration)
    with DryRunSource(request, cluster, folder, pool=pool) as source:
        search = Search(request, cluster, source)
        steps = case.global_batch // (case.micro_batch * case.world_size)
        base = next(
            each for each in search.strategies("none") if (each.zero_stage, each.loss) == (case.zero_stage, case.loss)
        )
        full, off = (
            source.dry_run(mixture(base_of(base), ((mode, 1),)), case.micro_batch, steps).total_bytes
            for mode in ("full", "off")
        )
    budget = int(full + case.share * (off - full))
    request, cluster, _ = understand(choice.settings(case, "cpu", budget), calibration)
    with DryRunSource(request, cluster, folder, pool=pool) as source:
        search = Search(request, cluster, source)
        *_, result = search.run()
        assert isinstance(result, SearchResult), f"nothing fits: {case.name}"
        evaluated = [search.evaluation.evaluate(strategy) for strategy in search.strategies("none")]
        whole = sorted((each for each in evaluated if each.fits), key=lambda each: each.seconds)
        mixed = _exhaustive(search, [each.strategy for each in evaluated])
        best = min([result.chosen, *whole[:1], *mixed], key=lambda each: each.seconds)
        options = list({each.strategy: each for each in (result.chosen, *whole[:WHOLE], best)}.values())
        plans = [choice._plan(request, cluster, result, option) for option in options]
    decision = Decision(
        case=case, request=request, cluster=cluster, budget_bytes=budget, options=tuple(options), plans=tuple(plans),
        num_strategies=len(whole) + len(mixed),
    )  # fmt: skip
    return decision, result.chosen.seconds / best.seconds


def _exhaustive(search: Search, strategies: list[Any]) -> list[Candidate]:
    """Every mixture in which later layers keep more, under every strategy, as far as it fits."""
    mixed = []
    for base in dict.fromkeys(map(base_of, strategies)):
        both = mixture(base, (("full", 1), ("off", 1)))
        num_layers = 0 if search.source.why_not_mixed(both) else search.source.num_layers(both)
        for layer_modes in all_mixtures(LAYER_MODES[1:], num_layers) if num_layers else ():
            strategy = mixture(base, layer_modes)
            if strategy.layer_modes:
                mixed.append(search.evaluation.evaluate(strategy))
    return [each for each in mixed if each.fits]


def row(decision: Decision, predicted_ratio: float, timed: Timed) -> dict[str, Any]:
    """One case of the results. Ratios are the plan's seconds by another's: below 1 it is faster."""
    best = [min(seconds) for seconds in timed.seconds]
    whole = [i for i, option in enumerate(decision.options) if not option.strategy.layer_modes]
    fastest = min(whole, key=lambda i: best[i]) if whole else 0
    predicted = min((decision.options[i].seconds for i in whole), default=decision.options[0].seconds)
    return {
        "case": asdict(decision.case),
        "name": decision.case.name,
        "budget_bytes": decision.budget_bytes,
        "plan": str(decision.options[0].strategy),
        "is_mixture": bool(decision.options[0].strategy.layer_modes),
        "compared": decision.num_strategies,
        "predicted_by_best_of_all": predicted_ratio,
        "predicted_by_one_mode": decision.options[0].seconds / predicted,
        "measured_by_one_mode": best[0] / best[fastest],
        "measured_by_fastest": best[0] / min(best),
        "strategies": [
            {"strategy": str(option.strategy), "micro_batch": option.micro_batch, "predicted_seconds": option.seconds,
             "measured_seconds": list(seconds)}
            for option, seconds in zip(decision.options, timed.seconds, strict=True)
        ],
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count how often the goals are met."""
    measured = [each["measured_by_one_mode"] for each in rows]
    mixed = [each["measured_by_one_mode"] for each in rows if each["is_mixture"]]
    return {
        "cases": len(rows),
        "mixtures": len(mixed),
        "predicted_within_2_percent_of_all": sum(each["predicted_by_best_of_all"] <= NEAR for each in rows),
        "not_slower_than_one_mode": sum(ratio <= NOISE for ratio in measured),
        "worst_measured_by_one_mode": max(measured),
        "median_of_mixtures_by_one_mode": statistics.median(mixed) if mixed else None,
        "best_of_mixtures_by_one_mode": min(mixed, default=None),
    }


def main() -> int:
    """Plan, train, compare, print; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning.budget", description="Activation checkpointing by layer against one mode."
    )
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th case; nothing is written")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name contains it; nothing is written")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}/budget-cpu.json")
    parser.add_argument("--ranks", type=int, metavar="N", help="cases on so many ranks")
    parser.add_argument("--rest", action="store_true", help="cases that the file does not have yet")
    asked = parser.parse_args()
    cases = [each for each in _cases() if asked.only in each.name and asked.ranks in (None, each.world_size)]
    cases = cases[:: QUICK if asked.quick else 1]
    out = RESULTS / "budget-cpu.json"
    before = json.loads(out.read_bytes()) if asked.record and out.exists() else {"rows": []}
    cases = choice.rest(cases, before["rows"]) if asked.rest else cases
    with TemporaryDirectory(prefix="frugal-") as folder, closing(workers()) as pool:
        calibrations = {ranks: calibrate("cpu", ranks) for ranks in sorted({case.world_size for case in cases})}
        decided = [decide(case, calibrations[case.world_size], pool, Path(folder)) for case in cases]
        pool.close()
        timed = choice.measure([decision for decision, _ in decided], "cpu", Path(folder))
    rows = [row(made, ratio, timed[made.case.name]) for made, ratio in decided if made.case.name in timed]
    head = choice.environment("cpu", calibrations, "python -m bench.planning.budget")
    if before["rows"]:
        rows = choice.joined(before, head, rows)
    measured = {each["name"] for each in rows}
    missing = [each.name for each in _cases() if each.name not in measured]
    print("predicted by the best of all, by one mode; measured by one mode")
    for each in rows:
        ratios = (each["predicted_by_best_of_all"], each["predicted_by_one_mode"], each["measured_by_one_mode"])
        print(f"{each['name']:<60} " + " ".join(f"{ratio:6.3f}" for ratio in ratios) + f"  {each['plan']}")
    if not rows:
        return 1
    totals = summary(rows) | {"not_measured": missing}
    print("\n" + "\n".join(f"{name:<36} {value}" for name, value in totals.items()))
    if asked.record and not (asked.quick or asked.only):
        content = msgspec.json.encode(head | totals | {"rows": rows})
        out.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    is_met = totals["predicted_within_2_percent_of_all"] == len(rows) and not missing
    return 0 if is_met and totals["not_slower_than_one_mode"] >= 0.9 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
