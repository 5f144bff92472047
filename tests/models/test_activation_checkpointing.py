"""Any module with repeated layers can recompute them, in every mode, and learns the same."""

import random
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.engine.engine import initialize
from frugal.errors import RequestError
from frugal.memory_watch import gauge
from frugal.models import activation_checkpointing, adapters
from frugal.planning.strategy import LAYER_MODES, LayerMode
from tests.dryrun.test_truth import FAMILIES
from tests.engine.small_models import points, ragged_samples, skip_net, tiny_gpt2


def losses_and_peak(zero_stage: int, mode: str) -> tuple[list[float], int]:
    """Five steps of a plain module, and the most bytes that lived in the last. Runs on ranks."""
    model, objective = skip_net()
    plan = plan_by_hand(
        world_size=2, global_batch=1000, micro_batch=250, zero_stage=zero_stage,
        strategy={"activation_checkpointing": mode, "reduce_bucket_elements": 10_000},
    )  # fmt: skip
    engine = initialize(model, plan, objective)
    losses = [engine.train_step(points(1000, seed=step)).loss for step in range(4)]
    with gauge(engine.device) as measured:
        losses.append(engine.train_step(points(1000, seed=4)).loss)
    engine.destroy()
    return losses, measured.peak_bytes


@pytest.mark.parametrize("zero_stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 3))])
def test_a_plain_module_learns_the_same_with_less_memory(zero_stage: int, two_ranks: Ranks) -> None:
    modes = ("off", "selective", "full")
    runs = [two_ranks.run(losses_and_peak, zero_stage, each)[0] for each in modes]
    losses, (kept, selective, full) = zip(*runs, strict=True)
    assert losses[0] == losses[1] == losses[2]
    assert full < 0.7 * kept and full < selective < 0.9 * kept


MIXTURE = (("full", 1), ("off", 1))  # of the two layers of the families; a T5 has two of each kind
LONGER_MIXTURE = (("offloaded", 1), ("full", 1), ("selective", 1), ("off", 1))


def losses_of(
    family: str, zero_stage: int, precision: str, mode: str, layer_modes: tuple[tuple[LayerMode, int], ...] = ()
) -> list[float]:
    """Three steps of a transformers model with dropout where it has one. Runs on ranks."""
    build, objective = FAMILIES[family]
    torch.manual_seed(0)
    model = build().to(DTYPES[precision])
    plan = plan_by_hand(
        world_size=2, global_batch=8, micro_batch=2, zero_stage=zero_stage,
        request={"precision": precision, "learning_rate": 1e-2},
        strategy={
            "activation_checkpointing": mode, "layer_modes": layer_modes, "reduce_bucket_elements": 100_000,
        },
    )  # fmt: skip
    torch.manual_seed(torch.distributed.get_rank())
    engine = initialize(model, plan, objective())
    losses = [engine.train_step(ragged_samples(8, seed=step, longest=24)).loss for step in range(3)]
    engine.destroy()
    return losses


RARE = (("bert", 3, "fp32"), ("llama", 3, "bf16"), ("t5", 3, "fp32"))


@pytest.mark.parametrize(
    ("family", "zero_stage", "precision"),
    [("t5", 2, "bf16"), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in RARE)],
)
def test_every_mode_trains_transformers_models_alike(
    family: str, zero_stage: int, precision: str, two_ranks: Ranks
) -> None:
    kept = two_ranks.run(losses_of, family, zero_stage, precision, "off")
    for mode in ("selective", "offloaded"):
        assert two_ranks.run(losses_of, family, zero_stage, precision, mode) == kept
    mixture = LONGER_MIXTURE if family == "t5" else MIXTURE
    assert two_ranks.run(losses_of, family, zero_stage, precision, "budget", mixture) == kept


def gradients(family: str, layer_modes: tuple[tuple[LayerMode, int], ...]) -> tuple[float, list[torch.Tensor]]:
    """The loss of one batch and its gradients. Dropout draws the same."""
    build, objective = FAMILIES[family]
    torch.manual_seed(0)
    model = build().train()
    activation_checkpointing.apply(model, "budget" if layer_modes else "off", layer_modes)
    torch.manual_seed(1)
    loss = objective().loss_sum(model, objective().collate(ragged_samples(4, seed=0, longest=24)))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "llama"])
def test_random_mixtures_have_the_loss_and_the_gradients_of_off_bit_for_bit(family: str) -> None:
    drawn = random.Random(family)
    loss, kept = gradients(family, ())
    num_layers = 4 if family == "t5" else 2
    for _ in range(6):
        modes = drawn.choices(LAYER_MODES, k=num_layers)
        runs = tuple((mode, len(list(run))) for mode, run in groupby(modes))
        mixed_loss, mixed = gradients(family, runs)
        assert mixed_loss == loss
        assert all(map(torch.equal, mixed, kept))


def test_layers_of_a_mixture_that_are_off_keep_everything() -> None:
    models = [skip_net()[0] for _ in range(3)]
    num_layers = len(activation_checkpointing.layers(models[0]))
    activation_checkpointing.apply(models[1], "full")
    activation_checkpointing.apply(models[2], "budget", (("full", 1), ("off", num_layers - 1)))
    kept = []
    for model in models:
        with gauge("cpu", holding=list(model.parameters())) as found:
            before = found.live_bytes
            out = model(torch.ones(50, 16))
            kept.append(found.live_bytes - before)
            del out
    off, full, mixed = kept
    assert full < mixed < off


def test_off_keeps_no_more_under_adapters_than_in_a_model_that_was_never_switched() -> None:
    kept = []
    for modes in ((), ("full", "off"), ("full", "selective", "full", "off")):
        model = adapters.add(tiny_gpt2(), Lora.of("r=2"), "causal-lm", dtype=torch.float32, device=torch.device("cpu"))
        for mode in modes:
            activation_checkpointing.apply(model, mode)
        with gauge("cpu", holding=list(model.parameters())) as found:
            out = model(input_ids=torch.ones(2, 16, dtype=torch.long))
            kept.append(found.live_bytes)
            assert not model.get_input_embeddings()(torch.ones(1, dtype=torch.long)).requires_grad
            del out
    assert len(set(kept)) == 1


def test_off_gives_layers_their_own_forward_back_and_names_stay() -> None:
    model, _ = skip_net()
    layers = activation_checkpointing.repeated_layers(model)
    assert layers == list(model.blocks)
    own, names = [layer.forward for layer in layers], list(dict(model.named_parameters()))
    for mode in ("full", "selective", "off"):
        activation_checkpointing.apply(model, mode)
        assert ([layer.forward for layer in layers] == own) == (mode == "off")
        assert list(dict(model.named_parameters())) == names


class Own(nn.Module):
    """A model with a switch of its own, which knows no modes."""

    recomputes = False

    def gradient_checkpointing_enable(self, *_: object) -> None:
        self.recomputes = True


@pytest.mark.parametrize(
    ("model", "mode", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ("full",), "Sequential does not support activation checkpointing"),
        (Own(), ("selective",), "Own does not support activation checkpointing selective"),
        (tiny_gpt2(), ("budget", (("full", 5), ("off", 2))), "GPT2LMHeadModel has 2 layers that can be recomputed"),
    ],
)
def test_what_cannot_be_recomputed_so_is_refused(model: nn.Module, mode: tuple[Any, ...], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        activation_checkpointing.apply(model, *mode)
    assert caught.value.what == said


def test_a_switch_of_its_own_is_used() -> None:
    model = Own()
    activation_checkpointing.apply(model, "full")
    assert model.recomputes
