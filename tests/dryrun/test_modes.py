"""A dry run sees what every mode of activation checkpointing keeps, moves and computes again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.dryrun.messages import AskDryRun, DryRun
from frugal.dryrun.run import dry_run
from frugal.dryrun.trace.recorder import Tracker
from frugal.memory_watch import gauge
from frugal.models import activation_checkpointing
from frugal.planning.strategy import Strategy
from tests.dryrun.test_truth import (
    FAMILIES,
    SMALL_BUCKETS,
    assert_as_dry_run,
    plan_for,
    tiny,
)


@pytest.mark.parametrize(
    ("family", "zero_stage", "precision", "steps"),
    [
        ("llama", 2, "bf16", 1),
        ("t5", 3, "bf16", 3),
        pytest.param("gpt2", 0, "fp32", 3, marks=pytest.mark.exhaustive),
        pytest.param("bert", 3, "fp32", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_selective_is_as_dry_run(family: str, zero_stage: int, precision: str, steps: int, two_ranks: Ranks) -> None:
    plan = plan_for(2, 4, steps, zero_stage, precision, "selective")
    assert_as_dry_run(plan, two_ranks, family)


@pytest.mark.parametrize(
    ("family", "zero_stage", "precision", "steps", "layer_modes"),
    [
        ("gpt2", 2, "fp32", 3, (("full", 1), ("off", 1))),
        ("t5", 3, "bf16", 1, (("full", 2), ("selective", 1), ("off", 1))),
        pytest.param("llama", 0, "fp32", 1, (("selective", 1), ("off", 1)), marks=pytest.mark.exhaustive),
        pytest.param("bert", 1, "fp32", 3, (("full", 1), ("selective", 1)), marks=pytest.mark.exhaustive),
        pytest.param("llama", 3, "fp32", 3, (("full", 1), ("off", 1)), marks=pytest.mark.exhaustive),
        pytest.param("t5", 2, "fp32", 3, (("full", 3), ("off", 1)), marks=pytest.mark.exhaustive),
    ],
)
def test_a_mixture_is_as_dry_run(
    family: str, zero_stage: int, precision: str, steps: int, layer_modes: tuple[Any, ...], two_ranks: Ranks
) -> None:
    plan = plan_for(2, 4, steps, zero_stage, precision, "budget", {"layer_modes": layer_modes})
    assert_as_dry_run(plan, two_ranks, family)


def on_gpu(mode: Any, build: Callable[[], Any], *, zero_stage: int = 2, kind: Any = "cuda") -> DryRun:
    """The dry run of one GPU in bf16."""

    def on_meta() -> Any:
        with torch.device("meta"):
            return build().to(DTYPES["bf16"])

    plan = plan_for(1, 4, 1, zero_stage, "bf16", mode)
    strategy = Strategy(zero_stage=zero_stage, activation_checkpointing=mode, **SMALL_BUCKETS)
    return dry_run(
        on_meta,
        FAMILIES["llama"][1](),
        AskDryRun(
            request=plan.request,
            strategy=strategy,
            micro_batch=4,
            accumulation_steps=1,
            world_size=1,
            rank=0,
            kind=kind,
        ),
    )


LLAMA = FAMILIES["llama"][0]


def test_selective_computes_no_product_with_weights_and_no_attention_again() -> None:
    full, selective = on_gpu("full", LLAMA), on_gpu("selective", LLAMA)
    assert selective.counts.recompute_flops == 0 < full.counts.recompute_flops < full.counts.flops / 3
    assert selective.counts.flops == full.counts.flops


def test_attention_with_dropout_is_computed_again() -> None:
    def with_dropout() -> Any:
        return tiny(
            "AutoModelForCausalLM", "llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False, attention_dropout=0.1,
        )()  # fmt: skip

    assert on_gpu("selective", with_dropout).counts.recompute_flops == 2 * 4 * 4 * (2 * 2 * 64 * 64 * 16)


def test_the_modes_keep_less_and_less_on_a_gpu() -> None:
    live = {
        mode: max(i.live_bytes for i in on_gpu(mode, LLAMA).timeline.intervals(4) if i.phase == "forward")
        for mode in ("off", "selective", "full", "offloaded")
    }
    assert live["off"] > live["selective"] > live["full"]
    assert live["full"] - live["offloaded"] == 2 * 4 * 64 * 64 * 2  # layers, samples, tokens, width, bf16


def test_the_random_state_that_a_layer_keeps_is_counted() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(3)))
    activation_checkpointing.apply(model, "full")
    with gauge("cpu", holding=list(model.parameters())) as found:
        before = found.live_bytes
        out = model(torch.ones(1, 8))
        inputs_and_output = 4 * (8 * 4)  # layers and one, width, fp32
        states = 3 * torch.get_rng_state().nbytes
        assert found.live_bytes == before + inputs_and_output + states
        del out
        assert found.live_bytes == before


def test_on_a_cpu_rank_offloaded_is_full() -> None:
    full, offloaded = (on_gpu(mode, LLAMA, kind="cpu") for mode in ("full", "offloaded"))
    assert offloaded.phases == full.phases


def test_offloaded_moves_each_layer_s_own_input_to_the_host_and_nothing_else() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return self.inner(x) + shared

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Adds() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            shared = x * 2
            for layer in self.layers:
                x = layer(x, shared)
            return x

    model = Model().to("meta")
    activation_checkpointing.apply(model, "offloaded")
    tracker = Tracker("cuda")
    tracker.watch(model)
    with tracker:
        out = model(torch.empty(4, 8, device="meta"))
        assert tracker.host.live_bytes == 3 * (4 * 8 * 4 + torch.get_rng_state().nbytes)
        out.sum().backward()
        del out
    assert tracker.host.live_bytes == 0
