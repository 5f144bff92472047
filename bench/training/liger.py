"""`python -m bench.training.liger`: 20 steps of frugal with Liger's kernels beside TRL's SFTTrainer with them.

A small Llama with random weights trains on docstrings, one byte a token, in fp32 on one CPU rank; the kernels run by
Triton's interpreter (`bench.kernels.interpreter`). Each step sees all samples, so that their order makes no difference.
Losses and gradient norms before clipping, of

- frugal with `--kernels liger` and the tiled loss, and with `--kernels plain`;
- SFTTrainer with `use_liger_kernel=True`, which in TRL 1.16 has Liger's layers and a loss of TRL's own.

Needs liger-kernel, triton and trl (`make trl`, which is no dependency of frugal): their folders in PYTHONPATH.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment
from bench.goals import report_goals
from bench.kernels import interpreter  # noqa: F401 - has what Triton's interpreter lacks
from bench.plans import plan_by_hand
from bench.ranks import Ranks
from bench.training.throughput import Docstrings
from frugal.config.optimizers import Optimizer

RESULT = Path(__file__).parents[1] / "results" / "liger-trl-cpu.json"
STEPS, SAMPLES, MICRO_BATCH, SEQ_LEN, RATE = 20, 4, 2, 16, 1e-3
LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": SEQ_LEN, "tie_word_embeddings": False,
}  # fmt: skip
LARGEST_DIFFERENCE = 1e-5

Steps = dict[str, list[float]]
"""`losses` and `norms`."""


def model(folder: Path) -> Any:
    """The Llama in `folder`, made there if it is not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not folder.exists():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def frugals(folder: Path, kernels: str) -> Steps:
    """Return the steps of frugal's engine. Runs on a rank."""
    from frugal.engine.engine import initialize
    from frugal.models.objectives import CausalLM

    plan = plan_by_hand(
        world_size=1, global_batch=SAMPLES, micro_batch=MICRO_BATCH, zero_stage=0,
        request={"learning_rate": RATE, "optimizer": Optimizer(beta2=0.999), "weight_decay": 0.0, "seq_len": SEQ_LEN},
        strategy={"loss": "tiled", "kernels": kernels},
    )  # fmt: skip
    engine, samples = initialize(model(folder), plan, CausalLM()), list(Docstrings(SAMPLES, SEQ_LEN))
    steps = [engine.train_step(samples) for _ in range(STEPS)]
    engine.destroy()
    return {"losses": [step.loss for step in steps], "norms": [step.grad_norm or 0.0 for step in steps]}


def sft_trainers(folder: Path) -> Steps:
    """Return the steps that SFTTrainer logs in this process."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from frugal.data.tokenizer import byte_tokenizer

    rows = [{"input_ids": sample["input_ids"].tolist()} for sample in Docstrings(SAMPLES, SEQ_LEN)]
    config = SFTConfig(
        str(folder / "out"), max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant", bf16=False,
        use_cpu=True, per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=SAMPLES // MICRO_BATCH,
        max_length=SEQ_LEN, gradient_checkpointing=False, use_liger_kernel=True, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = SFTTrainer(
        model(folder / "model"), config, train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer()
    )
    trainer.train()
    logged = [record for record in trainer.state.log_history if "loss" in record]
    return {"losses": [record["loss"] for record in logged], "norms": [record["grad_norm"] for record in logged]}


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """The largest of them, relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    """Train, compare, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=Path, help="the folder of the process of SFTTrainer")
    asked = parser.parse_args()
    if asked.side is not None:
        print(json.dumps(sft_trainers(asked.side)))
        return 0
    kept: dict[str, Any] = environment("python -m bench.training.liger")
    kept["versions"] |= {name: version(name) for name in ("trl", "liger-kernel", "triton")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model(folder / "model")
        command = [sys.executable, "-m", "bench.training.liger", "--side", folder]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        theirs = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        ranks = Ranks(1)
        for kernels in ("liger", "plain"):
            (kept[f"frugal, {kernels}"],) = ranks.run(frugals, folder / "model", kernels, timeout=900)
        ranks.close()
        output, _ = theirs.communicate()
        if theirs.returncode != 0:
            raise SystemExit("SFTTrainer failed")
        kept["sft_trainer"] = json.loads(output.splitlines()[-1])
    kept["largest_relative_difference"] = {
        f"{kernels}, {what}": largest_difference(kept[f"frugal, {kernels}"][what], kept["sft_trainer"][what])
        for kernels in ("liger", "plain")
        for what in ("losses", "norms")
    }
    for name, difference in kept["largest_relative_difference"].items():
        print(f"{name} of {STEPS} steps differ from SFTTrainer's by at most {difference:.1e}")
    goals = kept["largest_relative_difference"].items()
    kept["goals"] = {f"{name} equal to {LARGEST_DIFFERENCE:g}": each <= LARGEST_DIFFERENCE for name, each in goals}
    return report_goals(kept, RESULT)


if __name__ == "__main__":
    sys.exit(main())
