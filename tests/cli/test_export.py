"""`frugal export`: each foreign trainer is really started on two ranks, and trains as frugal does."""

import dataclasses
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.plans import plan_by_hand
from bench.ranks import Ranks, free_port
from frugal import cli
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.planning.plan import Plan
from tests.commands import Capture, frugal, with_formulas
from tests.engine.gradients import bound_of_losses
from tests.planning.synthetic import SMALL

TINY = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

# DeepSpeed on CPU ranks would compile a kernel of its own when it starts: half a minute that shows nothing here.
START = """
import json, os, runpy, sys
import deepspeed
setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
sys.argv = sorted(sys.argv[1:], key=lambda word: word.startswith("--local_rank"))  # DeepSpeed puts it first
sys.path.insert(0, "hf")
end = runpy.run_path(sys.argv[0], run_name="__main__")
engine = end["engine"]
if engine.global_rank == 0:
    shape = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.world_size
    values = {"shape": shape, "losses": end.get("losses"), "config": engine._config._param_dict}
    with open(os.environ["RECORD"], "w") as file:
        json.dump(values, file)
sys.stdout.flush()
os._exit(0)  # threads of libraries can abort a process that waits for its own end, after all is done
"""

COLLATE = """
import json
import torch
samples = [json.loads(line) for line in open("samples.jsonl")]

def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    return {"input_ids": pad(tokens, batch_first=True), "labels": pad(tokens, batch_first=True, padding_value=-100)}
"""

TRAINER = """
from planned_trainer import arguments, trainer
from transformers import AutoModelForCausalLM

args = arguments(
    "hf/run", max_steps=2, save_strategy="no", logging_steps=1, report_to=[], disable_tqdm=True,
    remove_unused_columns=False,
)
model = AutoModelForCausalLM.from_pretrained("model")
made = trainer(model, args, train_dataset=samples, data_collator=collate)
made.train()
engine, losses = made.model_wrapped, [record["loss"] for record in made.state.log_history if "loss" in record]
torch.distributed.destroy_process_group()
"""

ACCELERATE = (
    COLLATE
    + """
import deepspeed
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

deepspeed.init_distributed()
PartialState(cpu=True)
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("model").train()
model.activation_checkpointing_enable({"use_reentrant": False})
loader = torch.utils.data.DataLoader(samples, batch_size=2, collate_fn=collate)
engine, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
targets, losses = sum(len(sample["input_ids"]) - 1 for sample in samples), []
for epoch in range(2):
    total = torch.zeros(())
    for batch in loader:
        with accelerator.accumulate(engine):
            logits, labels = engine(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
            loss_sum = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            accelerator.backward(loss_sum * 2 / targets, scale_wrt_gas=False)
            total += loss_sum.detach()
    losses.append(accelerator.reduce(total).item() / targets)
torch.distributed.destroy_process_group()
"""
)


def prepared(folder: Path, config: dict[str, Any], rows: list[dict[str, list[int]]], **programs: str) -> Path:
    """A tiny model with weights, samples, and programs of somebody who uses other trainers."""
    import torch

    from frugal.models import resolve

    (folder / "config.json").write_text(json.dumps(config))
    resolve.resolve(str(folder / "config.json")).build(dtype=torch.float32).save_pretrained(folder / "model")
    for name, some in (("samples", rows), ("seven", rows[:7])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 and eight samples."""
    rows = [{"input_ids": random.Random(i).choices(range(260), k=6 * i + 5)} for i in range(8)]
    programs = {"start": START, "trainer": COLLATE + TRAINER, "accelerated": ACCELERATE}
    return prepared(tmp_path_factory.mktemp("export"), TINY, rows, **programs)


def plan(global_batch: int, zero_stage: int, checkpointing: str) -> Plan:
    made = plan_by_hand(
        world_size=2, global_batch=global_batch, micro_batch=2, zero_stage=zero_stage,
        request={"model": "model", "learning_rate": 1e-2}, strategy={"activation_checkpointing": checkpointing},
    )  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(made), Plan).sealed()


def two_losses(folder: str, made: Plan, model: str = "model") -> list[float]:
    """The first two losses of frugal's own engine, on a rank."""
    import torch

    import frugal
    from frugal.models import resolve

    spec = resolve.resolve(f"{folder}/{model}")
    engine = frugal.initialize(spec.build(dtype=torch.float32), made, spec.objective())
    lines = Path(folder, "samples.jsonl").read_text().splitlines()[: made.batch.global_batch]
    losses = [engine.train_step([json.loads(line) for line in lines]).loss for _ in range(2)]
    engine.destroy()
    return losses


def bound(folder: Path, made: Plan) -> float:
    """Return how far `two_losses` may be from others', relative."""
    import torch

    from frugal.models import resolve

    spec = resolve.resolve(str(folder / "model"))
    lines = (folder / "samples.jsonl").read_text().splitlines()[: made.batch.global_batch]
    batches = [[json.loads(line) for line in lines]] * 2
    return bound_of_losses(lambda: spec.build(dtype=torch.float32), batches, spec.objective(), learning_rate=1e-2)


def started(folder: Path, capsys: Capture, target: str, made: Plan, changes: dict[str, str]) -> dict[str, Any]:
    """Export, start what is said to start it, and give back what rank 0 recorded."""
    path = folder / f"{target}.json"
    path.write_bytes(made.to_json())
    assert cli.run(["export", str(path), "--to", target, "-o", str(folder / target)]) == 0
    command = capsys.readouterr().out.split("start it with\n  ")[1].strip()
    for old, new in changes.items():
        assert old in command
        command = command.replace(old, new)
    record = folder / f"{target}-record.json"
    words, programs = shlex.split(command), Path(sys.executable).parent
    given = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    program, *arguments = words[len(given) :]
    done = subprocess.run(
        [sys.executable, str(programs / program), *arguments], cwd=folder, capture_output=True, text=True, timeout=280,
        env=os.environ | given | {
            "RECORD": str(record), "LOCAL_SIZE": "2", "PATH": f"{programs}:{os.environ['PATH']}",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recorded: dict[str, Any] = json.loads(record.read_text())
    if recorded["losses"] is None:
        recorded["losses"] = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    return recorded


DEEPSPEED = "deepspeed --hostfile /dev/null --num_gpus 2 --master_port PORT start.py"
CASES = {
    "hf": (8, 3, "off", {"YOUR_SCRIPT.py": "start.py trainer.py"}),
    "accelerate": (
        8,
        2,
        "full",
        {"YOUR_SCRIPT.py": "start.py accelerated.py", "launch": "launch --main_process_port PORT"},
    ),
    "script": (
        7,
        3,
        "full",
        {"torchrun --standalone --nproc-per-node 2": DEEPSPEED, "samples.jsonl": "seven.jsonl --steps 2"},
    ),
}
"""Samples, ZeRO stage, activation checkpointing, and what somebody changes in the command that is shown."""


@pytest.mark.parametrize(
    "target", ["hf", *(pytest.param(target, marks=pytest.mark.exhaustive) for target in ("accelerate", "script"))]
)
def test_it_trains_as_frugal_does(folder: Path, two_ranks: Ranks, capsys: Capture, target: str) -> None:
    """Micro-batch, accumulation and world; DeepSpeed's configuration; the loss before and after the first step."""
    global_batch, zero_stage, checkpointing, changes = CASES[target]
    made = plan(global_batch, zero_stage, checkpointing)
    changes = {old: new.replace("PORT", str(free_port())) for old, new in changes.items()}
    theirs = started(folder, capsys, target, made, changes)
    (ours, _) = two_ranks.run(two_losses, str(folder), made)
    assert theirs["shape"] == [made.batch.largest_micro_batch, made.batch.accumulation_steps, 2]
    assert theirs["losses"] == pytest.approx(ours, rel=bound(folder, made))
    changed = {name for name, value in deepspeed_config(made).items() if theirs["config"].get(name) != value}
    assert changed <= {"steps_per_print"}  # Accelerate writes it down as infinite


MBART = {
    "model_type": "mbart", "vocab_size": 260, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "architectures": ["MBartForConditionalGeneration"],
}  # fmt: skip
COLLATE_PAIRS = """
import json
import torch
samples = [json.loads(line) for line in open("samples.jsonl")]

def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    tokens, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    mask = pad([torch.ones_like(row) for row in tokens], batch_first=True)
    return {
        "input_ids": pad(tokens, batch_first=True, padding_value=1), "attention_mask": mask,
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
"""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mBART, whose decoder begins with a sample's last token, and eight pairs."""
    made = [random.Random(i).choices(range(4, 260), k=3 * i + 5) for i in range(8)]
    rows = [{"input_ids": row, "labels": [*row[::2], 2, 4 + i]} for i, row in enumerate(made)]
    trainer = COLLATE_PAIRS + TRAINER.replace("CausalLM", "Seq2SeqLM")
    return prepared(tmp_path_factory.mktemp("pairs"), MBART, rows, start=START, trainer=trainer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["hf", "script"])
def test_pairs_are_trained_with_the_decoder_inputs_of_the_model(
    pairs: Path, two_ranks: Ranks, capsys: Capture, target: str
) -> None:
    made = plan(8, 2, "off")
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, task="seq2seq")).sealed()
    changes = {
        "hf": {"YOUR_SCRIPT.py": "start.py trainer.py"},
        "script": {"script/train.py samples.jsonl": "start.py script/train.py samples.jsonl --steps 2"},
    }
    theirs = started(pairs, capsys, target, made, changes[target])
    (ours, _) = two_ranks.run(two_losses, str(pairs), made)
    assert theirs["losses"] == pytest.approx(ours, rel=bound(pairs, made))


# What it says.


def run(capsys: Capture, folder: Path, *arguments: object, **request: Any) -> tuple[int, str, str]:
    """Export a plan whose request has these changes."""
    made = plan(8, 2, "off")
    path = folder / "said.json"
    path.write_bytes(dataclasses.replace(made, request=dataclasses.replace(made.request, **request)).sealed().to_json())
    return frugal(capsys, "export", str(path), *map(str, arguments))


def test_without_a_folder_the_file_is_printed(tmp_path: Path, capsys: Capture) -> None:
    code, text, told = run(capsys, tmp_path, "--to", "accelerate")
    assert (code, told) == (0, "it reads ds_config.json beside it: -o DIR writes both\n")
    assert text.startswith("# 8 samples = 2 ranks x micro-batch 2 x 2 accumulation steps, for Accelerate.\n")


def test_a_file_that_was_edited_is_kept(tmp_path: Path, capsys: Capture) -> None:
    for _ in range(2):  # the same again is no loss
        code, said, _ = run(capsys, tmp_path, "--to", "hf", "-o", tmp_path)
        assert code == 0
        assert said.startswith(f"wrote {tmp_path}/planned_trainer.py and {tmp_path}/plan.json\n\nstart it with\n  ")
    (tmp_path / "planned_trainer.py").write_text("mine")
    code, _, error = run(capsys, tmp_path, "--to", "hf", "-o", tmp_path)
    assert code == 2
    assert error.startswith(f"error: {tmp_path}/planned_trainer.py is there already, and differs\n")
    assert (tmp_path / "planned_trainer.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("model", "made"),
    [
        ("distilgpt2", 'config = AutoConfig.for_model("gpt2", n_layer=6, n_embd=768, n_head=12, n_positions=1024,'),
        ("llama", 'config = AutoConfig.for_model("llama", use_cache=False)'),
        ("someone/model", 'model = AutoModelForCausalLM.from_pretrained("someone/model", dtype=torch.float32'),
        ("CONFIG", 'config = AutoConfig.from_pretrained("CONFIG", use_cache=False)'),
    ],
)
def test_a_script_makes_the_plans_model(tmp_path: Path, capsys: Capture, model: str, made: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model, made = (text.replace("CONFIG", str(tmp_path / "config.json")) for text in (model, made))
    assert f"\n{made}" in run(capsys, tmp_path, "--to", "script", model=model)[1]


MINE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

def model():
    return Mine(), {"x": torch.zeros(4), "labels": 0}
"""


def test_a_factorys_model_is_made_by_its_factory(tmp_path: Path, capsys: Capture) -> None:
    code, text, _ = run(capsys, tmp_path, "--to", "script", model="mine.py:model")
    assert code == 0 and "\nfrom frugal.models.resolve import resolve\n" in text
    assert "\nfactory = resolve('mine.py:model', None)\nmodel, objective = factory.build(dtype=torch.float32)" in text
    (tmp_path / "own.json").write_bytes(own_plan().to_json())
    code, _, error = frugal(capsys, "export", str(tmp_path / "own.json"), "--to", "hf", "-o", str(tmp_path / "hf"))
    assert code == 2 and "--to script exports it" in error


def own_plan() -> Plan:
    """A plan for the module in `mine.py`."""
    made = plan(7, 2, "off")
    request, model = (dataclasses.replace(part, **changes) for part, changes in (
        (made.request, {"model": "mine.py:model"}), (made.model, {"task": "own"}),
    ))  # fmt: skip
    return dataclasses.replace(made, request=request, model=model).sealed()


@pytest.mark.exhaustive
def test_a_module_with_a_loss_of_its_own_is_trained_by_the_script_as_by_frugal(
    tmp_path: Path, two_ranks: Ranks, capsys: Capture
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "start.py").write_text(START)
    rows = [{"x": [i, -i, 1.5, i % 2], "labels": -100 if i == 2 else i % 3} for i in range(7)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "torchrun --standalone --nproc-per-node 2": DEEPSPEED.replace("PORT", str(free_port())),
        "samples.jsonl": "samples.jsonl --steps 2",
    }
    theirs = started(tmp_path, capsys, "script", own_plan(), changes)["losses"]
    (ours, _) = two_ranks.run(two_losses, str(tmp_path), own_plan(), "mine.py:model")
    assert theirs[0] == pytest.approx(ours[0], abs=1e-6) and theirs[1] < theirs[0]  # printed to six decimals


def test_a_target_that_knows_equal_micro_batches_only_gets_a_plan_of_these(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_formulas(tmp_path, monkeypatch, **SMALL)
    asked = ["--gpus", "4", "--mem", "12G", "--max-tokens-per-gpu", "8192", "-o", "run"]
    assert cli.run(["plan", *asked, "--global-batch", "500"]) == 0
    assert json.loads(Path("run/ds_config.json").read_text())["train_batch_size"] == 512
    capsys.readouterr()
    assert cli.run(["export", "run", "--to", "accelerate", "-o", "out"]) == 0
    assert capsys.readouterr().err.startswith(
        "note: equal micro-batches, which --to accelerate needs: 500 samples = 4 GPUs x micro-batch 5 x 25 "
        "accumulation steps instead of 500 samples = 4 GPUs x 16 micro-steps of 7 or 8 samples, "
    )
    config = json.loads(Path("out/ds_config.json").read_text())
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (500, 5)
    assert config["gradient_accumulation_steps"] == 25
    assert cli.run(["export", "run", "--to", "script", "-o", "script"]) == 0
    assert capsys.readouterr().err == "", "a script cuts each micro-step itself"
    assert cli.run(["plan", *asked[:-1], "odd", "--global-batch", "501"]) == 0
    assert cli.run(["export", "odd", "--to", "accelerate"]) == 2
    assert capsys.readouterr().err.endswith(
        "equal micro-batches are impossible for a global batch of 501 with 4 GPUs\n"
        "  because equal micro-batches come to a multiple of 4 samples\n\nhint: use --global-batch 500 or 504\n"
    )
