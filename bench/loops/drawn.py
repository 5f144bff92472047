"""`python -m bench.loops.drawn [FIRST LAST]`: drawn training loops in dry runs against emulated cards.

A seed draws a loop: an own decoder or one of transformers, fp32, bf16 or autocast, an optimizer and its implementation,
accumulation, clipping, evaluation, lengths that differ, averaged weights, an emptied cache, losses that are kept. Each
runs four steps on an emulated card, with torch's CUDA build, and in a dry run; torch's four counters after each step
are compared. Results go to `bench/results/loops-drawn.json`; with seeds they are printed alone.
"""

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RESULTS = Path(__file__).parents[1] / "results" / "loops-drawn.json"
SEEDS = range(100, 160)
VOCABULARY, STEPS, HEADS = 600, 4, 4
COUNTERS = "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"

Counted = list[list[int]]
"""The counters after each step."""


class Decoder(nn.Module):
    """A decoder as people write them, with norms, attention and feed-forward of several kinds."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.width, self.attention = chance.choice([64, 128, 192]), chance.choice(["sdpa", "masked", "einsum"])
        self.activation, self.is_checkpointed = chance.choice([*ACTIVATIONS, "swiglu"]), chance.random() < 0.4
        width, up = self.width, (8 if self.activation == "swiglu" else 4) * self.width
        norm = nn.RMSNorm if chance.random() < 0.5 else nn.LayerNorm
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.zeros(256, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "before": norm(width), "projected": nn.Linear(width, 3 * width, bias=chance.random() < 0.5),
                "out": nn.Linear(width, width), "between": norm(width), "up": nn.Linear(width, up),
                "down": nn.Linear(4 * width, width),
            })
            for _ in range(chance.choice([2, 3, 4]))
        )  # fmt: skip
        self.norm, self.head = norm(width), nn.Linear(width, VOCABULARY, bias=False)
        if chance.random() < 0.5:
            self.head.weight = self.tokens.weight

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention over earlier positions, or with `einsum` over all."""
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.attention == "masked":
            earlier = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
            return (q @ k.transpose(-1, -2) / 8).masked_fill(~earlier, float("-inf")).softmax(-1) @ v
        weights = torch.einsum("bhid,bhjd->bhij", q, k).float().softmax(-1).to(v.dtype)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    def run(self, layer: Any, x: Tensor) -> Tensor:
        """Run one layer."""
        batch, length, width = x.shape
        heads = layer["projected"](layer["before"](x)).view(batch, length, 3, HEADS, width // HEADS)
        attended = self.attend(*heads.permute(2, 0, 3, 1, 4))
        x = x + layer["out"](attended.transpose(1, 2).reshape(batch, length, width))
        up = layer["up"](layer["between"](x))
        if self.activation == "swiglu":
            gate, up = up.chunk(2, -1)
            return x + layer["down"](F.silu(gate) * up)
        return x + layer["down"](ACTIVATIONS[self.activation](up))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            is_checkpointed = self.is_checkpointed and self.training
            x = checkpoint(self.run, layer, x, use_reentrant=False) if is_checkpointed else self.run(layer, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "relu2": lambda x: F.relu(x).square(), "mish": F.mish, "quick": lambda x: x * (1.702 * x).sigmoid()
}  # fmt: skip


class Pretrained(nn.Module):
    """A model of transformers, from its configuration."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        import transformers as t

        grouped: dict[str, Any] = {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        }  # fmt: skip
        plain = {name: value for name, value in grouped.items() if name != "num_key_value_heads"} | {"hidden_size": 96}
        kinds: list[Callable[[], Any]] = [
            partial(t.GPT2Config, n_layer=2, n_embd=96, n_head=4, vocab_size=VOCABULARY),
            partial(t.LlamaConfig, **grouped), partial(t.Qwen2Config, **grouped),
            partial(t.Gemma2Config, head_dim=32, **grouped), partial(t.GPTNeoXConfig, **plain),
            partial(t.BertConfig, **plain), partial(t.DistilBertConfig, dim=96, n_layers=2, n_heads=4, vocab_size=600),
            partial(t.OPTConfig, hidden_size=96, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4,
                    word_embed_proj_dim=96, vocab_size=VOCABULARY),
        ]  # fmt: skip
        config = chance.choice(kinds)()
        config._attn_implementation = "eager" if config.model_type == "gemma2" else chance.choice(["sdpa", "eager"])
        is_masked = config.model_type in ("bert", "distilbert")
        self.model = (t.AutoModelForMaskedLM if is_masked else t.AutoModelForCausalLM).from_config(config)
        if chance.random() < 0.3:
            self.model.gradient_checkpointing_enable()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": torch.optim.AdamW, "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW single": partial(torch.optim.AdamW, foreach=False), "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1), "Adafactor": torch.optim.Adafactor,
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5),
}  # fmt: skip


def loop(seed: int) -> tuple[str, Counted]:
    """Run the loop of a seed; return what it is, and the counters after each step."""
    chance = random.Random(seed)
    model: nn.Module = chance.choice([Decoder, Pretrained])(chance)
    precision, optimizer_name = chance.choice(["fp32", "autocast", "bf16"]), chance.choice([*OPTIMIZERS])
    model = (model.bfloat16() if precision == "bf16" else model).cuda()
    average = copy.deepcopy(model) if chance.random() < 0.2 else None
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    accumulated, clips, evaluates, empties, keeps = (chance.randint(1, 3), *(chance.random() < 0.4 for _ in range(4)))
    samples, varies, sets_none = chance.choice([2, 3, 8]), chance.random() < 0.5, chance.random() < 0.8
    lengths = [chance.choice([17, 32, 64, 100]) if varies else 64 for _ in range(5)]
    context = partial(torch.autocast, "cuda", dtype=torch.bfloat16, enabled=precision == "autocast")
    losses, counted = [], []
    for step in range(STEPS):
        for part in range(accumulated):
            tokens = torch.randint(0, VOCABULARY, (samples, lengths[(step + part) % 5])).cuda()
            with context():
                loss = model(tokens)
            (loss / accumulated).backward()
            losses.append(loss if keeps else loss.detach())
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=sets_none)
        with torch.no_grad():
            for mean, value in zip(average.parameters() if average else (), model.parameters(), strict=bool(average)):
                mean.mul_(0.9).add_(value, alpha=0.1)
            if evaluates and step % 2:
                model.eval()
                with context():
                    model(torch.randint(0, VOCABULARY, (samples, 100)).cuda())
                model.train()
        if empties:
            torch.cuda.empty_cache()
        counted.append([getattr(torch.cuda, name)() for name in COUNTERS])
    kind = type(model).__name__ if isinstance(model, Decoder) else type(model.model).__name__
    words = [kind, precision, optimizer_name, f"{accumulated} x {samples} samples", *["lengths vary"] * varies]
    return ", ".join(words), counted


@contextmanager
def upwards() -> Iterator[None]:
    """Let segments of dry runs lie upwards, as on the emulated cards."""
    from frugal.planning.memory.caching_allocator import ENDLESS
    from frugal.tools.own_loop.tracker import LoopTracker

    with patch.object(LoopTracker, "reservation_bytes", ENDLESS):
        yield


def dry_run(seed: int) -> tuple[str, Counted]:
    """Return what `loop` does, from a dry run."""
    from frugal.tools.own_loop.run import dry_run

    found: list[tuple[str, Counted]] = []
    with upwards():
        dry_run(lambda: found.append(loop(seed)), gpu="rtx3060-12g", steps=1)
    return found[0]


def on_card(seed: int) -> Counted | None:
    """Return the counters of a process on an emulated card; None: it did not end."""
    from bench.emulated_gpu.environment import environment, python

    words = f"import json, os; from bench.loops.drawn import loop; print(json.dumps(loop({seed})[1]), flush=True)"
    code = f"{words}; os._exit(0)"  # the emulation's threads may outlive the interpreter
    env = environment("rtx3060", num_gpus=1)
    done = subprocess.run([python(), "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout) if done.returncode == 0 else None


def main(arguments: Sequence[str]) -> None:
    """Compare loops, and keep the results of all."""
    from bench.environment import environment

    rows: list[dict[str, Any]] = []
    for seed in range(*map(int, arguments)) if arguments else SEEDS:
        (what, predicted), counted = dry_run(seed), on_card(seed)
        if counted is None:
            print(f"{seed}: {what}: no answer", flush=True)
            continue
        steps = zip(predicted, counted, strict=True)
        errors = [ours / theirs - 1 for step in steps for ours, theirs in zip(*step, strict=True)]
        rows.append({"seed": seed, "loop": what, "worst_error": max(errors, key=abs), "counted": str(counted)})
        print(f"{seed}: {what}: {rows[-1]['worst_error']:+.4%}", flush=True)
    exact = sum(not row["worst_error"] for row in rows)
    result = {"loops": len(rows), "exact": exact, "worst": max((abs(row["worst_error"]) for row in rows), default=0)}
    print(json.dumps(result))
    if not arguments:
        about = environment("python -m bench.loops.drawn")
        RESULTS.write_text(json.dumps({**about, "summary": result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
