"""`python -m bench.memory.tight`: where activation checkpointing alone does not fit, and frugal's plan does.

The usual advice for a model that does not fit is to switch activation checkpointing on. It does not help where the
peak is in the logits: a large vocabulary, a long sequence, a small card. In each case here a CPU rank is allowed so
many bytes of tensors. Shown are

- that full activation checkpointing with the plain loss does not fit, whatever the ZeRO stage, and how much is missing;
- what frugal plans instead;
- that this plan really trains three steps, with a measured peak inside the budget;
- that its losses are those of a run without a budget: no activation checkpointing, plain loss, no ZeRO.
"""

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LOCAL_SIZE": "1"}

from bench.environment import environment
from bench.ranks import Ranks
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.planner import make_plan
from frugal.dryrun.pool import Pool
from frugal.errors import NothingFitsError
from frugal.planning.plan import Plan
from frugal.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parents[1] / "results" / "tight-cpu.json"
STEPS = 3
CLOSE = 1e-5
"""Relative difference of a loss in fp32, after steps of AdamW, which amplifies the last bits."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what is asked of it, and the bytes of tensors that each rank may hold."""

    name: str
    config: dict[str, Any]
    seq_len: int
    memory: str
    ranks: int = 1
    global_batch: int = 4
    task: str | None = None


_DECODER = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False, "tie_word_embeddings": True}
_SILENT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}

CASES = {
    case.name: case
    for case in (
        Case(
            name="vocabulary of 128k",
            config={
                "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
                "vocab_size": 128_256, "max_position_embeddings": 256, **_DECODER,
            },
            seq_len=256,
            memory="160M",
        ),
        Case(
            name="vocabulary of 256k on two ranks",
            config={
                "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 64,
                "vocab_size": 256_000, "max_position_embeddings": 256, **_DECODER,
            },
            seq_len=192,
            memory="200M",
            ranks=2,
            global_batch=8,
        ),
        Case(
            name="long sequence",
            config={
                "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
                "vocab_size": 8_192, "max_position_embeddings": 4096, **_DECODER,
            },
            seq_len=4096,
            memory="100M",
            global_batch=2,
        ),
        Case(
            name="one small card",
            config={
                "model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 2, "vocab_size": 50_257,
                "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0, **_SILENT,
            },
            seq_len=512,
            memory="128M",
        ),
        Case(
            name="encoder-decoder for many languages",
            config={
                "model_type": "mt5", "num_layers": 2, "num_decoder_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 32,
                "num_heads": 2, "vocab_size": 250_112, "dropout_rate": 0.0, "use_cache": False,
                "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True,
            },
            seq_len=128,
            memory="180M",
            ranks=2,
            task="seq2seq",
        ),
        Case(
            name="encoder for many languages",
            config={
                "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
                "intermediate_size": 64, "vocab_size": 119_547, "max_position_embeddings": 512,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
            },
            seq_len=512,
            memory="250M",
            task="masked-lm",
        ),
    )
}  # fmt: skip


def plan(case: Case, folder: Path, pool: Pool, **pins: Any) -> Plan:
    """A plan for the case on CPU ranks that may hold so much; `pool` dry-runs.

    Raises:
        NothingFitsError: there is none.
    """
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(case.config))
    asked = {"model": str(path), "task": case.task, "seq_len": case.seq_len, "global_batch": case.global_batch}
    here = {"device": "cpu", "gpus": case.ranks, "mem": case.memory, "precision": "fp32"}
    settings = understand({**asked, **here, "learning_rate": 1e-3, **pins})
    return make_plan(*settings, dry_run=partial(DryRunSource, pool=pool))


def train(made: Plan, vocabulary: int) -> tuple[list[float], int]:
    """The losses of the first steps and the peak of live tensor bytes. Runs on ranks."""
    import torch

    from frugal.engine.engine import initialize
    from frugal.engine.measure.two_steps import settled_collectives
    from frugal.memory_watch import gauge
    from frugal.models.resolve import resolve

    generator = torch.Generator().manual_seed(0)
    length = made.request.seq_len

    def sample() -> dict[str, Any]:
        tokens, labels = (torch.randint(3, vocabulary, (length,), generator=generator).tolist() for _ in range(2))
        if made.model.task == "causal-lm":
            return {"input_ids": tokens}
        shown = [token if i % 4 == 0 or made.model.task == "seq2seq" else -100 for i, token in enumerate(labels)]
        return {"input_ids": tokens, "labels": shown}

    batches = [[sample() for _ in range(made.batch.global_batch)] for _ in range(STEPS)]
    spec = resolve(made.request.model, made.request.task)
    with settled_collectives(), gauge("cpu") as measured:
        engine = initialize(spec.build(dtype=torch.float32), made, spec.objective())
        losses = [engine.train_step(batch).loss for batch in batches]
    engine.destroy()
    return losses, measured.peak_bytes


def compare(case: Case, ranks: Ranks, folder: Path, pool: Pool) -> dict[str, Any]:
    """One row of the results."""
    try:
        plan(case, folder, pool, activation_checkpointing="full", loss="plain")
        refusal = None
    except NothingFitsError as error:
        refusal = error.because[0]
    found = plan(case, folder, pool)
    simplest = replace(found.strategy, zero_stage=0, activation_checkpointing="off", loss="plain")
    free = replace(found, strategy=simplest).sealed()
    vocabulary = case.config["vocab_size"]
    measured = ranks.run(train, found, vocabulary)
    unconstrained = ranks.run(train, free, vocabulary)
    losses, expected = measured[0][0], unconstrained[0][0]
    return {
        "budget_bytes": parse_bytes(case.memory),
        "full_activation_checkpointing": refusal,
        "strategy": str(found.strategy),
        "micro_batch": found.batch.largest_micro_batch,
        "planned_bytes": found.memory.total_bytes,
        "measured_bytes": max(peak for _, peak in measured),
        "unconstrained_bytes": max(peak for _, peak in unconstrained),
        "losses": losses,
        "unconstrained_losses": expected,
        "worst_difference": max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True)),
    }


def is_shown(row: dict[str, Any]) -> bool:
    """Return whether the row shows what it is there for."""
    return (
        row["full_activation_checkpointing"] is not None
        and row["measured_bytes"] <= row["budget_bytes"]
        and row["worst_difference"] < CLOSE
    )


def main() -> int:
    """Run all cases, print, write; 1 if one does not show what it should."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory.tight", description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, help="only this one; nothing is written")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    RESULTS.parent.mkdir(exist_ok=True)
    pool = workers()
    ranks = {case.ranks: Ranks(case.ranks) for case in CASES.values()}
    for case in CASES.values():
        if asked.case not in (None, case.name):
            continue
        with TemporaryDirectory() as folder:
            rows.append({**asdict(case), **compare(case, ranks[case.ranks], Path(folder), pool)})
        print(_block(rows[-1]), flush=True)
        if asked.case is None:  # after each row: what was measured before an interruption is kept
            RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(_environment() | {"rows": rows})) + b"\n")
    pool.close()
    for each in ranks.values():
        each.close()
    if asked.case is None:
        print(f"wrote {RESULTS.relative_to(Path.cwd())}")
    return int(not all(map(is_shown, rows)))


def _block(row: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{row['name']}: {row['ranks']} rank{'s' * (row['ranks'] > 1)} of {format_bytes(row['budget_bytes'])}",
            f"  full activation checkpointing  {row['full_activation_checkpointing'] or 'fits'}",
            f"  frugal's plan                  {row['strategy']}, micro-batch {row['micro_batch']}",
            f"  peak                           planned {format_bytes(row['planned_bytes'])}, "
            f"measured {format_bytes(row['measured_bytes'])}, without a budget "
            f"{format_bytes(row['unconstrained_bytes'])}",
            f"  losses                         {', '.join(f'{loss:.6f}' for loss in row['losses'])}; "
            f"without a budget {row['worst_difference']:.1e} off at most",
            "" if is_shown(row) else "  NOT SHOWN\n",
        ]
    )


def _environment() -> dict[str, Any]:
    return environment("python -m bench.memory.tight") | {
        "compared": "live tensor bytes at the peak of the fullest rank, and losses in fp32, over three optimizer steps",
    }


if __name__ == "__main__":
    sys.exit(main())
