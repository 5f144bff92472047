"""What `bench/gpu/truth.py` measures: models as configurations, and the runs in order of what they teach."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.plans import plan_by_hand
from frugal.config.cluster import Cluster, Device, DeviceKind, Node
from frugal.config.request import Precision, Request
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Plan
from frugal.planning.strategy import BUCKET_ELEMENTS, ActivationCheckpointing, Strategy

LLAMA_3B = {
    "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
T5_LARGE = {
    "model_type": "t5", "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16,
    "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = {
    "tiny-gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": 512, "n_positions": 256,
                  "bos_token_id": 0, "eos_token_id": 1},
    "tiny-llama": {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": 0,
                   "eos_token_id": 1},
    "tiny-t5": {"model_type": "t5", "d_model": 96, "d_kv": 24, "d_ff": 256, "num_layers": 2, "num_heads": 4,
                "vocab_size": 512, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
}  # fmt: skip
OWN = {"llama-3b": LLAMA_3B, "t5-large": T5_LARGE, **TINY}
"""Models that are no presets of frugal's, by name."""

FAMILIES = {"gpt2": "gpt2", "tinyllama": "llama", "llama": "llama", "qwen3": "llama", "bert": "bert", "t5": "t5"}
"""By the beginning of a model's name."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run on one device. `micro_batch` 0 stands for the largest that is predicted to fit."""

    model: str
    precision: Precision
    zero_stage: int
    activation_checkpointing: ActivationCheckpointing
    loss: str
    micro_batch: int
    accumulation_steps: int
    seq_len: int

    @property
    def name(self) -> str:
        """For people, and as the key of its prediction."""
        size = self.micro_batch or "max"
        return (
            f"{self.model} {self.precision} zero{self.zero_stage} {self.activation_checkpointing} {self.loss} "
            f"{size}x{self.seq_len} x{self.accumulation_steps}"
        )

    @property
    def family(self) -> str:
        """Of its model."""
        name = self.model.removeprefix("tiny-")
        return next(family for start, family in FAMILIES.items() if name.startswith(start))

    def request(self, folder: Path) -> Request:
        """The request; a model of our own is written into `folder` first."""
        reference = self.model
        if self.model in OWN:
            path = folder / self.model / "config.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(OWN[self.model]))
            reference = str(path)
        return Request(
            model=reference,
            precision=self.precision,
            seq_len=self.seq_len,
            global_batch=max(1, self.micro_batch) * self.accumulation_steps,
        )

    def strategy(self, trainable_parameters: int) -> Strategy:
        """As `frugal plan` would make it for one device."""
        bucket = min(BUCKET_ELEMENTS, trainable_parameters)
        return Strategy(
            zero_stage=self.zero_stage,
            activation_checkpointing=self.activation_checkpointing,
            loss="tiled" if self.loss == "tiled" else "plain",
            reduce_bucket_elements=bucket,
            prefetch_bucket_elements=bucket,
        )

    def plan(self, folder: Path, device: Device, trainable_parameters: int) -> Plan:
        """The plan that says so, without a prediction of its own."""
        request = self.request(folder)
        blank = plan_by_hand(world_size=1, global_batch=1, micro_batch=1, zero_stage=self.zero_stage)
        return replace(
            blank,
            request=request,
            cluster=cluster(device),
            strategy=self.strategy(trainable_parameters),
            batch=BatchPlan.of(request.batch_samples, (self.micro_batch,)),
        ).sealed()


def cluster(device: Device) -> Cluster:
    """One device."""
    return Cluster(nodes=(Node(devices=(device,)),), intra_bandwidth=1e9, inter_bandwidth=1e9)


def device(kind: DeviceKind, memory_bytes: int, context_bytes: int) -> Device:
    """A device without a margin: what is asked here is how much it takes, not how much to keep free."""
    return Device(
        name="measured", kind=kind, memory_bytes=memory_bytes, context_bytes=context_bytes, margin_bytes=0,
        matrix_flops=1e14, memory_bandwidth=1e12,
    )  # fmt: skip


# model, precision, ZeRO stage, activation checkpointing, loss, micro-batch (0: as many as fit), accumulation, tokens
_GPU: tuple[tuple[Any, ...], ...] = (
    ("gpt2", "bf16", 2, "off", "plain", 8, 1, 1024),
    ("tinyllama-1.1b", "bf16", 2, "full", "tiled", 4, 1, 2048),
    ("bert-large", "fp32", 0, "off", "plain", 8, 1, 512),
    ("t5-base", "bf16", 2, "off", "plain", 8, 1, 512),
    ("llama-3b", "bf16", 3, "full", "tiled", 2, 1, 2048),
    ("gpt2-xl", "bf16", 2, "full", "plain", 4, 1, 1024),
    ("gpt2", "bf16", 2, "off", "plain", 0, 1, 1024),
    ("tinyllama-1.1b", "bf16", 2, "off", "plain", 1, 1, 2048),
    ("gpt2", "fp32", 0, "off", "plain", 4, 1, 1024),
    ("bert-large", "bf16", 2, "full", "plain", 32, 1, 512),
    ("tinyllama-1.1b", "bf16", 3, "full", "plain", 2, 1, 2048),
    ("t5-large", "fp32", 0, "full", "plain", 4, 1, 512),
    ("gpt2", "bf16", 3, "off", "plain", 4, 2, 1024),
    ("llama-3b", "bf16", 2, "full", "plain", 1, 1, 2048),
    ("tinyllama-1.1b", "bf16", 2, "off", "tiled", 0, 1, 2048),
    ("gpt2", "bf16", 2, "selective", "plain", 8, 1, 1024),
    ("tinyllama-1.1b", "fp32", 0, "full", "plain", 1, 1, 2048),
    ("bert-large", "bf16", 2, "off", "plain", 16, 2, 512),
    ("gpt2", "fp32", 1, "full", "tiled", 8, 1, 1024),
    ("t5-base", "bf16", 3, "full", "plain", 16, 2, 512),
    ("gpt2-xl", "fp32", 0, "full", "plain", 2, 1, 1024),
    ("tinyllama-1.1b", "bf16", 2, "selective", "tiled", 2, 2, 2048),
    ("gpt2", "bf16", 2, "full", "tiled", 16, 2, 1024),
    ("qwen3-0.6b", "bf16", 2, "off", "tiled", 2, 1, 2048),
    ("llama-3b", "fp32", 0, "full", "tiled", 1, 1, 1024),
    ("bert-large", "fp32", 3, "off", "plain", 4, 1, 512),
    ("gpt2", "fp32", 2, "off", "plain", 1, 1, 1024),
    ("t5-base", "fp32", 0, "off", "plain", 1, 1, 512),
    ("tinyllama-1.1b", "bf16", 3, "off", "tiled", 4, 2, 2048),
    ("gpt2-xl", "bf16", 3, "off", "plain", 1, 1, 1024),
    ("bert-large", "bf16", 2, "selective", "plain", 16, 1, 512),
    ("gpt2", "bf16", 3, "full", "tiled", 0, 1, 1024),
    ("llama-2-7b", "bf16", 3, "full", "tiled", 1, 1, 2048),
    ("qwen3-0.6b", "fp32", 1, "full", "plain", 2, 1, 1024),
    ("t5-large", "bf16", 2, "selective", "plain", 4, 1, 512),
    ("gpt2", "fp32", 3, "selective", "plain", 2, 2, 1024),
    ("tinyllama-1.1b", "fp32", 3, "full", "tiled", 2, 1, 2048),
    ("bert-large", "bf16", 3, "full", "plain", 1, 1, 512),
    ("gpt2-xl", "bf16", 2, "selective", "tiled", 4, 2, 1024),
    ("t5-base", "bf16", 2, "full", "plain", 0, 1, 512),
)
_CPU: tuple[tuple[Any, ...], ...] = (
    ("tiny-gpt2", "fp32", 0, "off", "plain", 4, 1, 64),
    ("tiny-llama", "bf16", 2, "full", "tiled", 4, 2, 64),
    ("tiny-t5", "fp32", 3, "full", "plain", 2, 1, 64),
    ("tiny-gpt2", "bf16", 3, "off", "plain", 2, 1, 64),
)


def configurations(kind: DeviceKind) -> Iterator[Configuration]:
    """In order of what they teach, so that a run that ends early has seen most."""
    for model, precision, zero_stage, mode, loss, micro_batch, steps, seq_len in _GPU if kind == "cuda" else _CPU:
        yield Configuration(
            model=model,
            precision=precision,
            zero_stage=zero_stage,
            activation_checkpointing=mode,
            loss=loss,
            micro_batch=micro_batch,
            accumulation_steps=steps,
            seq_len=seq_len,
        )
