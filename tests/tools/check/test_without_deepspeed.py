"""Runs without DeepSpeed: what is told of them is what a dry run of such a loop takes, whoever wrote it."""

import random
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from frugal.config.schema import understand
from frugal.dryrun.compare import predicted
from frugal.dryrun.pool import Pool
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.tools.check.checked import Check, check
from frugal.tools.check.gather import gather
from frugal.tools.check.report import report
from frugal.tools.own_loop.run import Script, dry_runs

TINY = str(Path(__file__).parent / "configs" / "tiny-llama.json")
SEQ_LEN = 64
HARDWARE = {"gpus": 1, "mem": "6G"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def checked(folder: Path, text: str, pool: Pool, **hardware: Any) -> Check:
    (folder / "train.yaml").write_text(text)
    settings, documents = gather([folder / "train.yaml"], {"model": TINY})
    return check(settings, documents, HARDWARE | hardware, with_plan=False, pool=pool)


def memory_of(done: Check) -> MemoryBreakdown:
    assert done.verdict is not None, done.settings.refusals
    return done.verdict.memory


def dry_run(step: Any, **parts: Any) -> tuple[int, int]:
    """Live bytes at the peak, and bytes reserved, of a step that takes `parts`."""
    _, cluster, _ = understand({**HARDWARE, "precision": "fp32"})
    with redirect_stdout(StringIO()):
        runs = dry_runs(lambda: Script("a loop", step, parts), cluster, 1 if "model" not in parts else 2)
    return runs[0].peak.total_bytes, predicted(runs, cluster).peak_reserved_bytes


def of_trainer(folder: Path, weights: str, *, lora: bool = False, **arguments: Any) -> tuple[int, int]:
    """The same of transformers' Trainer, with its own loss."""

    def train() -> None:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=DTYPES[weights])
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        args = TrainingArguments(
            str(folder / "out"), max_steps=2, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, **arguments,
        )  # fmt: skip
        tokens = torch.zeros(SEQ_LEN, dtype=torch.long)
        Trainer(model, args, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64).train()

    return dry_run(train)


AXOLOTL = f"base_model: base\nsequence_len: {SEQ_LEN}\nnum_epochs: 1\n"
PLAIN = f"output_dir: out\nmax_length: {SEQ_LEN}\n"
FACTORY = f"finetuning_type: full\ncutoff_len: {SEQ_LEN}\noutput_dir: out\n"
TOOLS = {  # a file in bf16 and one in fp32, by the type of their weights
    "axolotl": (AXOLOTL + "bf16: true\n", "bf16", AXOLOTL + "bf16: false\n"),
    "axolotl, all in bf16": (AXOLOTL + "bf16: full\n", "bf16", ""),
    "transformers": (PLAIN + "bf16: true\ndtype: bfloat16\n", "bf16", PLAIN + "dataset_name: x\n"),
    "llama-factory": (FACTORY + "bf16: true\n", "fp32", FACTORY),
    "llama-factory, pure": (FACTORY + "pure_bf16: true\n", "bf16", ""),
}


@pytest.mark.parametrize(
    ("tool", "in_fp32"),
    [(tool, in_fp32) for tool, (*_, plain) in TOOLS.items() for in_fp32 in (False, True)[: 1 + bool(plain)]],
)
def test_full_fine_tuning_is_a_dry_run_of_transformers_own_trainer(
    tool: str, in_fp32: bool, tmp_path: Path, pool: Pool
) -> None:
    text, weights, plain = TOOLS[tool]
    draw = random.Random(f"{tool}{in_fp32}")
    micro, steps, recomputes = draw.randint(1, 5), draw.randint(1, 3), draw.random() < 0.5
    optim = draw.choice(["adamw_torch_fused", "adamw_torch", "sgd", "rmsprop"])
    names = ("micro_batch_size", "optimizer") if "axolotl" in tool else ("per_device_train_batch_size", "optim")
    text = (plain if in_fp32 else text) + (
        f"{names[0]}: {micro}\ngradient_accumulation_steps: {steps}\n{names[1]}: {optim}\nlearning_rate: 1e-4\n"
        + ("disable_gradient_checkpointing: true\n" if "factory" in tool and not recomputes else "")
        + (f"gradient_checkpointing: {recomputes}\n".lower() if "factory" not in tool else "")
    )
    memory = memory_of(checked(tmp_path, text, pool))
    theirs = of_trainer(
        tmp_path, "fp32" if in_fp32 else weights, bf16=not in_fp32, optim=optim, gradient_checkpointing=recomputes,
        per_device_train_batch_size=micro, gradient_accumulation_steps=min(steps, 2),
    )  # fmt: skip
    assert (memory.live_bytes, memory.reserved_bytes) == theirs


def test_a_loop_by_hand_takes_as_much(tmp_path: Path, pool: Pool) -> None:
    """Autocast over fp32 weights: AdamW's states, gradients and the copies of weights in bf16."""

    def model() -> Any:
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY, use_cache=False))
        return made.cuda().train()

    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            tokens = torch.zeros(3, SEQ_LEN, dtype=torch.long).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    text = FACTORY + "bf16: true\nper_device_train_batch_size: 3\ngradient_accumulation_steps: 2\n"
    memory = memory_of(checked(tmp_path, text + "disable_gradient_checkpointing: true\n", pool))
    by_hand, _ = dry_run(step, model=model, optimizer=optimizer)
    assert memory.live_bytes == pytest.approx(by_hand, rel=5e-3)


def test_adapters_of_a_base_in_fp32_are_dry_run_as_they_are(tmp_path: Path, pool: Pool) -> None:
    text = (
        f"finetuning_type: lora\nlora_target: q_proj\nlora_rank: 4\ncutoff_len: {SEQ_LEN}\noutput_dir: out\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\ndisable_gradient_checkpointing: true\n"
    )
    memory = memory_of(checked(tmp_path, text, pool))
    live, _ = of_trainer(
        tmp_path, "fp32", lora=True, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    assert memory.live_bytes == pytest.approx(live, rel=5e-3)


def test_gpus_under_ddp_keep_buckets_of_the_gradients_size(tmp_path: Path, pool: Pool) -> None:
    text = AXOLOTL + "bf16: true\nmicro_batch_size: 2\n"
    alone = memory_of(checked(tmp_path, text, pool))
    done = checked(tmp_path, text, pool, gpus=4)
    elements = sum(
        each.numel() for each in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY)).parameters()
    )
    assert memory_of(done).live_bytes - alone.live_bytes == pytest.approx(2 * elements, rel=0.01)
    assert "without DeepSpeed, activation checkpointing off" in report(done)


def test_what_does_not_fit_gets_a_change_that_does_also_without_deepspeed(tmp_path: Path, pool: Pool) -> None:
    text = AXOLOTL + "bf16: true\nmicro_batch_size: 64\n"
    needed = memory_of(checked(tmp_path, text, pool)).total_bytes
    done = checked(tmp_path, text, pool, mem=str(int(needed * 0.9)))
    assert done.exit_code == 3 and done.change is not None and done.change.verdict.fits
    assert done.change.verdict.subject.batch.global_batch == 64


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("bf16: true\n", "no field says in which type its script loads the weights"),
        ("fp16: true\ndtype: float16\n", "Attempting to unscale FP16 gradients"),
    ],
)
def test_weights_of_an_unknown_type_and_those_that_fail_are_not_checked(
    more: str, reason: str, tmp_path: Path, pool: Pool
) -> None:
    done = checked(tmp_path, f"{PLAIN}{more}per_device_train_batch_size: 2\n", pool)
    assert done.verdict is None and done.arithmetic.global_batch == 2
    assert reason in "; ".join(each.text for each in done.settings.refusals)
