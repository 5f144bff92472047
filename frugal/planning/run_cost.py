"""Tokens a second of a plan, the part of the cards' peak that they are, and what a whole run takes.

All are predicted: the seconds of a step are those of `frugal.planning.cost`. A run is its steps, without its start,
evaluations and checkpoints.

    MFU = FLOPs a token x tokens/s / sum of the cards' peak FLOP/s in the plan's precision

This is the model FLOPs utilisation of PaLM (Chowdhery et al. 2022, appendix B), where forward and backward of a token
take 6 N + 12 L H Q T FLOPs: N parameters that it meets, and attention in L layers of H heads of Q dimensions over T
tokens. Here the FLOPs are those that the trace of the model counts, without what activation checkpointing repeats. They
differ from the formula for frozen weights (4 instead of 6), embeddings that are looked up (none), and fused attention,
whose backward computes its scores again (14 L H Q T): gpt2 with 1024 tokens has 0.873 instead of 0.860 GFLOP a token.
Left out, as there: causality, which halves attention; and that samples shorter than planned have less of it.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil

from frugal.config.hardware.cluster import CARDS, Cluster
from frugal.config.request import Precision
from frugal.units import format_count, format_seconds, plural


def rate_in_words(tokens_per_second: float, flops_per_token: float, cluster: Cluster, precision: Precision) -> str:
    """Return tokens/s, those of one device, and the MFU where the peak of all cards is known."""
    noun, devices = cluster.rank_noun, cluster.devices
    rate = f"{tokens_per_second:,.0f} tokens/s, {tokens_per_second / len(devices):,.0f} a {noun}"
    if any(device.name not in CARDS for device in devices):
        return f"{rate} (predicted)"
    peaks = [CARDS[device.name].peak_flops(precision) for device in devices]
    share = flops_per_token * tokens_per_second / sum(peaks)
    peak = " + ".join(f"{number} x {each / 1e12:.4g}" for each, number in Counter(peaks).items())
    return (
        f"{rate}, MFU {100 * share:.1f} % (predicted: {flops_per_token / 1e9:.3g} GFLOP a token, peak {peak} TFLOP/s)"
    )


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The length of a run: `steps`, or as many as `tokens` take; and the price of a GPU hour, None: not known."""

    steps: int | None = None
    tokens: int | None = None
    gpu_hour_price: float | None = None

    def num_steps(self, step_tokens: int) -> int:
        """Return the optimizer steps, of `step_tokens` each."""
        return self.steps or ceil((self.tokens or 0) / step_tokens)

    def in_brief(self, step_seconds: float, step_tokens: int, num_devices: int) -> list[str]:
        """Return the time of the run, and its cost where a price is known."""
        seconds = self.num_steps(step_tokens) * step_seconds
        hours = seconds / 3600 * num_devices
        cost = [] if self.gpu_hour_price is None else [f"cost {hours * self.gpu_hour_price:,.2f}"]
        return [format_seconds(seconds), *cost]

    def in_words(self, step_seconds: float, step_tokens: int, cluster: Cluster) -> str:
        """Return the steps, the time, the GPU hours and the cost of the run."""
        steps, noun = self.num_steps(step_tokens), cluster.rank_noun
        hours = steps * step_seconds / 3600 * cluster.world_size
        time, *cost = self.in_brief(step_seconds, step_tokens, cluster.world_size)
        total = format_count(steps * step_tokens)
        shown = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
        parts = ", ".join([time, f"{shown} {noun} hours", *cost])
        return f"{plural(steps, 'step')} of {step_tokens:,} tokens, {total} in all: {parts} (predicted)"
