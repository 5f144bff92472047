"""Models and runs that `bench/gpu/truth.py` measures, the most telling first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.emulated_gpu.cards import CARDS
from bench.gpu import models
from bench.plans import plan_by_hand
from frugal.config.adapters import Lora
from frugal.config.hardware.cluster import GENERIC, Card, Cluster, Device, DeviceKind, Node, find_card
from frugal.config.request import Precision, Request
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Plan
from frugal.planning.strategy import BUCKET_ELEMENTS, ActivationCheckpointing, Kernels, LayerMode, Strategy, in_part


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
    world_size: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    overlap_comm: bool = False
    gradient_clipping: float = 1.0
    pack: bool = False
    between: Literal["nothing", "evaluation", "checkpoint"] = "nothing"
    lora: str | None = None
    layer_modes: tuple[tuple[LayerMode, int], ...] = ()
    mlp: Literal["plain", "tiled"] = "plain"
    kernels: Kernels = "plain"
    sequence_parallel: int = 1
    offload_ratio: float = 1.0
    card: str | None = None

    @property
    def name(self) -> str:
        """For people, and as the key of its prediction."""
        size = self.micro_batch or "max"
        words = [
            f"{self.model} {self.precision} zero{self.zero_stage} {self.activation_checkpointing} {self.loss} "
            f"{size}x{self.seq_len} x{self.accumulation_steps}"
        ]
        words += [f"on {self.world_size}"] * (self.world_size > 1) + [f"offload {self.offload}"] * self.offloads
        words += ["overlapped"] * self.overlap_comm + ["unclipped"] * (not self.gradient_clipping)
        words += ["packed"] * self.pack + [f"lora {self.lora}"] * (self.lora is not None)
        words += ["+".join(f"{count} {mode}" for mode, count in self.layer_modes)] * bool(self.layer_modes)
        words += ["tiled MLP"] * (self.mlp == "tiled") + [f"sp {self.sequence_parallel}"] * (self.sequence_parallel > 1)
        words += ["Liger"] * (self.kernels == "liger")
        words += [f"ratio {self.offload_ratio:g}"] * (self.offload_ratio < 1)
        words += [self.between] * (self.between != "nothing")
        return " ".join(words + [self.card] * (self.card is not None))

    @property
    def num_groups(self) -> int:
        """The number of groups of ranks that share samples; that of ranks, where none do."""
        return self.world_size // self.sequence_parallel

    @property
    def offloads(self) -> bool:
        """True if anything lives in host memory."""
        return self.offload != "none"

    @property
    def family(self) -> str:
        """The family of its model, or of adapters on whichever."""
        return models.family(self.model) if self.lora is None else "lora"

    def request(self, folder: Path) -> Request:
        """The request; a model of our own is written into `folder` first."""
        reference = models.reference(self.model) or self.model
        if self.model in models.CONFIGURATIONS:
            path = folder / self.model / "config.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(models.CONFIGURATIONS[self.model]))
            reference = str(path)
        return Request(
            model=reference,
            task=models.TASKS.get(self.model),
            precision=self.precision,
            seq_len=self.seq_len,
            global_batch=max(1, self.micro_batch) * self.accumulation_steps * self.num_groups,
            gradient_clipping=self.gradient_clipping,
            pack=self.pack or None,
            lora=None if self.lora is None else Lora.of(self.lora),
        )

    def device(self, here: Device) -> Device:
        """Return what is measured: the emulated card with nothing kept free, or `here`."""
        if self.card is None:
            return here
        card = find_card(CARDS[self.card].frugal_name).device(self.precision, num_gpus=1)
        return replace(card, context_bytes=0, margin_bytes=0)

    def strategy(self, trainable_parameters: int) -> Strategy:
        """As `frugal plan` would make it for one device."""
        bucket = min(BUCKET_ELEMENTS, trainable_parameters)
        strategy = Strategy(
            zero_stage=self.zero_stage,
            activation_checkpointing=self.activation_checkpointing,
            layer_modes=self.layer_modes,
            sequence_parallel=self.sequence_parallel,
            mlp=self.mlp,
            kernels=self.kernels,
            loss="tiled" if self.loss == "tiled" else "plain",
            reduce_bucket_elements=bucket,
            prefetch_bucket_elements=bucket,
            offload_optimizer="cpu" if self.offloads else "none",
            offload_parameters="cpu" if self.offload == "all" else "none",
            overlap_comm=self.overlap_comm,
        )
        if self.offload_ratio == 1:
            return strategy
        return in_part(strategy, self.offload_ratio, trainable_parameters, self.world_size)

    def plan(self, folder: Path, device: Device, trainable_parameters: int) -> Plan:
        """The plan that says so, without a prediction of its own."""
        request = self.request(folder)
        blank = plan_by_hand(world_size=1, global_batch=1, micro_batch=1, zero_stage=self.zero_stage)
        return replace(
            blank,
            request=request,
            cluster=cluster(device, self.world_size),
            strategy=self.strategy(trainable_parameters),
            batch=BatchPlan.of(
                request.batch_samples,
                (self.micro_batch,) * self.num_groups,
                sequence_parallel=self.sequence_parallel,
            ),
        ).sealed()


def cluster(device: Device, world_size: int = 1) -> Cluster:
    """One node of so many devices."""
    return Cluster(nodes=(Node(devices=(device,) * world_size),), intra_bandwidth=1e9, inter_bandwidth=1e9)


def device(kind: DeviceKind, memory_bytes: int, card: Card = GENERIC) -> Device:
    """A device without context and margin: what is asked here is how much tensors take, not how much to keep free."""
    return Device(
        name="measured", kind=kind, memory_bytes=memory_bytes, context_bytes=0, margin_bytes=0,
        matrix_flops=1e14, memory_bandwidth=1e12,
        compute_capability=card.compute_capability if kind == "cuda" else None,
        resident_threads=card.threads(memory_bytes) if kind == "cuda" else 0,
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
