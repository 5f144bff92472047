"""`python -m bench.training.translation`: pairs of text with a batch of target tokens, on one, two and three CPU ranks.

What Nematus users ask for: 16384 target tokens an optimizer step, whatever the number of devices, and no more than 4096
on a device at once, source or target, whichever is more, padding included. Each rank takes as many micro-steps as that
needs.

The pairs are real and their lengths have a heavy tail: a function of Python's own library, from its docstring to its
code, one byte a token; those with a side of more than 1024 are left out, as Nematus' `--maxlen` does. The model is a T5
of two layers on either side. Everything but the number of ranks is left to frugal's plan.

Measured: loss and target tokens of each step, its seconds, and the micro-steps it took. One thread a rank; three ranks
share the two cores of a small machine, so their seconds say nothing about three devices.

Goals: the same losses on any number of ranks; every step has all pairs that fit into 16384 target tokens and none more;
no micro-batch has more than 4096 tokens on either side. `--record` keeps the result.
"""

import argparse
import ast
import json
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import frugal
from bench.environment import environment
from bench.goals import report_goals
from bench.plans import without_calibration
from bench.ranks import Ranks
from bench.training import training_rank
from bench.training.training_rank import Text
from frugal.config.sample_lengths import Lengths
from frugal.data import corpus as samples
from frugal.planning.plan import Plan

COMMAND = "python -m bench.training.translation --record"
RESULTS = Path(__file__).parents[1] / "results" / "translation-cpu.json"
WORLD_SIZES, STEPS = (1, 2, 3), 12
SEQ_LEN, GLOBAL_TOKENS, MAX_TOKENS = 1024, 16384, 4096
ALIKE = 1e-4  # relative, of losses
MODEL = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 260, "d_model": 128, "d_kv": 32,
    "d_ff": 256, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


def pairs(files: int | None = None) -> list[dict[str, str]]:
    """Docstring and code of the functions in so many files of Python's library, each code once."""
    found: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (told := ast.get_docstring(node)):
                node.body = node.body[1:]
                found[ast.unparse(node)] = told
    return [{"source": told, "target": code} for code, told in found.items()]


def written(folder: Path, files: int | None = None, *, seq_len: int = SEQ_LEN) -> Text:
    """The pairs in a file of `folder`."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(files)))
    return Text((str(path),), "seq2seq", seq_len, folder / "tokenised")


def planned(folder: Path, ranks: int, lengths: Lengths) -> Plan:
    """Return what frugal makes of the request."""
    config = folder / "config.json"
    config.write_text(json.dumps(MODEL))
    without_calibration()
    return frugal.plan(
        model=str(config), device="cpu", gpus=ranks, mem="4G", precision="fp32", seq_len=SEQ_LEN, lengths=lengths,
        global_tokens=GLOBAL_TOKENS, max_tokens_per_gpu=MAX_TOKENS, learning_rate=1e-3,
    )  # fmt: skip


def trained(plan: Plan, ranks: Ranks, text: Text, steps: int) -> list[list[dict[str, Any]]]:
    """The steps, by rank."""
    ranks.run(training_rank.begin, "pairs", plan, text, timeout=600)
    found = ranks.run(training_rank.go_on, "pairs", steps, timeout=1800)
    ranks.run(training_rank.end, "pairs")
    return found


def summary(runs: dict[int, list[list[dict[str, Any]]]], longest: int) -> dict[str, Any]:
    """Return what the runs on so many ranks come to; `longest` has the tokens of the longest target."""
    reference = runs[min(runs)][0]
    rows = {}
    for world_size, by_rank in runs.items():
        steps = by_rank[0]
        pairs = list(zip(steps, reference, strict=True))
        rows[world_size] = {
            "seconds_a_step": statistics.median(step["seconds"] for step in steps),
            "micro_steps_a_step": statistics.mean(step["micro_steps"] for step in steps),
            "largest_micro_batch_tokens": max(step["largest"] for rank in by_rank for step in rank),
            "largest_difference_of_losses": max(abs(step["loss"] / other["loss"] - 1) for step, other in pairs),
            "losses": [step["loss"] for step in steps],
            "seconds": [step["seconds"] for step in steps],
        }
        assert [step["targets"] for step in steps] == [step["targets"] for step in reference]
    targets = [step["targets"] for step in reference]
    return {
        "pairs_a_step": statistics.mean(step["samples"] for step in reference),
        "target_tokens": targets,
        "ranks": rows,
        "goals": {
            "the same losses": max(row["largest_difference_of_losses"] for row in rows.values()) <= ALIKE,
            f"all that fits into {GLOBAL_TOKENS} target tokens": GLOBAL_TOKENS - longest < min(targets)
            and max(targets) <= GLOBAL_TOKENS,
            f"at most {MAX_TOKENS} tokens on a rank": max(row["largest_micro_batch_tokens"] for row in rows.values())
            <= MAX_TOKENS,
        },
    }


def table(found: dict[str, Any]) -> str:
    """For docs/benchmarks.md."""
    lines = [
        "| ranks | micro-steps a step | largest micro-batch, tokens | s a step | loss, first and last step "
        "| largest difference of losses |",
        "|---|---|---|---|---|---|",
    ]
    for world_size, row in found["ranks"].items():
        losses = row["losses"]
        lines.append(
            f"| {world_size} | {row['micro_steps_a_step']:.1f} | {row['largest_micro_batch_tokens']} "
            f"| {row['seconds_a_step']:.2f} | {losses[0]:.4f}, {losses[-1]:.4f} "
            f"| {row['largest_difference_of_losses']:.0e} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, and say whether the goals are reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"keep the result in {RESULTS.name}")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    runs = {}
    with tempfile.TemporaryDirectory() as name:
        text = written(Path(name))
        corpus = text.load()
        lengths = samples.lengths_of_corpus(corpus, "pairs", corpus.report.left_out("skip"))
        for world_size in WORLD_SIZES:
            ranks = Ranks(world_size)
            runs[world_size] = trained(planned(Path(name), world_size, lengths), ranks, text, asked.steps)
            ranks.close()
        result = environment(COMMAND) | {
            "pairs": len(corpus.train),
            "left_out": corpus.report.too_long_rows,
            "median_tokens": lengths.quantile(0.5),
            "percentile_99_tokens": lengths.quantile(0.99),
            **summary(runs, int(corpus.train.counted_tokens.max())),
        }
    print(
        f"{result['pairs']} pairs, half of up to {result['median_tokens']} tokens, 99 % of up to "
        f"{result['percentile_99_tokens']}; {result['pairs_a_step']:.0f} of them and "
        f"{statistics.mean(result['target_tokens']):.0f} target tokens a step\n\n{table(result)}\n"
    )
    return report_goals(result, RESULTS if asked.record else None)


if __name__ == "__main__":
    sys.exit(main())
