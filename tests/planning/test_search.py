"""The search takes the fastest strategy that fits, and prefers the simple one."""

import pytest

from frugal.config.schema import understand
from frugal.errors import NothingFitsError, RequestError
from frugal.planning.planner import decide
from frugal.planning.search.candidate import SearchResult
from frugal.planning.search.search import Search
from frugal.units import GIB
from tests.planning.synthetic import SMALL, SyntheticSource, dry_running, last, planned

WIDE_MLP = SMALL | {"mlp_bytes_per_token": 12_000_000}
"""A layer's MLP takes the whole of a card of 12 GiB for a sample of 1,024 tokens."""


def test_an_mlp_is_tiled_where_nothing_fits_without() -> None:
    made = planned(gpus=4, mem="12G", model=WIDE_MLP)
    assert (made.strategy.mlp, made.strategy.offload_optimizer) == ("tiled", "none")
    assert any(reason.startswith("the MLP is tiled: ") for reason in made.why)
    with pytest.raises(NothingFitsError):
        planned(gpus=4, mem="12G", offload="none", mlp="plain", model=WIDE_MLP)
    roomy = planned(gpus=4, mem="24G", model=WIDE_MLP)
    assert {roomy.strategy.mlp} | {rejected.strategy.mlp for rejected in roomy.rejected} == {"plain"}


def test_an_mlp_that_cannot_be_tiled_is_not_planned_so() -> None:
    with pytest.raises(NothingFitsError):
        planned(gpus=4, mem="3G", offload="none")
    with pytest.raises(RequestError, match="the model cannot take a tiled MLP"):
        planned(gpus=4, mem="12G", mlp="tiled", model=SMALL)


@pytest.mark.parametrize(
    ("offload", "why"),
    [("none", "one sample does not fit (162.9 MiB short) without it"), ("optimizer", "without it micro-batch ")],
)
def test_activation_checkpointing_is_switched_on_where_it_is_needed_or_pays(offload: str, why: str) -> None:
    made = planned(gpus=4, mem="6G", offload=offload)
    assert made.strategy.activation_checkpointing == "full"
    assert made.why[0].startswith(f"activation checkpointing is on: {why}")


def test_a_model_that_cannot_recompute_is_planned_without() -> None:
    made = planned(gpus=4, mem="24G", model={"can_recompute": False})
    tried = [made.strategy, *(rejected.strategy for rejected in made.rejected)]
    assert {strategy.activation_checkpointing for strategy in tried} == {"off"}


LARGE_VOCABULARY = SMALL | {"bytes_per_token": 500_000, "logits_bytes_per_token": 1_500_000, "can_tile": True}


def test_the_loss_is_tiled_when_that_makes_room_for_larger_micro_batches() -> None:
    made = planned(gpus=4, mem="12G", model=LARGE_VOCABULARY)
    assert made.strategy.loss == "tiled"
    assert made.batch.largest_micro_batch == 15
    assert made.why[1].startswith("the loss is tiled: with whole logits micro-batch 5 fits instead of 15")


def test_the_loss_stays_plain_where_tiling_gains_nothing() -> None:
    made = planned(gpus=4, mem="12G", global_batch=4, model=LARGE_VOCABULARY)
    assert made.strategy.loss == "plain"


def test_a_model_whose_dry_run_refuses_the_tiled_loss_is_planned_without() -> None:
    made = planned(gpus=4, mem="12G", model=LARGE_VOCABULARY | {"changes_logits": True})
    assert {made.strategy.loss} | {rejected.strategy.loss for rejected in made.rejected} == {"plain"}
    with pytest.raises(RequestError, match="cannot take the tiled loss"):
        planned(gpus=4, mem="12G", loss="tiled", model=LARGE_VOCABULARY | {"changes_logits": True})


def test_a_plan_says_which_pin_makes_it_offload() -> None:
    said = "offloads because of what is pinned; on the GPUs alone it fits with no --micro-batch"
    for micro_batch, offload in ((24, "auto"), (24, "optimizer"), (4, "auto")):
        made = planned(gpus=4, mem="6G", micro_batch=micro_batch, offload=offload)
        assert (said in made.warnings) == ((micro_batch, offload) == (24, "auto"))
        assert made.strategy.offload_optimizer == ("cpu" if micro_batch == 24 or offload == "optimizer" else "none")


def test_nothing_is_offloaded_unless_nothing_fits_without() -> None:
    assert planned(gpus=4, mem="8G").strategy.offload_optimizer == "none"
    made = planned(gpus=4, mem="4G")
    assert made.strategy.offload_optimizer == "cpu"
    assert made.why[2] == (
        "the optimizer lives in host memory: weights and optimizer states are at least 176.9 MiB too large on the GPUs "
        "alone"
    )


def test_equally_fast_strategies_go_to_the_simplest() -> None:
    made = planned(gpus=2, mem="80G", precision="fp32", global_batch=64, model=SMALL)
    assert made.strategy.num_mechanisms == 0


def test_even_micro_batches_win_over_a_slightly_larger_micro_batch() -> None:
    made = planned(gpus=4, mem="24G", model=SMALL)
    assert made.batch.is_uniform


def test_cards_that_differ_only_in_memory_take_as_much_as_the_smallest_where_that_is_fastest() -> None:
    made = planned(gpu="a100-80g", mem="12G,24G,24G", global_batch=100, model=SMALL)
    assert (made.batch.micro_batch, made.batch.accumulation_steps) == ((9, 9, 9), 4)
    assert sum(map(sum, made.batch.sizes)) == 100


def test_cards_of_another_speed_take_samples_in_proportion_and_are_done_together() -> None:
    made = planned(
        gpu="rtx3060-12g,rtx4090-24g", mem="23G,24G", global_batch=100, model=SMALL | {"bytes_per_token": 10_000}
    )
    slow, fast = (sum(sizes) for sizes in made.batch.sizes)
    assert slow + fast == 100
    assert fast / slow == pytest.approx(165 / 25.5, rel=0.05)
    seconds = [max(c) / d.matrix_flops for c, d in zip(made.batch.sizes, made.cluster.devices, strict=True)]
    assert min(seconds) > 0.9 * max(seconds)


def test_what_could_not_be_checked_is_said() -> None:
    made = planned(gpus=2, mem="4G", offload="optimizer")
    assert made.warnings == ("each host must have 14.90 GiB of memory free; give --host-mem to have that checked",)
    made = planned(gpus=2, mem="24G", offload="nvme:/scratch")
    assert (
        made.warnings[1] == "each node must have 14.90 GiB of disk free; `# disk=SIZE` in a hostfile has that checked"
    )


def test_what_others_hold_is_taken_off_and_said() -> None:
    made = planned(gpus=2, mem="24G,24G-3G", model=SMALL)
    assert made.cluster.devices[0].usable_bytes - made.cluster.devices[1].usable_bytes == 3 * GIB
    assert "GPU 1: 3.00 GiB are in use by other processes" in made.warnings


def test_a_token_target_is_never_exceeded() -> None:
    made = planned(gpus=4, mem="24G", global_tokens=100_000, global_batch=7, model=SMALL)
    assert made.batch.global_batch == 97
    assert made.batch.global_tokens == 100_000
    assert made.warnings[0] == (
        "--global-tokens and --global-batch were both given: tokens win, 100000 tokens are 97 samples of 1024"
    )


def test_a_profile_that_promises_too_much_is_found_out_and_the_choice_made_again() -> None:
    honest, corrected = planned(gpus=4, mem="12G", model=SMALL), planned(gpus=4, mem="12G", error=1.5, model=SMALL)
    assert max(corrected.batch.micro_batch) < max(honest.batch.micro_batch)
    assert corrected.memory.fits
    assert "it does not fit, and was not chosen" in corrected.warnings[0]


def test_each_choice_is_a_draft_before_it_is_dry_run_with_the_memory_of_its_profile() -> None:
    *drafts, made = decide(*understand({"gpus": 4, "mem": "12G"}), dry_running(1.5, **SMALL))
    assert all(draft.is_draft for draft in drafts) and not made.is_draft
    refused, chosen = drafts[0], drafts[-1]
    assert len(drafts) > 1 and refused.memory.fits
    assert max(refused.batch.micro_batch) > max(chosen.batch.micro_batch)
    assert (chosen.batch, chosen.strategy, chosen.time) == (made.batch, made.strategy, made.time)
    assert chosen.memory.live_bytes < made.memory.live_bytes


def test_a_profile_that_is_off_but_fits_is_told_and_the_plan_has_the_memory_of_the_dry_run() -> None:
    made = planned(gpus=4, mem="12G", error=0.9, model=SMALL)
    assert made.warnings[0].endswith("off the dry run; it still fits")
    assert made.memory.activations < planned(gpus=4, mem="12G", model=SMALL).memory.activations


def test_strategies_that_cannot_win_are_not_profiled() -> None:
    request, cluster, _ = understand({"gpus": 4, "mem": "80G", "precision": "fp32"})
    source = SyntheticSource(request, cluster, SMALL)
    last(Search(request, cluster, source))
    assert len(set(source.profiled)) < 8


def test_buckets_never_exceed_the_model() -> None:
    made = planned(gpus=4, mem="12G", model=SMALL | {"parameters": 1_000_000})
    assert made.strategy.reduce_bucket_elements == 1_000_000
    assert planned(gpus=4, mem="12G", model=SMALL).strategy.reduce_bucket_elements == 20_000_000


def test_a_thousand_gpus_are_as_many_profiles_as_eight() -> None:
    def profiled(nodes: int) -> int:
        request, cluster, _ = understand({"gpus": 8, "nodes": nodes, "mem": "24G", "global_batch": 16384})
        source = SyntheticSource(request, cluster, SMALL)
        assert isinstance(last(Search(request, cluster, source)), SearchResult)
        return len(source.profiled)

    assert profiled(128) <= profiled(1)
