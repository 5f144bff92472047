"""Models whose memory depends on their data are dry-run under assumptions that the dry run tells."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.dryrun.trace import operators
from frugal.models import expert_modules
from frugal.models.objectives import CausalLM, Seq2Seq, SequenceClassification, SummedLoss
from frugal.planning.plan import Plan
from tests.dryrun.test_truth import SEQ_LEN, TOLERANCE, assert_as_dry_run, dry_run_of, measured, plan_for
from tests.engine.small_models import TINY, Block


class Custom(nn.Module):
    """Two layers and something between them: rows `(samples, 64, 64)` to the same or fewer."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(64) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.between(self.layers[0](x)))


def chosen_by_a_mask(x: Tensor) -> Tensor:
    return x[x[..., 0] > -100]


def chosen_by_positions(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[(x[..., 0] > -100).flatten().nonzero()[:, 0]]


def selected(x: Tensor) -> Tensor:
    return x.masked_select(x > -1e9).view(-1, 64)


def unique(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[torch.unique(x[..., 0].argsort(0).flatten(), return_inverse=True)[1]]


def under_a_condition(x: Tensor) -> Tensor:
    if (x.abs() + 1).sum() > 0:
        x = F.gelu(x) * F.gelu(x)
    return x


def as_long_as_data_says(x: Tensor) -> Tensor:
    return x[:, : 64 + int(x.isnan().sum().item())]


def counted(x: Tensor) -> Tensor:
    counts = torch.bincount(x[..., 0].long().clamp(0, 63).flatten(), minlength=64)
    return x * (counts > 0)


def unless_a_number_is_nan(x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("NaN")
    return x


def packed_by_lengths(x: Tensor) -> Tensor:
    lengths = (x[..., 0] > -100).sum(1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


def an_expert_chosen_by_data(x: Tensor) -> Tensor:
    return x * (torch.ones(2, 64, device=x.device, dtype=x.dtype)[x.isnan().sum()] + x)


def with_positions_that_all_attend_to(x: Tensor) -> Tensor:
    """As LED has it: where there are some, their number is a tensor that `narrow` takes, and no number fits."""
    number = (x[..., 0] > 1e9).sum(1).max()
    if number > 0:
        assert x.narrow(1, 0, number).shape[1] == 0
    return x


CASES = {
    chosen_by_a_mask: operators.EVERYTHING,
    chosen_by_positions: operators.EVERYTHING,
    selected: operators.EVERYTHING,
    unique: operators.ALL_DIFFERENT,
    under_a_condition: "an `if` depends on data: counted as if its condition were true",
    with_positions_that_all_attend_to: "an `if` depends on data: counted as if its condition were false",
    unless_a_number_is_nan: "an `if` depends on data: counted as if its condition were false",
    as_long_as_data_says: "an integer is read from data: counted as if it were 64",
    counted: operators.AS_MANY_BINS,
    packed_by_lengths: operators.FULL_LENGTH,
    an_expert_chosen_by_data: "an integer is read from data: counted as if it were 1",
}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"].to(next(model.parameters()).dtype)).square().sum()


def objective() -> SummedLoss:
    generator = torch.Generator().manual_seed(0)
    return SummedLoss(loss, example={"x": torch.randn(64, 64, generator=generator, device="cpu")})


def plan_in(precision: str, mode: str = "off") -> Plan:
    return plan_for(1, 4, 1, 2 if precision == "bf16" else 0, precision, mode)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_where_the_assumption_holds_the_dry_run_is_right_and_says_what_it_assumed(
    case: Callable[[Tensor], Tensor], one_rank: Ranks
) -> None:
    found = assert_as_dry_run(plan_in("bf16"), one_rank, partial(Custom, case), objective)
    assert found.notes == (CASES[case],)


def test_recomputation_takes_the_same_branch() -> None:
    class Branching(Block):
        def forward(self, x: Tensor) -> Tensor:
            return under_a_condition(super().forward(x))

    def build() -> nn.Module:
        model = Custom(nn.Identity())
        model.layers = nn.ModuleList(Branching(64) for _ in range(2))
        return model

    full, off = (dry_run_of(plan_in("bf16", mode), build, objective) for mode in ("full", "off"))
    assert full.phases["forward"] < off.phases["forward"]
    assert full.counts["recompute_flops"] > 0


def classifier(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family].from_dict({**TINY[family], "num_labels": 3})
    return transformers.AutoModelForSequenceClassification.from_config(config).train()


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_classifiers_that_look_for_their_end_token_are_dry_run_as_an_upper_bound(family: str, one_rank: Ranks) -> None:
    plan, parts = plan_in("fp32"), (partial(classifier, family), partial(SequenceClassification, 0, end_id=2))
    found = dry_run_of(plan, *parts)
    assert found.notes == (operators.ALL_EQUAL, operators.EVERYTHING)
    truth: dict[str, int] = {}
    for phase, peak, _ in one_rank.run(measured, plan, *parts)[0]:
        truth[phase] = max(peak, truth.get(phase, 0))
    every_state = 4 * SEQ_LEN * 32 * 4  # samples, tokens, width, fp32: selected instead of one a sample
    for phase, peak in found.phases.items():
        assert truth[phase] <= peak <= truth[phase] + 2 * every_state


def mixture() -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


def latent_attention() -> nn.Module:
    """Multi-head latent attention: heads of values are narrower than those of queries."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "deepseek_v3", vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=1, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


def switch() -> nn.Module:
    """Experts that are modules of their own, one for each token."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "switch_transformers", vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2,
        num_heads=4, num_experts=4, expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        dropout_rate=0.0, router_jitter_noise=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).train()
    expert_modules.always_run(model)
    return model


@pytest.mark.parametrize(
    ("build", "objective", "precision", "mode", "tolerance"),
    [
        (mixture, CausalLM, "fp32", "full", TOLERANCE),
        (mixture, CausalLM, "bf16", "full", TOLERANCE),
        (latent_attention, CausalLM, "fp32", "off", TOLERANCE),
        (switch, Seq2Seq, "fp32", "off", 0.01),
    ],
)
def test_experts_and_heads_of_two_sizes_need_no_assumption(
    build: Callable[[], nn.Module], objective: Any, precision: str, mode: str, tolerance: float, one_rank: Ranks
) -> None:
    assert assert_as_dry_run(plan_in(precision, mode), one_rank, build, objective, tolerance).notes == ()


def test_the_products_of_experts_count_as_work() -> None:
    tokens, width, inner, experts_each = 4 * SEQ_LEN, 64, 32, 2
    found, dense = (dry_run_of(plan_in("bf16"), build) for build in (mixture, without_experts))
    forward = 2 * tokens * experts_each * (3 * width * inner) * 2
    routers = 2 * tokens * width * 4 * 2  # run without experts, too, but learn nothing
    # Backward is two products for each one.
    assert found.counts["flops"] - dense.counts["flops"] == 3 * forward + 2 * routers


def without_experts() -> nn.Module:
    model = mixture()
    for layer in model.model.layers:
        layer.mlp.experts = _Nothing()
    return model


class _Nothing(nn.Module):
    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        return hidden * 1
