"""The configurations of `python -m bench.emulated_gpu`: ten families on five cards, alone and on 2, 4 and 8 ranks.

Each fits its card, and each setting that changes memory is in several: ZeRO stages, activation checkpointing, the
tiled loss, offloading, overlapped communication, clipping, fp16, packing, an evaluation or a checkpoint in between.
A table of its own (`--strategies`) has ranks that share samples, a mode of activation checkpointing for each layer, the
tiled MLP, an optimizer partly in host memory.
"""

from collections.abc import Iterator
from typing import Any

from bench.gpu.configurations import Configuration

_Row = tuple[
    Any, ...
]  # model, precision, ZeRO, activation checkpointing, loss, micro-batch, accumulation, tokens, more

_RTX3060: tuple[_Row, ...] = (
    ("gpt2", "bf16", 2, "off", "plain", 4, 1, 1024),
    ("gpt2", "bf16", 2, "full", "tiled", 8, 2, 1024),
    ("gpt2", "fp32", 0, "off", "plain", 2, 2, 1024),
    ("gpt2", "bf16", 3, "off", "plain", 4, 1, 1024, {"between": "evaluation"}),
    ("gpt2-medium", "bf16", 2, "full", "tiled", 4, 2, 1024, {"world_size": 4}),
    ("gpt2-xl", "bf16", 3, "full", "tiled", 1, 1, 1024, {"world_size": 8}),
    ("bert-base", "bf16", 2, "off", "plain", 8, 2, 512),
    ("bert-large", "bf16", 2, "full", "plain", 16, 1, 512, {"world_size": 2}),
    ("bert-large", "fp32", 3, "selective", "plain", 4, 1, 512, {"world_size": 4}),
    ("t5-small", "bf16", 2, "off", "plain", 8, 2, 512),
    ("t5-small", "bf16", 2, "full", "plain", 8, 1, 512, {"between": "checkpoint"}),
    ("qwen3-0.6b", "bf16", 2, "full", "tiled", 2, 1, 1024, {"world_size": 4}),
    ("qwen3-0.6b", "bf16", 3, "full", "tiled", 1, 2, 1024, {"world_size": 8}),
    ("tinyllama-1.1b", "bf16", 3, "full", "tiled", 2, 1, 2048, {"world_size": 4}),
    ("gpt2", "bf16", 2, "full", "tiled", 8, 1, 1024, {"offload": "optimizer"}),
    ("t5-small", "bf16", 3, "full", "plain", 8, 2, 512, {"offload": "all"}),
    ("llama-0.6b", "bf16", 2, "full", "plain", 2, 1, 1024, {"lora": "r=16"}),
    ("llama-0.6b", "bf16", 2, "off", "tiled", 1, 2, 1024, {"world_size": 2, "lora": "r=16"}),
    ("gpt2", "fp32", 0, "off", "plain", 4, 1, 1024, {"lora": "r=8"}),
    ("gpt2", "fp32", 1, "full", "tiled", 4, 2, 1024, {"world_size": 2, "lora": "r=8"}),
    ("tinyllama-1.1b", "bf16", 3, "full", "tiled", 2, 1, 2048, {"world_size": 4, "lora": "r=16"}),
    ("vit_base", "bf16", 2, "off", "plain", 16, 1, 224),
    ("resnet50", "bf16", 2, "off", "plain", 16, 1, 224),
    ("mixtral-0.4b", "bf16", 2, "full", "plain", 2, 1, 1024, {"world_size": 4}),
    ("falcon-0.3b", "bf16", 2, "off", "plain", 2, 1, 1024, {"world_size": 2}),
    ("llama-0.6b", "bf16", 3, "full", "tiled", 2, 2, 2048, {"world_size": 2, "lora": "r=16", "pack": True}),
    ("qwen3-0.6b", "bf16", 3, "offloaded", "tiled", 2, 1, 4096, {"world_size": 4, "pack": True}),
)

_T4: tuple[_Row, ...] = (
    ("gpt2", "fp16", 2, "off", "plain", 4, 1, 1024),
    ("gpt2", "fp16", 2, "selective", "plain", 4, 2, 1024, {"world_size": 2}),
    ("gpt2", "fp32", 0, "full", "plain", 4, 1, 1024),
    ("gpt2", "fp32", 1, "off", "plain", 2, 2, 1024, {"world_size": 2}),
    ("distilgpt2", "fp16", 3, "off", "plain", 8, 1, 1024, {"world_size": 2}),
    ("bert-base", "fp16", 2, "off", "plain", 16, 1, 512, {"gradient_clipping": 0.0}),
    ("bert-base", "fp32", 0, "off", "plain", 8, 2, 512, {"between": "evaluation"}),
    ("bert-base", "fp16", 2, "full", "plain", 16, 1, 512, {"offload": "optimizer"}),
    ("t5-small", "fp16", 2, "full", "plain", 16, 1, 512),
    ("t5-small", "fp32", 2, "off", "plain", 4, 1, 512, {"world_size": 4}),
    ("qwen3-0.6b", "fp16", 3, "full", "tiled", 2, 1, 1024, {"world_size": 4}),
    ("falcon-0.3b", "fp16", 2, "off", "plain", 1, 1, 1024, {"world_size": 4}),
    ("tinyllama-1.1b", "fp16", 3, "full", "tiled", 2, 1, 1024, {"world_size": 8}),
    ("vit_base", "fp16", 2, "off", "plain", 16, 2, 224),
    ("vit_base", "fp32", 0, "off", "plain", 8, 1, 224),
    ("resnet50", "fp32", 0, "off", "plain", 16, 2, 224),
    ("falcon-0.3b", "fp16", 2, "full", "plain", 1, 1, 1024),
    ("llama-0.6b", "fp16", 2, "full", "tiled", 2, 1, 1024, {"lora": "r=16"}),
)

_A100: tuple[_Row, ...] = (
    ("gpt2", "bf16", 2, "off", "plain", 8, 1, 1024),
    ("gpt2", "bf16", 2, "selective", "plain", 8, 1, 1024),
    ("gpt2", "bf16", 2, "offloaded", "plain", 8, 1, 1024),
    ("gpt2", "bf16", 2, "off", "plain", 8, 2, 1024, {"pack": True}),
    ("gpt2", "bf16", 2, "off", "plain", 8, 1, 1024, {"world_size": 8, "overlap_comm": True}),
    ("gpt2", "fp32", 1, "full", "tiled", 8, 1, 1024),
    ("gpt2", "fp32", 2, "off", "plain", 1, 1, 1024),
    ("gpt2-xl", "bf16", 2, "full", "plain", 4, 1, 1024),
    ("gpt2-xl", "fp32", 0, "full", "plain", 2, 1, 1024),
    ("gpt2-xl", "bf16", 3, "off", "plain", 1, 1, 1024),
    ("tinyllama-1.1b", "bf16", 2, "full", "tiled", 4, 1, 2048),
    ("tinyllama-1.1b", "bf16", 2, "off", "plain", 1, 1, 2048),
    ("tinyllama-1.1b", "bf16", 3, "full", "plain", 2, 1, 2048),
    ("tinyllama-1.1b", "fp32", 0, "full", "plain", 1, 1, 2048),
    ("tinyllama-1.1b", "bf16", 3, "off", "tiled", 4, 2, 2048, {"world_size": 2}),
    ("tinyllama-1.1b", "bf16", 2, "selective", "tiled", 2, 2, 2048, {"pack": True}),
    ("llama-3b", "bf16", 3, "full", "tiled", 2, 1, 2048, {"world_size": 4}),
    ("llama-3b", "fp32", 0, "full", "tiled", 1, 1, 1024),
    ("qwen3-0.6b", "bf16", 2, "off", "tiled", 2, 1, 2048),
    ("qwen3-0.6b", "fp32", 1, "full", "plain", 2, 1, 1024),
    ("bert-large", "fp32", 0, "off", "plain", 8, 1, 512),
    ("bert-large", "fp32", 3, "off", "plain", 4, 1, 512),
    ("bert-large", "bf16", 2, "selective", "plain", 16, 1, 512),
    ("t5-base", "bf16", 3, "full", "plain", 16, 2, 512),
    ("t5-base", "fp32", 0, "off", "plain", 1, 1, 512),
    ("t5-large", "fp32", 0, "full", "plain", 4, 1, 512),
    ("mixtral-0.4b", "bf16", 2, "off", "plain", 4, 1, 1024),
    ("mixtral-0.4b", "bf16", 3, "full", "tiled", 4, 1, 1024, {"world_size": 2}),
    ("falcon-0.3b", "bf16", 2, "off", "plain", 4, 1, 1024),
    ("vit_base", "bf16", 2, "full", "plain", 64, 1, 224, {"world_size": 2}),
    ("resnet50", "bf16", 2, "off", "plain", 64, 1, 224, {"world_size": 4}),
    ("llama-0.6b", "bf16", 2, "off", "plain", 4, 1, 1024, {"lora": "r=16"}),
)

_H100: tuple[_Row, ...] = (
    ("gpt2", "bf16", 2, "off", "plain", 16, 1, 1024),
    ("gpt2", "bf16", 2, "full", "tiled", 16, 2, 1024, {"world_size": 2}),
    ("gpt2-medium", "bf16", 2, "off", "plain", 8, 1, 1024, {"world_size": 8, "overlap_comm": True}),
    ("bert-large", "bf16", 2, "off", "plain", 16, 2, 512),
    ("bert-large", "bf16", 3, "full", "plain", 32, 1, 512, {"world_size": 8}),
    ("t5-base", "bf16", 2, "off", "plain", 8, 1, 512),
    ("tinyllama-1.1b", "bf16", 2, "off", "tiled", 4, 1, 2048),
    ("tinyllama-1.1b", "bf16", 3, "off", "tiled", 4, 1, 2048, {"world_size": 8}),
    ("llama-3b", "bf16", 2, "full", "plain", 1, 1, 2048, {"world_size": 4}),
    ("qwen3-0.6b", "bf16", 2, "off", "tiled", 4, 1, 2048, {"pack": True}),
    ("mixtral-0.4b", "bf16", 2, "full", "plain", 8, 1, 1024),
    ("falcon-0.3b", "bf16", 3, "full", "plain", 4, 1, 1024),
    ("vit_base", "bf16", 2, "off", "plain", 64, 1, 224),
    ("resnet50", "fp32", 1, "off", "plain", 64, 1, 224, {"world_size": 2}),
    ("llama-0.6b", "bf16", 2, "full", "tiled", 8, 1, 2048, {"lora": "r=16"}),
)

_STRATEGIES: dict[str, tuple[_Row, ...]] = {
    "rtx3060": (
        ("tinyllama-1.1b", "bf16", 3, "full", "tiled", 2, 1, 2048,
         {"world_size": 4, "sequence_parallel": 2, "lora": "r=16"}),
        ("llama-0.6b", "bf16", 2, "full", "tiled", 4, 2, 2048, {"world_size": 8, "sequence_parallel": 8}),
        ("gpt2", "bf16", 2, "budget", "tiled", 8, 1, 1024, {"layer_modes": (("full", 7), ("off", 5))}),
        ("qwen3-0.6b", "bf16", 2, "full", "tiled", 1, 2, 8192, {"world_size": 4, "mlp": "tiled"}),
        ("tinyllama-1.1b", "bf16", 3, "full", "tiled", 2, 1, 2048,
         {"world_size": 2, "offload": "optimizer", "offload_ratio": 0.5}),
    ),
    "t4": (
        ("gpt2", "fp16", 2, "full", "plain", 4, 1, 1024, {"world_size": 2, "sequence_parallel": 2}),
        ("gpt2", "fp32", 1, "off", "plain", 2, 2, 1024, {"world_size": 4, "sequence_parallel": 4}),
        ("gpt2", "fp16", 2, "budget", "plain", 4, 1, 1024,
         {"layer_modes": (("full", 4), ("selective", 4), ("off", 4))}),
    ),
    "a100-80g": (
        ("tinyllama-1.1b", "bf16", 2, "off", "plain", 2, 1, 2048, {"world_size": 2, "sequence_parallel": 2}),
        ("qwen3-0.6b", "bf16", 3, "full", "tiled", 1, 1, 32768, {"world_size": 4, "sequence_parallel": 4}),
        ("gpt2", "bf16", 2, "selective", "plain", 8, 1, 1024, {"world_size": 2, "sequence_parallel": 2, "pack": True}),
        ("gpt2", "bf16", 2, "off", "plain", 8, 2, 1024, {"world_size": 4, "sequence_parallel": 2}),
        ("mistral-0.4b", "bf16", 2, "full", "tiled", 1, 1, 8192, {"world_size": 2, "sequence_parallel": 2}),
        ("tinyllama-1.1b", "bf16", 2, "budget", "tiled", 4, 1, 2048,
         {"layer_modes": (("offloaded", 10), ("full", 12))}),
        ("tinyllama-1.1b", "bf16", 3, "budget", "tiled", 4, 2, 2048,
         {"world_size": 2, "layer_modes": (("full", 11), ("selective", 11))}),
        ("t5-base", "bf16", 2, "budget", "plain", 8, 1, 512, {"layer_modes": (("full", 12), ("off", 12))}),
        ("llama-3b", "bf16", 2, "full", "tiled", 1, 1, 16384, {"world_size": 4, "mlp": "tiled"}),
        ("llama-3b", "bf16", 2, "offloaded", "tiled", 1, 1, 65536,
         {"world_size": 4, "sequence_parallel": 4, "mlp": "tiled"}),
        ("llama-3b", "bf16", 3, "offloaded", "tiled", 1, 1, 65536,
         {"world_size": 4, "sequence_parallel": 4, "mlp": "tiled", "offload": "optimizer"}),
        ("gpt2-xl", "bf16", 3, "full", "tiled", 2, 2, 1024, {"offload": "optimizer", "offload_ratio": 0.25}),
    ),
    "h100": (
        ("llama-3b", "bf16", 3, "offloaded", "tiled", 1, 1, 65536, {"world_size": 8, "sequence_parallel": 8}),
        ("qwen3-0.6b", "bf16", 2, "off", "tiled", 2, 1, 4096, {"world_size": 2, "sequence_parallel": 2}),
        ("llama-3b", "bf16", 3, "budget", "tiled", 2, 1, 2048,
         {"world_size": 4, "layer_modes": (("full", 20), ("off", 8))}),
        ("qwen3-0.6b", "bf16", 2, "full", "tiled", 1, 1, 32768, {"mlp": "tiled"}),
    ),
}  # fmt: skip

_FUSED: dict[str, tuple[_Row, ...]] = {
    "rtx3060": (
        ("phi3-0.4b", "bf16", 2, "full", "tiled", 4, 1, 1024, {"world_size": 2}),
        ("stablelm-0.4b", "bf16", 2, "selective", "tiled", 2, 2, 1024, {"lora": "r=16"}),
        ("gemma2-0.4b", "fp16", 3, "full", "tiled", 2, 1, 2048, {"world_size": 4}),
    ),
    "a100-80g": (
        ("gpt2", "bf16", 2, "off", "tiled", 8, 1, 1024),
        ("gpt2", "bf16", 2, "selective", "plain", 8, 1, 1024, {"world_size": 2}),
        ("qwen3_moe-0.3b", "bf16", 2, "off", "tiled", 4, 2, 1024),
        ("olmo2-0.4b", "bf16", 2, "off", "tiled", 4, 1, 2048, {"pack": True}),
        ("mistral-0.4b", "bf16", 2, "off", "plain", 2, 1, 4096, {"pack": True}),
    ),
    "h100": (
        ("granite-0.4b", "bf16", 2, "off", "tiled", 4, 1, 2048),
        ("qwen3_moe-0.3b", "bf16", 3, "selective", "plain", 4, 1, 1024, {"world_size": 2}),
        ("gemma2-0.4b", "bf16", 2, "off", "tiled", 4, 1, 2048),
    ),
}
"""Families that came after Liger's kernels, for `--kernels` alone."""

OF_CARD = {"rtx3060": _RTX3060, "t4": _T4, "a100-80g": _A100, "h100": _H100}
"""Rows of each emulated card."""


def configurations(*, strategies: bool = False, fused: bool = False) -> Iterator[Configuration]:
    """Card by card, what needs the same process together. `strategies`, `fused`: the other tables, of `--strategies`
    and of `--kernels`."""
    for card, rows in (_STRATEGIES if strategies else _FUSED if fused else OF_CARD).items():
        of_card = []
        for model, precision, zero_stage, mode, loss, micro_batch, steps, seq_len, *more in rows:
            of_card.append(
                Configuration(
                    model=model, precision=precision, zero_stage=zero_stage, activation_checkpointing=mode, loss=loss,
                    micro_batch=micro_batch, accumulation_steps=steps, seq_len=seq_len, card=card,
                    **(more[0] if more else {}),
                )
            )  # fmt: skip
        yield from sorted(of_card, key=lambda each: (each.world_size, each.zero_stage == 3))
