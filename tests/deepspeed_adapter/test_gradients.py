"""Gradients are summed with few kernels, to the same sums, and weights pointed where they moved."""

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2
from torch.utils._python_dispatch import TorchDispatchMode

from bench.ranks import Ranks
from frugal.deepspeed_adapter import gradients
from frugal.models.objectives import CausalLM
from tests.engine.engines import plan_here, running
from tests.engine.small_models import ragged_samples


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run."""
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def trained(precision: str, *, in_few_kernels: bool) -> tuple[list[list[float]], float, int, Counter[str]]:
    """This rank's master weights after two unclipped steps of two micro-steps, the last norm, the number of parameters
    that it updates, and the operators of the last step. Runs on ranks."""
    plan = plan_here(2, 8, 2, {"precision": precision, "gradient_clipping": 0.0, "seq_len": 128})
    theirs = patch.object(gradients, "sum_in_few_kernels", lambda _optimizer: None)
    with nullcontext() if in_few_kernels else theirs, running(plan, None, CausalLM()) as engine:
        engine.train_step(ragged_samples(8))
        with Counting() as counting:
            norm = engine.train_step(ragged_samples(8, seed=2)).grad_norm
        masters = [master.flatten().tolist() for master in engine.zero.masters()]
        number = sum(map(len, engine.deepspeed.optimizer.params_in_partition))
    assert norm is not None
    return masters, norm, number, counting.counts


SINCE = pytest.mark.skipif(
    not hasattr(stage_1_and_2, "GradPartitionBufferGroup"), reason="sums are one tensor from 0.19.8 on"
)


@SINCE
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_sums_are_deepspeeds_with_a_fraction_of_its_kernels(precision: str, two_ranks: Ranks) -> None:
    ours = two_ranks.run(trained, precision, in_few_kernels=True)
    theirs = two_ranks.run(trained, precision, in_few_kernels=False)
    for (masters, norm, number, counts), (their_masters, their_norm, _, their_counts) in zip(ours, theirs, strict=True):
        assert masters == their_masters
        assert norm == pytest.approx(their_norm, rel=2 * torch.finfo(torch.float32).eps)
        assert counts["linalg_vector_norm"] <= 9 < number <= their_counts["linalg_vector_norm"]
        micro_steps = 2
        assert their_counts["copy_"] - counts["copy_"] >= micro_steps * number
        assert their_counts["_to_copy"] - counts["_to_copy"] >= micro_steps * number


def pointed(precision: str, *, is_ours: bool) -> tuple[list[Any], int, int]:
    """This rank's master weights after three steps, after the first of which a weight is moved; the number of
    parameters, and the tensors that the last step took from others without a copy. Runs on ranks."""
    plan = plan_here(2, 8, 2, {"precision": precision, "seq_len": 128})
    in_place, name = gradients.in_place_of, "_update_model_bit16_weights"
    as_theirs = patch.object(gradients, "in_place_of", lambda o, n: (lambda f: f) if n == name else in_place(o, n))
    with nullcontext() if is_ours else as_theirs, running(plan, None, CausalLM()) as engine:
        engine.train_step(ragged_samples(8))
        weight = next(engine.module.parameters())
        weight.data = weight.data.clone()
        engine.train_step(ragged_samples(8, seed=2))
        (flat,) = engine.deepspeed.optimizer.bit16_groups_flat
        assert weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        with Counting() as counting:
            engine.train_step(ragged_samples(8, seed=3))
        masters = [master.flatten().tolist() for master in engine.zero.masters()]
        return masters, len(list(engine.module.parameters())), counting.counts["detach"]


@SINCE
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_weights_are_pointed_at_their_place_only_where_they_moved(precision: str, two_ranks: Ranks) -> None:
    ours = two_ranks.run(pointed, precision, is_ours=True)
    theirs = two_ranks.run(pointed, precision, is_ours=False)
    for (masters, number, taken), (their_masters, _, their_taken) in zip(ours, theirs, strict=True):
        assert masters == their_masters
        assert taken + number <= their_taken
