"""`python -m bench.training.fine_tuning`: frugal train and TRL's SFTTrainer on the same chats, full and with adapters.

The chats are questions about Python's own library, the answers its docstrings; a small Llama is pre-trained on the spot
by `frugal train` and has a ChatML tokenizer of its own. Then both fine-tune that folder:

- losses: all chats are one global batch, so that the order of samples makes no difference. 20 steps of the loss over
  the assistant's tokens, fp32, the same AdamW; with adapters both begin with the same ones.
- seconds: global batches of 32 of many chats, in turns. SFTTrainer with its defaults but for fp32, as a CPU has no
  bf16 worth the name: micro-batch 8, random order, activation checkpointing; and once more without checkpointing.

TRL must be installed (`pip install --no-deps trl`); it is no dependency of frugal. One process, one thread each.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.goals import report_goals

RESULT = Path(__file__).parents[1] / "results" / "fine-tuning-cpu.json"
SEQ_LEN, STEPS, RATE = 256, 20, 1e-3
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN,
    "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
LORA = {"rank": 8, "alpha": 16}
PEERS: dict[str, dict[str, Any]] = {
    "sft_trainer": {}, "sft_trainer_without_checkpointing": {"gradient_checkpointing": False}
}  # fmt: skip
LARGEST_DIFFERENCE, LEAST_RATIO = 1e-5, 1.5


def chats() -> list[dict[str, Any]]:
    """A question and its answer for each documented function and class of the standard library's files."""
    rows = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                question = f"What does `{path.stem}.{node.name}` do?"
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": text[:500]}]
                rows.append({"messages": turns})
    return rows[:: max(1, len(rows) // 1024)]


def tokenizer(rows: list[dict[str, Any]]) -> Any:
    """A byte-level BPE of the chats' texts, with a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=LLAMA["vocab_size"], special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator((turn["content"] for row in rows for turn in row["messages"]), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def prepare(folder: Path) -> None:
    """`model/`, a pre-trained folder; `few.jsonl`, `many.jsonl`, chats; `adapter/`, adapters that learned nothing."""
    import torch

    from frugal.config.adapters import Lora
    from frugal.models import resolve

    rows = chats()
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::32]))
    (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    tokenizer(rows).save_pretrained(folder / "tokenizer")
    frugal(
        folder, "pre", "--model", folder / "config.json", "--tokenizer", folder / "tokenizer", "--data", "stdlib",
        "--set", "train.limit=200", "--global-batch", 16, "--steps", 20, "--learning-rate", RATE,
    )  # fmt: skip
    (folder / "pre" / "model").rename(folder / "model")
    spec = replace(resolve.resolve(str(folder / "model")), lora=Lora(**LORA))
    spec.build(dtype=torch.float32, seed=0).save_pretrained(folder / "adapter")


def frugal(folder: Path, name: str, *words: object) -> list[dict[str, Any]]:
    """`frugal train` on one CPU rank; its steps."""
    command = [
        sys.executable, "-m", "frugal", "train", "--device", "cpu", "--gpus", 1, "--mem", "4G",
        "--precision", "fp32", "--seq-len",
        SEQ_LEN, "--validation-data", "0%", "--schedule", "constant", "--weight-decay", 0, "--optimizer",
        "adamw,beta2=0.999",
        "--eval-every", 0, "--out", folder / name, *words,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=_environment())
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "step"]


def sft(folder: Path, data: str, *, steps: int, batch: int, adapter: bool = False, **others: Any) -> dict[str, Any]:
    """Return what a process with TRL's SFTTrainer reports of itself."""
    asked = {"folder": str(folder), "data": data, "steps": steps, "batch": batch, "adapter": adapter, "others": others}
    command = [sys.executable, "-m", "bench.training.fine_tuning", "--side", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode != 0:
        raise SystemExit(done.stderr[-4000:])
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}


def side(asked: dict[str, Any]) -> None:
    """SFTTrainer in this process: losses and seconds of each step, as JSON."""
    import torch
    from datasets import load_dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    folder = Path(asked["folder"])
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if asked["adapter"]:
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            out, max_steps=asked["steps"], learning_rate=RATE, lr_scheduler_type="constant", bf16=False, use_cpu=True,
            gradient_accumulation_steps=asked["batch"] // 8, max_length=SEQ_LEN, assistant_only_loss=True, report_to=[],
            logging_steps=1, save_strategy="no", disable_tqdm=True, **asked["others"],
        )  # fmt: skip
        data = load_dataset("json", data_files=str(folder / asked["data"]), split="train", cache_dir=out)
        trainer = SFTTrainer(
            model, config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    print(json.dumps({"losses": losses, "seconds": seconds}))


def losses(folder: Path, adapter: bool) -> dict[str, Any]:
    """Both sides' losses where every step sees every chat of `few.jsonl`."""
    number = len((folder / "few.jsonl").read_text().splitlines()) // 8 * 8
    data = (folder / "few.jsonl").read_text().splitlines()[:number]
    (folder / "whole.jsonl").write_text("\n".join(data) + "\n")
    lora = ["--lora", f"r={LORA['rank']},alpha={LORA['alpha']}"] if adapter else []
    own = frugal(
        folder, f"own-{adapter}", "--model", folder / "model", "--data", folder / "whole.jsonl", "--global-batch",
        number, "--steps", STEPS, "--learning-rate", RATE, *lora,
    )  # fmt: skip
    theirs = sft(folder, "whole.jsonl", steps=STEPS, batch=number, adapter=adapter, gradient_checkpointing=False)
    pairs = list(zip((step["loss"] for step in own), theirs["losses"], strict=True))
    return {
        "samples": number, "targets": own[0]["targets"], "frugal": [pair[0] for pair in pairs],
        "sft_trainer": [pair[1] for pair in pairs],
        "largest_relative_difference": max(abs(a - b) / b for a, b in pairs),
    }  # fmt: skip


def speed(folder: Path, rounds: int) -> dict[str, Any]:
    """Target tokens per second of both, in turns; the first two steps of each turn are left out."""
    rates: dict[str, list[float]] = {name: [] for name in ("frugal", *PEERS)}
    for number in range(rounds):
        own = frugal(
            folder, f"speed-{number}", "--model", folder / "model", "--data", folder / "many.jsonl", "--global-batch",
            32, "--steps", 10, "--learning-rate", RATE,
        )  # fmt: skip
        targets = statistics.mean(step["targets"] for step in own[2:])
        rates["frugal"].append(
            sum(step["targets"] for step in own[2:])
            / sum(step["targets"] / step["tokens_per_second"] for step in own[2:])
        )
        for name, others in PEERS.items():
            theirs = sft(folder, "many.jsonl", steps=10, batch=32, **others)
            rates[name].append(targets / statistics.mean(theirs["seconds"][2:]))
    return {
        "target_tokens_per_second": rates,
        "ratios": {
            name: statistics.median(a / b for a, b in zip(rates["frugal"], rates[name], strict=True)) for name in PEERS
        },
    }  # fmt: skip


def main() -> int:
    """Measure, print the ratios, keep the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", help="what a process of SFTTrainer is asked for; JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    if asked.side:
        side(json.loads(asked.side))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        kept = environment("python -m bench.training.fine_tuning")
        kept["versions"] |= {name: version(name) for name in ("trl", "peft")}
        kept["losses"] = {"full": losses(folder, adapter=False), "lora": losses(folder, adapter=True)}
        kept["speed"] = speed(folder, asked.rounds)
    for kind, record in kept["losses"].items():
        print(f"{kind}: losses of {STEPS} steps differ by at most {record['largest_relative_difference']:.1e}")
    for name, ratio in kept["speed"]["ratios"].items():
        print(f"frugal's target tokens per second are {ratio:.2f} times those of {name}")
    kept["goals"] = {
        f"losses equal to {LARGEST_DIFFERENCE:g}, {kind}": record["largest_relative_difference"] <= LARGEST_DIFFERENCE
        for kind, record in kept["losses"].items()
    } | {f"{LEAST_RATIO} times SFTTrainer's defaults": kept["speed"]["ratios"]["sft_trainer"] >= LEAST_RATIO}
    return report_goals(kept, asked.out)


if __name__ == "__main__":
    sys.exit(main())
