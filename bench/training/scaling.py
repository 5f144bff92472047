"""`python -m bench.training.scaling`: the same training on one CPU rank and on two, under each ZeRO stage.

A GPT-2 on Python's own sources, 32 samples of 256 bytes an optimizer step, from the same weights and in the same order:
only who computes what differs. Eight runs live at once, each in processes of its own, and train three steps each in
turns whose order changes, so that whatever else the machine does falls on all of them alike.

Measured: seconds of a step (the median of each turn, and of these), the speed-up from one rank to two (of each round,
then the median, with the lowest and the highest), and the perplexity on the same validation samples at the end. Every
rank has one thread, so one core: left to itself, one rank would use both cores of a small machine, and there would be
nothing to compare.

Goals: the perplexity is the same in all eight runs; two ranks are faster under every stage. `--record` keeps the
result.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import frugal
from bench.environment import environment
from bench.goals import report_goals
from bench.plans import without_calibration
from bench.ranks import Ranks
from bench.training import training_rank
from bench.training.training_rank import Text
from frugal.planning.plan import Plan

COMMAND = "python -m bench.training.scaling --record"
RESULTS = Path(__file__).parents[1] / "results" / "scaling-cpu.json"
STAGES, WORLD_SIZES = (0, 1, 2, 3), (1, 2)
SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH, ROUNDS, STEPS = 256, 32, 8, 5, 3
ALIKE = 1e-4  # relative, of perplexities
MODEL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_embd": 192, "n_head": 4,
    "vocab_size": 260, "n_positions": SEQ_LEN, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

Configuration = tuple[int, int]
"""ZeRO stage and number of ranks."""


def planned(folder: Path, configuration: Configuration) -> Plan:
    """The plan of one run; all take as many samples at once, and compute the same with them."""
    zero_stage, ranks = configuration
    config = folder / "config.json"
    config.write_text(json.dumps(MODEL))
    without_calibration()
    return frugal.plan(
        model=str(config), device="cpu", gpus=ranks, mem="2G", precision="fp32", seq_len=SEQ_LEN, zero_stage=zero_stage,
        global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, activation_checkpointing="off", loss="plain",
        learning_rate=2e-3,
    )  # fmt: skip


def in_turns(
    plans: dict[Configuration, Plan], ranks: dict[Configuration, Ranks], text: Text, rounds: int, steps: int
) -> tuple[list[dict[Configuration, float]], dict[Configuration, float]]:
    """Seconds of a step in each round, and the perplexity after the last one."""
    order, found = list(plans), []
    for each in order:
        ranks[each].run(training_rank.begin, str(each), plans[each], text, timeout=600)
    for turn in range(rounds):
        begin = turn % len(order)
        found.append(
            {
                each: statistics.median(
                    step["seconds"] for step in ranks[each].run(training_rank.go_on, str(each), steps, timeout=600)[0]
                )
                for each in order[begin:] + order[:begin]
            }
        )
    perplexities = {each: ranks[each].run(training_rank.perplexity, str(each))[0] for each in order}
    for each in order:
        ranks[each].run(training_rank.end, str(each))
    return found, perplexities


def summary(found: list[dict[Configuration, float]], perplexities: dict[Configuration, float]) -> dict[str, Any]:
    """Return what is kept: for each stage the seconds and perplexities of one and of two ranks."""
    stages = {}
    for stage in sorted({stage for stage, _ in perplexities}):
        speed_ups = [turn[stage, 1] / turn[stage, 2] for turn in found]
        stages[stage] = {
            "seconds_a_step": {n: statistics.median(turn[stage, n] for turn in found) for n in WORLD_SIZES},
            "seconds_in_rounds": {n: [turn[stage, n] for turn in found] for n in WORLD_SIZES},
            "speed_up": {"median": statistics.median(speed_ups), "lowest": min(speed_ups), "highest": max(speed_ups)},
            "perplexity": {n: perplexities[stage, n] for n in WORLD_SIZES},
        }
    difference = max(perplexities.values()) / min(perplexities.values()) - 1
    return {
        "largest_difference_of_perplexities": difference,
        "stages": stages,
        "goals": {
            "the same perplexity in all runs": difference <= ALIKE,
            "two ranks are faster": all(row["speed_up"]["median"] > 1 for row in stages.values()),
        },
    }


def table(stages: dict[Any, dict[str, Any]]) -> str:
    """Return the table that is printed."""
    lines = [
        "| ZeRO stage | 1 rank, s a step | 2 ranks, s a step | speed-up | validation perplexity, 1 rank | 2 ranks |",
        "|---|---|---|---|---|---|",
    ]
    for stage, row in stages.items():
        seconds = " | ".join(f"{each:.2f}" for each in row["seconds_a_step"].values())
        perplexities = " | ".join(f"{each:.4f}" for each in row["perplexity"].values())
        speed_up = "{median:.2f} ({lowest:.2f} to {highest:.2f})".format(**row["speed_up"])
        lines.append(f"| {stage} | {seconds} | {speed_up} | {perplexities} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and say whether the goals are reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"keep the result in {RESULTS.name}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    configurations = [(stage, number) for stage in STAGES for number in WORLD_SIZES]
    with tempfile.TemporaryDirectory() as name:
        text = Text(
            ("stdlib",), "causal-lm", SEQ_LEN, Path(name) / "tokenised", limit=200, validation_fraction=0.05,
            validation_samples=128,
        )  # fmt: skip
        text.load()
        plans = {each: planned(Path(name), each) for each in configurations}
        ranks = {each: Ranks(each[1]) for each in configurations}
        found, perplexities = in_turns(plans, ranks, text, asked.rounds, STEPS)
        for each in ranks.values():
            each.close()
    result = environment(COMMAND) | {"steps": asked.rounds * STEPS, **summary(found, perplexities)}
    print(f"after {result['steps']} steps\n\n{table(result['stages'])}\n")
    return report_goals(result, RESULTS if asked.record else None)


if __name__ == "__main__":
    sys.exit(main())
