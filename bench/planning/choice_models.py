"""The small models of `bench.planning.choice`, each of another shape: `bench/planning/choice_models.py:deep`."""

from torch import nn

from bench.memory.families import _transformers

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False}


def _llama(width: int, layers: int, vocabulary: int) -> nn.Module:
    return _transformers(
        "AutoModelForCausalLM",
        "llama",
        **_SPECIAL,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def deep() -> nn.Module:
    """Many narrow layers: operators are what takes time."""
    return _llama(64, 10, 512)


def wide() -> nn.Module:
    """Two wide layers: matrix products are."""
    return _llama(384, 2, 1024)


def vocabulary() -> nn.Module:
    """A vocabulary that dwarfs the layers: logits fill the memory."""
    return _llama(96, 2, 24_000)


def long() -> nn.Module:
    """For long samples: attention takes the time."""
    return _llama(64, 3, 512)


def classic() -> nn.Module:
    """GPT-2 with dropout and a tied head."""
    return _transformers(
        "AutoModelForCausalLM", "gpt2", **_SPECIAL, n_layer=6, n_embd=128, n_head=4, vocab_size=4000, n_positions=512
    )


def encoder() -> nn.Module:
    """BERT, for masked tokens."""
    return _transformers(
        "AutoModelForMaskedLM", "bert", num_hidden_layers=6, hidden_size=128, num_attention_heads=4,
        intermediate_size=512, vocab_size=4000, max_position_embeddings=512,
    )  # fmt: skip


def translator() -> nn.Module:
    """T5, an encoder and a decoder."""
    return _transformers(
        "AutoModelForSeq2SeqLM", "t5", d_model=128, d_kv=32, d_ff=384, num_layers=4, num_heads=4, vocab_size=4000,
        pad_token_id=0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip


def experts() -> nn.Module:
    """Mixtral: four experts a layer, two for each token."""
    return _transformers(
        "AutoModelForCausalLM", "mixtral", **_SPECIAL, hidden_size=96, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=512,
    )  # fmt: skip
