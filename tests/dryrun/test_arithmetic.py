"""Sums that everybody does by hand come out of real dry runs."""

from functools import partial

import pytest
import torch
from torch import nn

from bench.plans import plan_by_hand
from frugal.config.optimizers import Optimizer
from frugal.models.objectives import SummedLoss
from frugal.planning.memory.timeline import CATEGORIES, LOGITS, Timeline
from tests.dryrun.test_truth import dry_run_of
from tests.engine.small_models import tiny_gpt2

WIDTH, RANKS = 64, 64


def alive(timeline: Timeline, num_events: int) -> set[int]:
    """The storages that live after so many births and deaths."""
    found: set[int] = set()
    for storage in timeline.events[:num_events]:
        found ^= {storage}
    return found


def test_logits_of_40000_words_250_tokens_32_samples_and_their_gradient() -> None:
    """40,000 x 250 x 32 x 4 bytes are 1.28e9, and the gradient takes as much again.

    Four tensors of this size are made: logits, log-softmax, its gradient and theirs. Three live at the peak.
    """
    plan = plan_by_hand(world_size=1, global_batch=32, micro_batch=32, zero_stage=0, request={"seq_len": 250})

    build = partial(tiny_gpt2, n_layer=1, vocab_size=40_000, n_positions=250)
    found = dry_run_of(plan, build, kind="cuda")
    one = 40_000 * 250 * 32 * 4
    assert one == 1.28e9
    assert found.peak.categories["logits"] == 3 * one
    assert (found.peak.phase, found.peak.operator) == ("backward", "aten._log_softmax_backward_data.default")
    timeline, sizes = found.timeline, found.timeline.sizes(32)
    makers = [timeline.names[timeline.operators[i]] for i, c in enumerate(timeline.categories) if c == LOGITS]
    assert all(sizes[i] == one for i, category in enumerate(timeline.categories) if category == LOGITS)
    assert set(makers) == {
        "aten.mm.default",
        "aten._log_softmax.default",
        "aten.nll_loss_backward.default",
        "aten._log_softmax_backward_data.default",
    }


class Rows(nn.Module):
    """One equal matrix for each rank, so that shares come out even."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(RANKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(samples, width)` to the same."""
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zeros_figure_1(zero_stage: int, gigabytes: float) -> None:
    """Model states of 7.5B parameters on 64 GPUs (Rajbhandari et al., ZeRO, 2020, figure 1), from what 64 ranks hold.

    The paper counts 2 bytes of parameter, 2 of gradient and 12 of master weight and moments; so does DeepSpeed where
    gradients are summed in bf16, while they are accumulated. frugal sums them in fp32: 4 bytes in place of 2 on every
    rank that owns them, which for stage 2 is 7.5e9 x 2 / 64 = 0.23 GB more than the figure.
    """
    plan = plan_by_hand(
        world_size=RANKS, global_batch=2 * RANKS, micro_batch=1, zero_stage=zero_stage, request={"precision": "bf16"},
        strategy={
            "gradient_accumulation_dtype": "bf16", "reduce_bucket_elements": 4 * WIDTH * WIDTH,
            "prefetch_bucket_elements": 0, "max_live_elements": 0, "persistence_threshold_elements": 0,
        },
    )  # fmt: skip

    def summed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"].bfloat16()).float().sum()

    objective = partial(SummedLoss, summed, example={"x": torch.zeros(WIDTH)})
    found = dry_run_of(plan, Rows, objective, kind="cuda")
    timeline, sizes = found.timeline, found.timeline.sizes(1)
    second_micro_step = [first for phase, first in timeline.phases if phase == "forward"][-1]
    states = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for storage in alive(timeline, second_micro_step):
        if (category := CATEGORIES[timeline.categories[storage]]) in states:
            states[category] += sizes[storage]
    elements = RANKS * WIDTH * WIDTH
    share = 1 / RANKS
    expected = {
        "parameters": 2 * (share if zero_stage == 3 else 1),
        "gradients": 2 * (share if zero_stage >= 2 else 1),
        "optimizer": (4 + Optimizer().state_bytes_per_element) * (share if zero_stage >= 1 else 1),
    }
    assert {name: size / elements for name, size in states.items()} == pytest.approx(expected, abs=2e-3)
    assert sum(states.values()) / elements * 7.5 == pytest.approx(gigabytes, abs=0.06)
