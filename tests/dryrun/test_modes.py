"""A dry run sees what every mode of activation checkpointing keeps, moves and computes again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frugal.dryrun.messages import DryRun
from frugal.dryrun.trace.recorder import Tracker
from frugal.memory_watch import gauge
from frugal.models import activation_checkpointing
from tests.dryrun.test_truth import LLAMA, dry_run_of, plan_for


def on_gpu(mode: Any, build: Callable[[], Any] = LLAMA, kind: Any = "cuda") -> DryRun:
    """The dry run of one GPU in bf16."""
    return dry_run_of(plan_for(1, 4, 1, 2, "bf16", mode), build, kind=kind)


def test_selective_computes_no_product_with_weights_and_no_attention_again() -> None:
    full, selective = on_gpu("full"), on_gpu("selective")
    assert selective.counts["recompute_flops"] == 0 < full.counts["recompute_flops"] < full.counts["flops"] / 3
    assert selective.counts["flops"] == full.counts["flops"]


def test_attention_with_dropout_is_computed_again() -> None:
    with_dropout = partial(LLAMA, attention_dropout=0.1)
    assert on_gpu("selective", with_dropout).counts["recompute_flops"] == 2 * 4 * 4 * (2 * 2 * 64 * 64 * 16)


def test_the_modes_keep_less_and_less_on_a_gpu() -> None:
    live = {
        mode: max(i.live_bytes for i in on_gpu(mode).timeline.intervals(4) if i.phase == "forward")
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
    full, offloaded = (on_gpu(mode, kind="cpu") for mode in ("full", "offloaded"))
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
