"""What `frugal export` writes: Python for transformers' Trainer, YAML for Accelerate, a DeepSpeed script to read.

All three take the mean over the targets of the whole global batch, as frugal's engine does: the loss of a micro-batch
is a sum, divided by the batch's targets T and multiplied by the number of ranks W, because DeepSpeed averages over
them. `scale_wrt_gas=False` keeps DeepSpeed from dividing by the accumulation steps too; Trainer and Accelerate pass
that on. Spelling as of transformers 5.23, Accelerate 1.15 and DeepSpeed 0.19.8.

A plan for other trainers: transformers' Trainer, Accelerate, and a plain DeepSpeed script.

Each export is one file beside the plan's own `ds_config.json`, which all three take unchanged: every batch size and
every bucket in it is a number, so there is nothing for them to fill in. What they cannot do is refused here, not left
to come out in memory or in the gradient.
"""

import json
from dataclasses import dataclass
from typing import Literal

from frugal.deepspeed_adapter.json_config import ADAM_BETAS, ADAM_EPSILON, deepspeed_config
from frugal.errors import RequestError
from frugal.planning.plan import Plan

Target = Literal["hf", "accelerate", "script"]
FILES: dict[Target, str] = {"hf": "planned_trainer.py", "accelerate": "accelerate.yaml", "script": "train.py"}
DEEPSPEED_FILE = "ds_config.json"

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}


def start_command(plan: Plan, target: Target, folder: str) -> str:
    """The command that starts the ranks, with the target's files in `folder`."""
    nodes = plan.cluster.nodes
    environment = "DS_ACCELERATOR=cpu " if _on_cpu(plan) else ""
    program = f"{_in(folder, FILES['script'])} samples.jsonl" if target == "script" else "YOUR_SCRIPT.py"
    if target == "accelerate":
        return f"{environment}accelerate launch --config_file {_in(folder, FILES[target])} {program}"
    if len(nodes) > 1:
        return f"{environment}deepspeed --hostfile HOSTS {program}"
    return f"{environment}torchrun --standalone --nproc-per-node {plan.batch.world_size} {program}"


def _in(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else name


def _on_cpu(plan: Plan) -> bool:
    return plan.cluster.devices[0].kind == "cpu"


def _sum(plan: Plan) -> str:
    """The batch as a product, or as a bound where the micro-batch sizes differ."""
    batch = plan.batch
    kind = ("rank" if _on_cpu(plan) else "GPU") + "s" * (batch.world_size > 1)
    up_to = "" if batch.is_uniform else "up to "
    return (
        f"{batch.global_batch} samples = {batch.world_size} {kind} x {up_to}micro-batch {batch.largest_micro_batch} x "
        f"{batch.accumulation_steps} accumulation step{'s' * (batch.accumulation_steps > 1)}"
    )


def _origin(plan: Plan) -> str:
    return f"{plan.strategy}. Written by `frugal export` from plan {plan.digest[:12]}."


def hf(plan: Plan, start: str) -> str:
    """Python with `TrainingArguments`, and a Trainer whose loss is exact."""
    request, task = plan.request, plan.model.task
    full = plan.strategy.activation_checkpointing == "full"
    targets = "F.pad(labels[:, 1:], (0, 1), value=-100)  # each token predicts the next" * (task == "causal-lm")
    loss_type = '    model.loss_type = "ForCausalLM"  # otherwise Trainer may count first tokens as targets\n'
    join = (
        "    deepspeed.init_distributed()  # which TrainingArguments leaves out on CPUs, and ZeRO-3 needs\n"
        * _on_cpu(plan)
    )
    collator = "    # its data_collator: DataCollatorForSeq2Seq(tokenizer, model=model), which shifts the labels\n"
    return f'''"""{_sum(plan)}, for transformers' Trainer.

{_origin(plan)}
In your script, started with `{start}`:

    args = arguments("run", max_steps=1000)  # before the model, which ZeRO-3 splits while it is made
    model = {AUTO_CLASSES[task]}.from_pretrained(...)
    trainer(model, args, train_dataset=...).train()
"""

from pathlib import Path

{"import deepspeed" + chr(10) if _on_cpu(plan) else ""}import torch.nn.functional as F
from transformers import Trainer, TrainingArguments


def arguments(output_dir, **others):
    """What the plan says, and `others`: what it does not, such as steps, saving and logging."""
{join}    return TrainingArguments(
        output_dir=output_dir,
        deepspeed=str(Path(__file__).with_name("{DEEPSPEED_FILE}")),
        per_device_train_batch_size={plan.batch.largest_micro_batch},
        gradient_accumulation_steps={plan.batch.accumulation_steps},
        average_tokens_across_devices=True,
        dataloader_drop_last=True,
        bf16={request.precision == "bf16"},
        fp16={request.precision == "fp16"},
        activation_checkpointing={full},
        activation_checkpointing_kwargs={'{"use_reentrant": False}' if full else None},
        use_cache=False,
        use_cpu={_on_cpu(plan)},
        learning_rate={request.scaled_learning_rate!r},
        weight_decay={request.weight_decay!r},
        adam_beta1={ADAM_BETAS[0]!r},
        adam_beta2={ADAM_BETAS[1]!r},
        adam_epsilon={ADAM_EPSILON!r},
        max_grad_norm={request.gradient_clipping!r},
        lr_scheduler_type="cosine",
        seed=0,
        **others,
    )


def trainer(model, args, **others):
    """A Trainer that averages over all targets of a global batch."""
{loss_type * (task == "causal-lm")}{collator * (task == "seq2seq")}\
    return Trainer(model=model, args=args, compute_loss_func=mean_loss, **others)


def mean_loss(outputs, labels, num_items_in_batch=None):
    """This micro-batch's part of the mean; `num_items_in_batch` counts the targets of the global batch."""
    targets = {targets or "labels"}
    logits = outputs.logits.flatten(0, -2).float()
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
'''


def accelerate(plan: Plan, start: str, folder: str) -> str:
    """A config file for `accelerate launch`. What it cannot say, the training script must do: the comments say what."""
    batch, nodes = plan.batch, plan.cluster.nodes
    duties = [
        f"batches of {batch.largest_micro_batch} samples from its DataLoader; accelerator.accumulate(model) counts to "
        f"{batch.accumulation_steps}",
        f"accelerate.utils.DummyOptim as optimizer: {DEEPSPEED_FILE} names the real one",
        "the mean over the T targets of a whole global batch, from each micro-batch's sum:\n"
        f"#     accelerator.backward(loss_sum * {batch.world_size} / T, scale_wrt_gas=False)",
    ]
    if plan.strategy.activation_checkpointing == "full":
        duties.append('model.activation_checkpointing_enable({"use_reentrant": False})')
    if _on_cpu(plan):
        duties.append(
            "deepspeed.init_distributed() and accelerate.PartialState(cpu=True) before Accelerator(),\n"
            "#   which takes each CPU rank for the only one otherwise"
        )
    several = [
        "  deepspeed_multinode_launcher: pdsh",
        "  deepspeed_hostfile: hostfile  # a line `NAME slots=GPUS` for each node",
    ]
    return "\n".join(
        [
            f"# {_sum(plan)}, for Accelerate.",
            f"# {_origin(plan)}",
            "#",
            f"#     {start}",
            "#",
            "# What your script has to do itself:",
            *(f"# - {duty}" for duty in duties),
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: DEEPSPEED",
            "deepspeed_config:",
            f"  deepspeed_config_file: {json.dumps(_in(folder, DEEPSPEED_FILE))}",
            f"  zero3_init_flag: {json.dumps(plan.strategy.zero_stage == 3)}",
            *(several if len(nodes) > 1 else []),
            f"num_machines: {len(nodes)}",
            f"num_processes: {batch.world_size}",
            "machine_rank: 0",
            "main_training_function: main",
            f"use_cpu: {json.dumps(_on_cpu(plan))}",
            "",
        ]
    )


_SAMPLES = {
    "causal-lm": '{"input_ids": [token, ...]}, with "labels" where some tokens are not to be learned (-100)',
    "masked-lm": '{"input_ids": [token, ...], "labels": [token or -100, ...]}, masked already',
    "seq2seq": '{"input_ids": [token, ...], "labels": [token, ...]}',
    "sequence-classification": '{"input_ids": [token, ...], "label": class}',
}

_COLLATE = {
    "causal-lm": """\
    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    targets = [torch.tensor([*sample.get("labels", sample["input_ids"])[1:], -100]) for sample in samples]
    return {"input_ids": pad(tokens, 0)}, pad(targets, -100)  # causal attention never looks at padding
""",
    "masked-lm": """\
    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    targets = [torch.tensor(sample["labels"]) for sample in samples]
    mask = pad([torch.ones_like(row) for row in tokens], 0)
    return {"input_ids": pad(tokens, 0), "attention_mask": mask}, pad(targets, -100)
""",
    "seq2seq": """\
    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    targets = [torch.tensor(sample["labels"]) for sample in samples]
    begin = torch.tensor([model.config.decoder_start_token_id or 0])
    shifted = pad([torch.cat([begin, row[:-1]]) for row in targets], 0)
    mask = pad([torch.ones_like(row) for row in tokens], 0)
    return {"input_ids": pad(tokens, 0), "attention_mask": mask, "decoder_input_ids": shifted}, pad(targets, -100)
""",
    "sequence-classification": """\
    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    mask = pad([torch.ones_like(row) for row in tokens], 0)
    return {"input_ids": pad(tokens, 0), "attention_mask": mask}, torch.tensor([s["label"] for s in samples])
""",
}


def script(plan: Plan, start: str, make_model: str) -> str:
    """A DeepSpeed script. `make_model` is an expression that makes the model, in terms of `config` and `Auto`."""
    batch, stage = plan.batch, plan.strategy.zero_stage
    checkpointing = 'model.activation_checkpointing_enable({"use_reentrant": False})\n'
    partition = """\
deepspeed.zero.Init(module=model, config_dict_or_path=CONFIG)  # so that no GPU ever holds the whole model
for buffer in model.buffers():
    buffer.data = buffer.data.to(get_accelerator().current_device_name())
"""
    return f'''"""{_sum(plan)}.

{_origin(plan)}

    {start}

Each line of samples.jsonl is {_SAMPLES[plan.model.task]}.
"""

import argparse
import json
import math
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, {AUTO_CLASSES[plan.model.task]}

BATCH, STEPS_OF_ACCUMULATION = {batch.global_batch}, {batch.accumulation_steps}
CONFIG = str(Path(__file__).with_name("{DEEPSPEED_FILE}"))

parser = argparse.ArgumentParser()
parser.add_argument("samples", type=Path)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--local_rank", help="added by DeepSpeed's launcher")
asked = parser.parse_args()
samples = [json.loads(line) for line in asked.samples.open()]

deepspeed.init_distributed()
rank, world_size = dist.get_rank(), dist.get_world_size()
assert world_size == {batch.world_size}, "planned for {batch.world_size} ranks"
torch.manual_seed(0)
{make_model}
{checkpointing * (plan.strategy.activation_checkpointing == "full")}{partition * (stage == 3)}\
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * min(step / asked.steps, 1))) / 2
    ),
    config=CONFIG,
)
torch.manual_seed(1 + rank)  # dropout is another on each rank


def pad(rows, value):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def collate(samples):
    """What the model reads, and the targets: -100 is none."""
{_COLLATE[plan.model.task]}

for step in range(asked.steps):
    micro_batches = []
    for k in range(STEPS_OF_ACCUMULATION):  # rank by rank, in each micro-step
        begin, end = BATCH * k // STEPS_OF_ACCUMULATION, BATCH * (k + 1) // STEPS_OF_ACCUMULATION
        mine = range(*(begin + (end - begin) * part // world_size for part in (rank, rank + 1)))
        micro_batches.append(collate([samples[(step * BATCH + i) % len(samples)] for i in mine]))
    targets = torch.tensor(sum(int((labels != -100).sum()) for _, labels in micro_batches), device=engine.device)
    dist.all_reduce(targets)  # T, over all ranks and micro-steps
    total = torch.zeros((), device=engine.device)
    for k, (inputs, labels) in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(k == STEPS_OF_ACCUMULATION - 1)
        logits = engine(**{{name: tensor.to(engine.device) for name, tensor in inputs.items()}}).logits
        labels = labels.flatten().to(engine.device)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=-100, reduction="sum")
        total += loss.detach()
        engine.backward(loss * world_size / targets, scale_wrt_gas=False)  # DeepSpeed averages over the ranks
    engine.step()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {{step + 1}}/{{asked.steps}}  loss {{total.item() / targets.item():.6f}}", flush=True)

engine.save_checkpoint("checkpoint")
dist.destroy_process_group()
'''


_NAMES: dict[Target, str] = {
    "hf": "transformers' Trainer",
    "accelerate": "Accelerate",
    "script": "a plain DeepSpeed script",
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for another trainer: files by name, that of the trainer first, and the command that starts it."""

    files: dict[str, str]
    start: str


def export(plan: Plan, target: Target, *, folder: str = "", make_model: str = "") -> Export:
    """The plan for `target`. Its files are to lie in `folder`; `make_model` is Python that makes the script's model.

    Raises:
        RequestError: the target cannot do what the plan says.
    """
    check(plan, target)
    start = start_command(plan, target, folder)
    if target == "hf":
        text = hf(plan, start)
    elif target == "accelerate":
        text = accelerate(plan, start, folder)
    else:
        text = script(plan, start, make_model)
    config = json.dumps(deepspeed_config(plan), indent=2) + "\n"
    return Export(files={FILES[target]: text, DEEPSPEED_FILE: config}, start=start)


def check(plan: Plan, target: Target) -> None:
    """Refuse what `target` cannot do, or could only do in more memory than the plan has.

    Raises:
        RequestError: with the nearest thing that it can do.
    """
    who, strategy, batch = _NAMES[target], plan.strategy, plan.batch
    if plan.model.task == "own" and target != "accelerate":
        raise RequestError(
            f"{who} cannot train {plan.request.model}",
            because="its loss is Python of its own",
            hint="--to accelerate exports all but the loss; `frugal train` and `frugal.initialize` train it",
        )
    if plan.request.pack:
        raise RequestError(
            f"{who} cannot keep packed documents apart as planned",
            because="frugal packs them itself, and the plan counts the attention mask that this takes",
            hint="plan without --pack",
        )
    if batch.global_tokens is not None:
        raise RequestError(
            f"{who} cannot fill a global batch of {batch.global_tokens} tokens",
            because="it counts samples, and short ones would leave the batch too small",
            hint=f"plan with --global-batch {batch.global_batch} instead of --global-tokens",
        )
    if strategy.loss == "tiled":
        told = next((reason for reason in plan.why if reason.startswith("the loss is tiled")), None)
        raise RequestError(
            f"{who} does not know frugal's tiled loss",
            because=told or "it holds the logits whole, for which the plan may have no memory",
            hint="plan with --loss plain",
        )
    if strategy.activation_checkpointing not in ("off", "full"):
        raise RequestError(
            f"{who} does not know activation checkpointing {strategy.activation_checkpointing}",
            because="it recomputes whole layers, or nothing",
            hint="plan with --activation-checkpointing full, or off",
        )
    if "optimizer" not in deepspeed_config(plan):
        raise RequestError(
            f"{who} cannot make the optimizer {plan.request.optimizer}",
            because="DeepSpeed does not know it by name, and frugal hands it over ready made",
            hint="plan with --optimizer adamw",
        )
    if target == "accelerate" and len({len(node.devices) for node in plan.cluster.nodes}) > 1:
        raise RequestError(
            "Accelerate starts equally many ranks on each node",
            because=f"the nodes have {', '.join(str(len(node.devices)) for node in plan.cluster.nodes)} GPUs",
            hint="use --to script, which starts with `deepspeed --hostfile`",
        )
    if not (_is_even(plan) if target == "script" else batch.is_uniform):
        raise _uneven(plan, target)


def _is_even(plan: Plan) -> bool:
    """Whether no micro-batch is empty, and those of a micro-step differ by one sample at most: one group of ranks."""
    batch = plan.batch
    return len(batch.groups) == 1 and all(sum(steps.samples) >= batch.world_size for steps in batch.micro_steps)


def _uneven(plan: Plan, target: Target) -> RequestError:
    batch = plan.batch
    kind = "ranks" if plan.cluster.devices[0].kind == "cpu" else "GPUs"
    world, groups = batch.world_size, batch.groups.values()
    dealt = [pair for steps in batch.micro_steps for pair in zip(steps.samples, groups, strict=True)]
    sizes = sorted({size for samples, ranks in dealt for size in (samples // ranks, -(-samples // ranks))})
    equation = f"{kind} x micro-batch x accumulation steps"
    ways = []
    for near, micro in nearest(batch.global_batch, world, min(batch.micro_batch)):
        other = f"--global-batch {near} " if near != batch.global_batch else ""
        ways.append(f"{other}--micro-batch {micro} ({world} x {micro} x {near // (world * micro)})")
    also = "; or use --to script, which can" if target != "script" and _is_even(plan) else ""
    return RequestError(
        f"{_NAMES[target]} cannot cut {batch.global_batch} samples as planned for {world} {kind}",
        because=[
            f"it trains {equation}, all micro-batches of one size"
            if target != "script"
            else "it cuts each micro-step evenly, and leaves no rank without samples",
            f"the plan's micro-batches have {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} samples",
        ],
        hint=f"plan with {', or '.join(ways)}{also}",
    )


def nearest(global_batch: int, world_size: int, cap: int) -> list[tuple[int, int]]:
    """The batches next to `global_batch` that divide, each with its micro-batch: the same, or one below and one above.

    k samples a rank divide into k / m steps of m samples, where m divides k and is at most `cap`. With m = 1 any k
    does, but slowly; only those count with more than half of the cap, or with a single step. Every multiple of the
    cap does, so there is always one above.
    """

    def micro(samples: int) -> int | None:
        largest = next(size for size in range(min(cap, samples), 0, -1) if samples % size == 0)
        return largest if largest == samples or 2 * largest > cap else None

    share, rest = divmod(global_batch, world_size)
    if not rest and (size := micro(share)):
        return [(global_batch, size)]
    below = ((k, size) for k in range(share, 0, -1) if (size := micro(k)))
    above = ((k, size) for k in range(share + 1, share + cap + 1) if (size := micro(k)))
    found = [pair for pair in (next(below, None), next(above, None)) if pair is not None]
    return sorted(
        ((k * world_size, size) for k, size in found), key=lambda pair: (abs(pair[0] - global_batch), -pair[0])
    )
