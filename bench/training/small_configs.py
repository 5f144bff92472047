"""A small configuration of every kind of text model in transformers, made from its own defaults."""

import contextlib
from collections.abc import Mapping
from typing import Any

VOCABULARY = 256

_VALUES: dict[int, str] = {
    1: "n_group topk_group",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts "
    "num_key_value_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_key_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts ffn_num_experts",
    8: "rotary_dim",
    16: "d_kv head_dim global_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank "
    "linear_key_head_dim "
    "linear_value_head_dim dim_head sliding_window index_head_dim mamba_head_dim",
    64: "hidden_size d_model n_embd dim embedding_size d_embed emb_dim d_ff intermediate_size ffn_dim encoder_ffn_dim "
    "decoder_ffn_dim hidden_dim n_inner mamba_d_ssm ffn_hidden_size expert_ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size dim_ff",
    128: "max_position_embeddings n_positions",
    VOCABULARY: "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size",
}
SMALL = {name: value for value, names in _VALUES.items() for name in names.split()}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3, "decoder_start_token_id": 4}
MORE: dict[str, dict[str, Any]] = {
    "axk1": {"first_k_dense_replace": 1},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "bamba": {"mamba_chunk_size": 16, "mamba_n_heads": 8, "mamba_d_head": 16},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "encoder-decoder": {
        "encoder": {
            "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 64, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "decoder": {
            "model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 64, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "is_decoder": True, "add_cross_attention": True,
        },
        "decoder_start_token_id": 4, "pad_token_id": 0,
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3, "max_position_embeddings": 128},
    "esmc": {"vocab_size": VOCABULARY},
    "deberta": {"pooler_hidden_size": 64},
    "deberta-v2": {"pooler_hidden_size": 64},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 16},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_chunk_size": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "visual_embed": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},
    "longformer": {"attention_window": [8, 8]},
    "led": {"attention_window": [8, 8], "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128},
    "luke": {"entity_vocab_size": 100, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "reformer": {
        "axial_pos_embds": False, "is_decoder": True, "attn_layers": ["local", "local"], "attention_head_size": 16,
        "feed_forward_size": 64, "local_attn_chunk_length": 8, "max_position_embeddings": 128,
    },
    "roc_bert": {
        "shape_vocab_size": 64, "pronunciation_vocab_size": 64, "shape_embed_dim": 16, "pronunciation_embed_dim": 16,
    },
    "xlnet": {"d_head": 16, "d_inner": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "nemotron_h": {"chunk_size": 16},
    "zamba2": {"chunk_size": 16, "layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2},
}  # fmt: skip
"""What a kind needs besides, because its own values depend on each other."""


def small_config(kind: Any, sizes: Mapping[int, int] = {}) -> Any:
    """A configuration of class `kind` with few narrow layers, at least one of each type, without dropout.

    `sizes`: what takes the place of the sizes in `_VALUES`.

    Raises: what transformers does where the values contradict each other.
    """
    default = kind()
    values = _smaller(default, sizes)
    for name in kind.sub_configs or {}:
        part = getattr(default, name, None)
        if hasattr(part, "model_type"):
            values[name] = {**_smaller(part, sizes), "model_type": part.model_type}
    config = kind(**values | MORE.get(kind.model_type, {}))
    for name, token_id in (("pad_token_id", 0), ("decoder_start_token_id", 4)):
        if config.is_encoder_decoder and getattr(config, name, None) is None:
            setattr(config, name, token_id)
    return config


def _smaller(default: Any, sizes: Mapping[int, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, smallest in SMALL.items():
        small = sizes.get(smallest, smallest)
        present = _value(default, name)
        if isinstance(present, int) and not isinstance(present, bool) and present > small:
            values[name] = small
    if _value(default, "num_key_value_heads") == _value(default, "num_attention_heads"):
        values.pop("num_key_value_heads", None)
        if "num_key_value_heads" in vars(default):
            values["num_key_value_heads"] = values.get("num_attention_heads", default.num_attention_heads)
    types = _value(default, "layer_types") or _value(default, "layers_block_type")
    if types and "num_hidden_layers" in values:
        values["num_hidden_layers"] = max(2, 1 + max(map(types.index, set(types))))
    values |= {name: 0.0 for name, value in vars(default).items() if "drop" in name and isinstance(value, float)}
    return values | {name: token_id for name, token_id in _IDS.items() if _value(default, name) is not None}


def _value(config: Any, name: str) -> Any:
    """A value that may be set; None where it follows from others."""
    if isinstance(getattr(type(config), name, None), property):
        return None
    with contextlib.suppress(Exception):  # configurations whose values differ from layer to layer refuse
        return getattr(config, name, None)
    return None
