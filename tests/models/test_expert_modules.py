"""Modules that run for some samples only always run, and what comes out is what transformers computes."""

from typing import Any

import pytest
import torch

from frugal.models import expert_modules

T5_LIKE = {
    "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 1,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "router_jitter_noise": 0.0,
}  # fmt: skip
BART_LIKE = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_experts": 4, "expert_capacity": 1,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "moe_token_dropout": 0.2, "decoder_start_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def loss_and_gradients(model: Any, tokens: torch.Tensor) -> tuple[float, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens, decoder_input_ids=tokens.flip(1), labels=tokens).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def made(model_type: str, dtype: torch.dtype, **values: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **values)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=dtype).eval()


def original(owner: type, name: str) -> Any:
    """Transformers' own method; what training runs replaces it for good."""
    method = vars(owner)[name]
    if method.__module__ == expert_modules.__name__:
        pytest.skip("another test has replaced it already")
    return method


@pytest.mark.parametrize(
    ("model_type", "values"), [("switch_transformers", T5_LIKE), ("nllb-moe", BART_LIKE)], ids=["switch", "nllb"]
)
def test_loss_and_gradient_are_transformers_own_and_every_expert_has_one(
    model_type: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(model_type, torch.float64, **values)
    (experts,) = {type(module) for module in model.modules() if type(module).__name__ in expert_modules.METHODS}
    tokens = torch.randint(3, 64, (1, 3))  # fewer than experts
    theirs_forward = original(experts, "forward")
    loss, theirs = loss_and_gradients(model, tokens)
    monkeypatch.setattr(experts, "forward", theirs_forward)  # put back after this test
    expert_modules.always_run(model)
    same, ours = loss_and_gradients(model, tokens)
    assert same == loss
    for name, gradient in ours.items():
        assert gradient is not None, name
        other = torch.zeros_like(gradient) if theirs[name] is None else theirs[name]
        assert torch.allclose(gradient, other, rtol=0, atol=1e-12), name  # of fp64, which rounds at 1e-16
    assert any(gradient is None for gradient in theirs.values())


@pytest.mark.parametrize("length", [8, 5])
def test_led_embeds_its_padding_in_every_micro_batch(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.led.modeling_led import LEDEncoder

    values = {name: value for name, value in BART_LIKE.items() if "expert" not in name and "sparse" not in name}
    model = made("led", torch.float32, attention_window=4, **values)
    tokens = torch.randint(3, 64, (2, length))
    calls: list[int] = []
    model.led.encoder.embed_tokens.register_forward_hook(lambda _module, inputs, _: calls.append(inputs[0].shape[1]))
    own_padding = original(LEDEncoder, "_pad_to_window_size")
    loss, theirs = loss_and_gradients(model, tokens)
    monkeypatch.setattr(LEDEncoder, "_pad_to_window_size", own_padding)  # put back after this test
    calls.clear()
    expert_modules.always_run(model)
    same, ours = loss_and_gradients(model, tokens)
    assert (same, calls) == (loss, [length, -length % 4])
    assert torch.equal(ours["led.shared.weight"], theirs["led.shared.weight"])
