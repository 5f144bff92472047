"""Ranks that share samples train what one process trains with whole ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.ranks import Ranks
from frugal.models.objectives import CausalLM, tokens_and_positions
from frugal.models.sequence_parallel import parts_of
from tests.engine.gradients import bound_of_losses, relative_error, with_bound
from tests.engine.sequence import runs


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four real ranks on gloo."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def assert_as_whole(kind: str, zero_stages: list[int], ranks: Ranks, sequence_parallel: int, one_rank: Ranks) -> None:
    whole = one_rank.run(runs.gradients, kind, 1, 1, [0])[0]
    bound = 2 * with_bound(runs.plain_gradient, kind)[1]  # both are in fp32
    for of_rank in ranks.run(runs.gradients, kind, ranks.world_size, sequence_parallel, zero_stages):
        for (gradient, loss, evaluated), expected in zip(of_rank, whole * len(zero_stages), strict=True):
            assert relative_error(gradient, expected[0]) < bound
            assert (loss, evaluated) == pytest.approx(expected[1:], rel=bound)


@pytest.mark.parametrize(("kind", "zero_stages"), [("gpt2", [3]), ("mistral", [2])])
def test_two_ranks_that_share_each_sample_have_the_gradient_of_one_process(
    kind: str, zero_stages: list[int], two_ranks: Ranks, one_rank: Ranks
) -> None:
    assert_as_whole(kind, zero_stages, two_ranks, 2, one_rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence_parallel", [1, 2, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_so_have_four_ranks_in_two_groups_or_in_one_that_has_more_ranks_than_heads_of_keys(
    kind: str, sequence_parallel: int, four_ranks: Ranks, one_rank: Ranks
) -> None:
    assert_as_whole(kind, [0, 1, 2, 3], four_ranks, sequence_parallel, one_rank)


@pytest.mark.parametrize("packed", [False, True])
def test_the_parts_of_a_micro_batch_have_each_token_once_and_the_padding_that_is_computed(packed: bool) -> None:
    taken, whole = runs.samples(packed), CausalLM(packed=packed)
    longest = max(len(sample["input_ids"]) for sample in taken)
    for size in (1, 2, 3, 4):
        parts = [parts_of(whole, size, part) for part in range(size)]
        counted = [tokens_and_positions(part, taken, part.collate(taken)) for part in parts]
        tokens, positions = map(sum, zip(*counted, strict=True))
        assert tokens == sum(len(sample["input_ids"]) for sample in taken)
        assert positions == len(taken) * -(-longest // size) * size


def bound(steps: int) -> float:
    """Return how far losses of `runs.losses` may be apart, relative."""
    batches = [runs.samples(False, seed=step) for step in range(steps)]
    return bound_of_losses(lambda: runs.model("llama"), batches, learning_rate=1e-2)


@pytest.fixture(scope="module")
def whole(one_rank: Ranks) -> Any:
    """The losses of four steps of one process."""
    return pytest.approx(one_rank.run(runs.losses, 1, 1, 0, steps=4)[0], rel=bound(4))


@pytest.mark.parametrize(
    ("zero_stage", "how"),
    [
        (3, {"activation_checkpointing": "full", "loss": "tiled"}),
        (2, {"activation_checkpointing": "selective"}),
        (2, {"lora": "r=4", "activation_checkpointing": "full"}),
        pytest.param(3, {"lora": "r=4", "loss": "tiled"}, marks=pytest.mark.exhaustive),
        pytest.param(3, {"activation_checkpointing": "selective"}, marks=pytest.mark.exhaustive),
        pytest.param(1, {"activation_checkpointing": "full"}, marks=pytest.mark.exhaustive),
        pytest.param(3, {"activation_checkpointing": "offloaded"}, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_recomputation_tiled_loss_and_adapters_change_nothing(
    zero_stage: int, how: dict[str, str], two_ranks: Ranks, one_rank: Ranks
) -> None:
    lora = how.get("lora")
    whole = one_rank.run(runs.losses, 1, 1, 0, steps=3, lora=lora)[0]
    assert two_ranks.run(runs.losses, 2, 2, zero_stage, steps=3, **how)[0] == pytest.approx(whole, rel=bound(3))


def test_without_memory_on_one_rank_all_run_the_same_samples_in_smaller_micro_batches(
    two_ranks: Ranks, whole: Any
) -> None:
    assert two_ranks.run(runs.interrupted, 2)[0] == whole


@pytest.mark.parametrize(
    ("first", "then", "zero_stages"), [(2, 1, (3, 2)), pytest.param(1, 2, (1, 3), marks=pytest.mark.exhaustive)]
)
def test_a_run_goes_on_where_other_numbers_of_ranks_share_samples(
    first: int, then: int, zero_stages: tuple[int, int], tmp_path: Path, two_ranks: Ranks, whole: Any
) -> None:
    assert two_ranks.run(runs.resumed, tmp_path, first, then, zero_stages)[0] == whole


def test_a_metric_sees_each_sample_whole(two_ranks: Ranks, one_rank: Ranks) -> None:
    assert two_ranks.run(runs.of_metric, 2, 2) == one_rank.run(runs.of_metric, 1, 1) * 2


def test_what_cannot_be_split_is_refused_on_all_ranks(two_ranks: Ranks) -> None:
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for said in two_ranks.run(runs.refusal, "llama", 2, rope_parameters=stretched):
        assert said.startswith("--sequence-parallel 2 is impossible for LlamaForCausalLM\n  because its rotary ")
        assert said.endswith("hint: leave --sequence-parallel out")
