"""`python -m bench.reliability.guard`: what it costs that a rank may run out of memory without a hang.

Two CPU ranks train one engine step by step, in turns with and without what recovery needs: a vote before each
collective, one before weights are written and two at the end, and the random generators' state before the step. One
thread a rank. Inside each step with votes the cost is added up: from when the last rank comes to a vote, until the last
one leaves it (that ranks come at different times is no cost of the vote, and they share a clock), and the seconds for
the state. Beside this share of the step stands the ratio of neighbouring steps, whose order changes: it would show
what else there is, such as gathers that overlap less, but steps differ by more than a vote takes. Of both the median
and the quartiles are kept. Last, a vote alone, where all ranks come at once, as it is and over gloo's all_reduce.

The models are small: the more a micro-step computes, the less its votes weigh. Not measured: GPUs, and several nodes,
where a vote waits for the network; more ranks than cores is the worst case of a vote on one.

Goal: at most 1 % of the step.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import frugal
from bench.environment import environment
from bench.goals import report_goals
from bench.plans import without_calibration
from bench.ranks import Ranks
from frugal.planning.plan import Plan

RESULTS = Path(__file__).parents[1] / "results" / "guard-cpu.json"
WORLD_SIZE, SEQ_LEN, MICRO_BATCH, MICRO_STEPS = 2, 256, 4, 4
VOTES, VOTERS, MOST = 2000, (2, 4, 8), 0.01
SMALL, LARGER = {"n_layer": 2, "n_embd": 128, "n_head": 4}, {"n_layer": 4, "n_embd": 256, "n_head": 4}
CASES = {  # ZeRO stage, shape, steps of either kind
    "ZeRO-2, 2 layers of 128": (2, SMALL, 30),
    "ZeRO-3, 2 layers of 128": (3, SMALL, 30),
    "ZeRO-2, 4 layers of 256": (2, LARGER, 12),
    "ZeRO-3, 4 layers of 256": (3, LARGER, 12),
}


def planned(folder: Path, zero_stage: int, shape: dict[str, Any], micro_steps: int = MICRO_STEPS) -> Plan:
    """A plan for two CPU ranks with `micro_steps` full micro-batches on each."""
    config = folder / "config.json"
    same = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 260, "n_positions": SEQ_LEN}
    config.write_text(json.dumps({**same, **shape}))
    without_calibration()
    return frugal.plan(
        model=str(config), device="cpu", gpus=WORLD_SIZE, mem="4G", seq_len=SEQ_LEN, micro_batch=MICRO_BATCH,
        accumulation_steps=micro_steps, global_batch=WORLD_SIZE * MICRO_BATCH * micro_steps, precision="fp32",
        zero_stage=zero_stage, loss="plain", activation_checkpointing="off",
    )  # fmt: skip


@contextmanager
def unguarded(engine: Any) -> Iterator[None]:
    """As if memory could not run out: no vote, nothing kept to go back to."""
    from frugal.engine import train_step

    with (
        patch.object(engine.guard, "attempt", lambda work: work()),
        patch.object(train_step, "generator_states", lambda device: {}),
    ):
        yield


@contextmanager
def timed(engine: Any) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Record when this rank enters and leaves each vote, and when it keeps the generators' state, in seconds."""
    from frugal.checkpoint import random_state
    from frugal.engine import train_step

    kept: dict[str, list[tuple[float, float]]] = {"votes": [], "states": []}

    def timing(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed_work(*args: Any) -> Any:
            came = time.monotonic()
            result = work(*args)
            kept[name].append((came, time.monotonic()))
            return result

        return timed_work

    vote = engine.guard.vote
    with (
        patch.object(vote, "any", timing("votes", vote.any)),
        patch.object(train_step, "generator_states", timing("states", random_state.generator_states)),
    ):
        yield kept


def in_turns(plan: Plan, turns: int) -> dict[str, list[Any]]:
    """Seconds of each step with and without, and what `timed` keeps of each step with; runs on ranks."""
    import torch
    import torch.distributed as dist

    from frugal.engine.engine import initialize
    from frugal.models.objectives import CausalLM
    from frugal.models.resolve import resolve

    spec = resolve(plan.request.model, None)
    engine = initialize(spec.build(dtype=torch.float32, device="cpu", seed=0), plan, CausalLM())
    tokens = np.random.default_rng(0).integers(4, 260, (plan.batch.global_batch, plan.request.seq_len))
    batch = engine.prepare([{"input_ids": each} for each in tokens])

    def seconds() -> float:
        dist.barrier()
        began = time.perf_counter()
        engine.train_step(batch)
        dist.barrier()
        return time.perf_counter() - began

    for _ in range(3):  # stage 3 learns in its first steps in which order modules come
        engine.train_step(batch)
    found: dict[str, list[Any]] = {"guarded": [], "unguarded": [], "kept": []}
    for turn in range(turns):
        for is_guarded in (True, False) if turn % 2 else (False, True):
            if is_guarded:
                with timed(engine) as kept:
                    found["guarded"].append(seconds())
                found["kept"].append(kept)
            else:
                with unguarded(engine):
                    found["unguarded"].append(seconds())
    engine.destroy()
    gc.collect()
    return found


def summary(ranks: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
    """Return what is kept of one case, from what each rank measured."""
    steps = ranks[0]["guarded"]
    ratios = [with_votes / without for with_votes, without in zip(steps, ranks[0]["unguarded"], strict=True)]
    of_votes, costs = [], []
    for of_ranks in zip(*(rank["kept"] for rank in ranks), strict=True):
        votes = zip(*(each["votes"] for each in of_ranks), strict=True)
        of_votes.append(sum(map(seconds_of, votes)))
        costs.append(of_votes[-1] + max(left - came for each in of_ranks for came, left in each["states"]))
    num_votes = len(ranks[0]["kept"][-1]["votes"])
    return {
        "share": spread([cost / step for cost, step in zip(costs, steps, strict=True)]),
        "ratio": spread(ratios),
        "step_seconds": statistics.median(ranks[0]["unguarded"]),
        "votes_a_step": num_votes,
        "seconds_a_vote": statistics.median(of_votes) / num_votes,
    }


def seconds_of(vote: Sequence[tuple[float, float]]) -> float:
    """From when the last rank comes until the last one leaves."""
    return max(left for _, left in vote) - max(came for came, _ in vote)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high], "steps": len(values)}


def votes_alone(number: int) -> dict[str, float]:
    """Seconds of one vote, as it is and over gloo, where nobody does anything else; runs on ranks."""
    import torch
    import torch.distributed as dist

    from frugal.distributed.vote import Vote

    found = {}
    vote = Vote(None)
    for name in ("to rank 0 and back", "gloo"):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(number):
            if name == "gloo":
                dist.all_reduce(torch.zeros(1))
            else:
                vote.any(False)
        found[name] = (time.perf_counter() - began) / number
    return found


def main() -> int:
    """Measure, keep, and say whether the goal is reached."""
    ranks, cases, alone = Ranks(WORLD_SIZE), {}, {}
    for name, (zero_stage, shape, turns) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            plan = planned(Path(folder), zero_stage, shape)
            cases[name] = case = summary(ranks.run(in_turns, plan, turns, timeout=1800))
        (share_low, share_high), (low, high) = case["share"]["quartiles"], case["ratio"]["quartiles"]
        sys.stdout.write(
            f"{name}: {case['votes_a_step']} votes of {1e6 * case['seconds_a_vote']:.0f} us and what is kept are "
            f"{100 * case['share']['median']:.2f} % ({100 * share_low:.2f} to {100 * share_high:.2f}) of "
            f"{case['step_seconds']:.3f} s; steps with are {case['ratio']['median']:.3f} ({low:.3f} to {high:.3f}) "
            "of steps without\n"
        )
    ranks.close()
    for number in VOTERS:
        ranks = Ranks(number)
        alone[str(number)] = ranks.run(votes_alone, VOTES)[0]
        ranks.close()
        told = ", ".join(f"{1e6 * seconds:.0f} us {way}" for way, seconds in alone[str(number)].items())
        sys.stdout.write(f"a vote of {number} ranks: {told}\n")
    result = environment("python -m bench.reliability.guard") | {
        "ranks": WORLD_SIZE,
        "micro_batch": [MICRO_BATCH, SEQ_LEN],
        "micro_steps": MICRO_STEPS,
        "cases": cases,
        "seconds_of_a_vote_alone": alone,
        "goals": {f"at most 1 %: {name}": case["share"]["median"] <= MOST for name, case in cases.items()},
    }
    return report_goals(result, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
