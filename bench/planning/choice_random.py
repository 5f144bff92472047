"""Cases that nobody tuned for: models of random shapes and families, and what binds them, drawn from a date.

    python -m bench.planning.choice --unseen 32                  # those of today
    python -m bench.planning.choice --unseen 32 --seed 20261123  # those of a day

A step of such a model takes about 0.05 to 0.5 s on a core of 2020, so that a case takes seconds.
"""

import random
from pathlib import Path
from typing import Any, Literal, cast

from bench.planning.choice_cases import Case
from frugal.planning.strategy import ActivationCheckpointing

FAMILIES = ("llama", "qwen2", "mistral", "gpt2", "gpt_neox", "opt", "bert", "t5", "mixtral")
LEAST_VOCABULARY, MOST_VOCABULARY = 512, 23_000  # tokens up to 500 are drawn
LEAST_FLOPS, MOST_FLOPS = 1e9, 1e10  # of a rank in a step
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def cases(number: int, seed: int, folder: Path) -> tuple[Case, ...]:
    """So many cases on one and two ranks; their models are factories in a file in `folder`."""
    chance, drawn, text = random.Random(seed), [], [_HEAD]
    while len(drawn) < number:
        family, width, layers = chance.choice(FAMILIES), 32 * chance.randint(2, 12), chance.randint(2, 10)
        seq_len = 2 ** chance.randint(5, 9)
        vocabulary = round(LEAST_VOCABULARY * (MOST_VOCABULARY / LEAST_VOCABULARY) ** chance.random())
        dropout = chance.choice((0.0, 0.0, 0.1))
        world_size, global_batch = chance.choice((1, 2)), 2 ** chance.randint(2, 5)
        parameters = layers * 10 * width * width + width * vocabulary
        flops = 6 * parameters * seq_len * global_batch / world_size
        if not LEAST_FLOPS <= flops <= MOST_FLOPS:
            continue
        name = f"{family}_{len(drawn)}"
        text.append(_factory(name, family, _shape(family, width, layers, vocabulary, dropout)))
        drawn.append(_case(chance, f"{folder / 'models.py'}:{name}", world_size, global_batch, seq_len, family))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.py").write_text("\n\n".join(text))
    return tuple(drawn)


def _case(
    chance: random.Random, model: str, world_size: int, global_batch: int, seq_len: int, family: str
) -> Case:  # fmt: skip
    loss = chance.choice(("plain", "plain", "tiled")) if family not in ("opt", "bert") else "plain"
    return Case(
        model=model,
        world_size=world_size,
        global_batch=global_batch,
        seq_len=seq_len,
        zero_stage=0 if world_size == 1 else chance.randint(0, 3),
        activation_checkpointing=cast(ActivationCheckpointing, chance.choice(("off", "off", "full", "selective"))),
        loss=cast(Literal["plain", "tiled"], loss),
        micro_batch=2 ** chance.randint(0, (global_batch // world_size).bit_length() - 1),
    )


def _shape(family: str, width: int, layers: int, vocabulary: int, dropout: float) -> dict[str, Any]:
    """A configuration in the family's own words."""
    heads = width // 32
    common = {
        **_IDS, "use_cache": False, "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 512,
    }  # fmt: skip
    if family == "gpt2":
        return {
            **_IDS, "use_cache": False, "vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": heads,
            "n_positions": 512, "resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout,
        }  # fmt: skip
    if family == "t5":
        return {
            "vocab_size": vocabulary, "d_model": width, "d_kv": 32, "d_ff": 3 * width, "num_layers": -(-layers // 2),
            "num_heads": heads, "dropout_rate": dropout, "pad_token_id": 0, "decoder_start_token_id": 0,
            "use_cache": False,
        }  # fmt: skip
    if family == "opt":
        ffn = {"ffn_dim": 3 * width, "word_embed_proj_dim": width, "dropout": dropout}
        return {name: value for name, value in common.items() if name != "intermediate_size"} | ffn
    if family == "bert":
        return common | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if family == "mixtral":
        return common | {"num_key_value_heads": heads, "num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "gpt_neox":
        return common
    return common | {"num_key_value_heads": heads, "tie_word_embeddings": dropout > 0}


_HEAD = '''"""Made by `bench.planning.choice_random`."""

from bench.memory.families import _transformers'''


def _factory(name: str, family: str, config: dict[str, Any]) -> str:
    auto = _AUTO.get(family, "AutoModelForCausalLM")
    return f"def {name}():\n    return _transformers({auto!r}, {family!r}, **{config!r})\n"
