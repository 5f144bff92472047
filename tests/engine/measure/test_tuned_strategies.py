"""What a run may change to is the same training under every kind of plan, and takes no more memory than was promised.

Engines change their way from step to step, as a tuned run does, and are held against ones that do not.
"""

import gc
import random
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.engine.engine import initialize
from frugal.engine.measure import tuner
from frugal.engine.measure.two_steps import settled_collectives
from frugal.memory_watch import gauge
from frugal.models.loading import placed
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve_request
from frugal.planning.plan import Plan
from frugal.planning.planner import decide
from frugal.planning.search import alternatives
from frugal.planning.search.search import Search
from tests.engine.engines import running
from tests.engine.gradients import bounds_of_run
from tests.engine.measure.test_tuner import with_ways
from tests.engine.small_models import ragged_samples, tiny_gpt2
from tests.engine.test_partial_offload import device_that_is_no_host
from tests.kernels import needs_cpu_adam

Way = dict[str, Any]
FULL: Way = {"activation_checkpointing": "full", "layer_modes": ()}
SELECTIVE: Way = {"activation_checkpointing": "selective", "layer_modes": ()}
OFF: Way = {"activation_checkpointing": "off", "layer_modes": ()}
MIXED: Way = {"activation_checkpointing": "budget", "layer_modes": (("full", 1), ("selective", 1), ("off", 1))}
TILED: Way = {"loss": "tiled"}
SMALLER: Way = {"micro_batch": 1}
SAME_SUMS: tuple[Way, ...] = (MIXED, SELECTIVE, FULL, OFF)
OTHER_SUMS: tuple[Way, ...] = (TILED, {**FULL, **TILED, "micro_batch": 4}, SMALLER)


class Lengths(list[Any]):
    """Samples that say how long they are, as those of a run do."""

    @property
    def lengths(self) -> Any:
        return np.array([len(sample["input_ids"]) for sample in self])


def global_batches(kind: str, number: int) -> list[Any]:
    """So many global batches: of ragged samples, of ones with known lengths (eight, or as many as 200 tokens hold), or
    of two packed documents each."""
    chosen = random.Random(5)
    batches: list[Any] = []
    for seed in range(number):
        rows = ragged_samples(8, seed=seed, longest=40)
        if kind == "packed":
            for row in rows:
                first = len(row["input_ids"]) // 3
                row["documents"] = [first, len(row["input_ids"]) - first]
        if kind == "tokens":
            rows = rows[: chosen.randint(3, 8)]
        batches.append(Lengths(rows) if kind in ("lengths", "tokens") else rows)
    return batches


def hand_plan(world_size: int, zero_stage: int, ways: tuple[Way, ...], how: dict[str, Any], kind: str) -> Plan:
    """Micro-batches of 2 samples of 64 tokens, and alternatives."""
    plan = plan_by_hand(
        world_size=world_size, global_batch=8, micro_batch=2, zero_stage=zero_stage,
        request={"learning_rate": 1e-2, **how.get("request", {})}, strategy=how.get("strategy"),
    )  # fmt: skip
    of_lengths: dict[str, Any] = {"shortest": 8, "overhead_tokens": 50} if kind in ("lengths", "tokens") else {}
    return with_ways(replace(plan, batch=replace(plan.batch, **of_lengths)), ways)


def small() -> torch.nn.Module:
    return tiny_gpt2(n_layer=3, n_head=4)


def losses(plan: Plan, kind: str, changing: bool) -> list[tuple[float, float | None]]:
    """Loss and norm of a step under the plan, one in each other way, and two under the plan again; on ranks."""
    ways = (plan, *(alternatives.change_to(plan, other) for other in plan.alternatives), plan, plan)
    found = []
    with (
        device_that_is_no_host() if plan.strategy.offload_ratio < 1 else nullcontext(),
        running(plan, small(), CausalLM(packed=kind == "packed")) as engine,
    ):
        for way, samples in zip(ways, global_batches(kind, len(ways)), strict=True):
            if changing and way is not engine.plan:
                tuner.switch(engine, way)
            result = engine.train_step(samples)
            found.append((result.loss, result.grad_norm))
    return found


PARTLY = {"strategy": {"offload_optimizer": "cpu", "offload_ratio": 0.5, "sub_group_elements": 4000}}
LORA = {"request": {"lora": Lora.of("r=4")}}
SHARED = {"strategy": {"sequence_parallel": 2}}


@pytest.mark.parametrize(
    ("fixture", "zero_stage", "how", "kind"),
    [
        ("one_rank", 0, {"strategy": MIXED}, "tokens"),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ("one_rank", 0, LORA, "packed"),
                ("one_rank", 0, {}, "lengths"),
                ("two_ranks", 2, SHARED, ""),
                ("two_ranks", 3, SHARED, "lengths"),
                ("two_ranks", 2, SHARED, "packed"),
                ("two_ranks", 3, {"strategy": MIXED}, ""),
                ("two_ranks", 0, {"strategy": MIXED}, "tokens"),
                ("two_ranks", 3, LORA, "packed"),
                ("two_ranks", 2, LORA, "tokens"),
                ("two_ranks", 2, {}, "packed"),
                ("two_ranks", 1, {}, "tokens"),
                ("two_ranks", 2, {"strategy": {"mlp": "tiled"}}, ""),
            )
        ),
        pytest.param("two_ranks", 3, PARTLY, "", marks=[pytest.mark.exhaustive, needs_cpu_adam]),
    ],
)
def test_changing_ways_trains_the_same_and_bit_for_bit_while_only_activation_checkpointing_changes(
    fixture: str, zero_stage: int, how: dict[str, Any], kind: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(fixture)
    ways = (*SAME_SUMS, *OTHER_SUMS)
    if how.get("strategy", {}).get("mlp") == "tiled":  # it is no selective one's
        ways = tuple(way for way in ways if way not in (MIXED, SELECTIVE))
    plan = hand_plan(ranks.world_size, zero_stage, ways, how, kind)
    unchanged, changed = (ranks.run(losses, plan, kind, changing)[0] for changing in (False, True))
    bound, bound_of_norms, _ = bounds_of_run(
        small, global_batches(kind, len(unchanged)), CausalLM(packed=kind == "packed"), learning_rate=1e-2
    )
    alike = 1 + sum(way in SAME_SUMS for way in ways)
    assert len(changed) == 3 + len(ways)
    assert changed[:alike] == unchanged[:alike]
    for (loss, norm), (expected, expected_norm) in zip(changed, unchanged, strict=True):
        assert loss == pytest.approx(expected, rel=bound)
        assert norm == pytest.approx(expected_norm, rel=bound_of_norms)


MODELS = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

def llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=2048, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
        num_hidden_layers=6, max_position_embeddings=256, use_cache=False, bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    ))
"""
SETTINGS: dict[str, Any] = {"device": "cpu", "precision": "fp32", "seq_len": 128, "global_batch": 16}


def peaks(text: bytes) -> list[int]:
    """Live bytes at the fullest moment of two steps under a plan, and in each of its alternatives after it, in one
    engine; on ranks."""
    plan = Plan.from_json(text)
    spec = resolve_request(plan.request)
    objective = spec.objective(pack=bool(plan.request.pack))
    spec.build(dtype=torch.float32, device="meta")  # what it imports is no memory of the model
    count = plan.request.seq_len * plan.batch.global_batch
    tokens = torch.randint(3, 2000, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [{"input_ids": tokens[i : i + plan.request.seq_len]} for i in range(0, count, plan.request.seq_len)]
    found = []
    gc.collect()
    gc.freeze()
    with settled_collectives(), gauge("cpu") as memory:
        engine = initialize(placed.build(spec, plan, torch.device("cpu"), seed=0), plan, objective)
        for other in (None, *plan.alternatives):
            if other is not None:
                tuner.switch(engine, alternatives.change_to(plan, other))
                gc.collect()
                memory.mark("a way")
            for _ in range(2):
                engine.train_step(samples)
            gc.collect()
            found.append(max(interval.peak_bytes for interval in memory.intervals[-1 if other else 0 :]))
        engine.destroy()
    gc.unfreeze()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, {"sequence_parallel": 2, "mem": "64M"}),
        (1, {"mem": "64M"}),
        (2, {"mem": "14M"}),  # a mixture
        (2, {"mem": "32M", "zero_stage": 3}),
        (2, {"mem": "16M", "precision": "bf16"}),
        (1, {"mem": "24M", "lora": "r=4"}),
        (2, {"mem": "24M", "lora": "r=4"}),
        (2, {"mem": "20M", "zero_stage": 2, "mlp": "tiled"}),
        (2, {"mem": "40M", "zero_stage": 3, "offload": "optimizer", "micro_batch": 2}),
        (2, {"mem": "32M", "pack": True}),
    ],
)
@pytest.mark.exhaustive
def test_an_alternative_takes_no_more_than_it_promises(
    num_ranks: int, settings: dict[str, Any], tmp_path: Path, one_rank: Ranks, two_ranks: Ranks
) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    model = f"{tmp_path / 'models.py'}:llama"
    request, cluster, defaults = understand({**SETTINGS, **settings, "model": model, "gpus": num_ranks})
    with closing(workers()) as pool:
        open_source = partial(DryRunSource, cache=False, pool=pool, will_dry_run=False)
        *_, plan = decide(request, cluster, defaults, open_source)
        with open_source(plan.request, plan.cluster) as source:
            others = alternatives.find(Search(plan.request, plan.cluster, source), plan, open_source)
    assert others
    plan = replace(plan, alternatives=others).sealed()
    measured = (one_rank if num_ranks == 1 else two_ranks).run(peaks, plan.to_json())
    for way, *of_ranks in zip((plan, *others), *measured, strict=True):
        assert 0.9 * way.memory.live_bytes < max(of_ranks) <= 1.001 * way.memory.live_bytes, str(way.strategy)
