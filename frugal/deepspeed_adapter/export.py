"""The files that `frugal export` writes: Python for transformers' Trainer, YAML for Accelerate, a DeepSpeed script.

All three take the mean over the targets of the whole global batch, as frugal's engine does: the loss of a micro-batch
is a sum, divided by the batch's targets T and multiplied by the number of ranks W, because DeepSpeed averages over
them. `scale_wrt_gas=False` keeps DeepSpeed from dividing by the accumulation steps too; Trainer and Accelerate pass
that on. Spelling as of transformers 5.23, Accelerate 1.15 and DeepSpeed 0.19.8.

For Trainer it is a few lines that hand the plan itself to `frugal.integrations.transformers`. The others are one file
beside the plan's own `ds_config.json`, which they take unchanged: every batch size and every bucket in it is a number,
so there is nothing for them to fill in. What they cannot do is refused here, instead of changing memory or the
gradient. The texts are templates in `templates/`.
"""

import json
import re
import string
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from frugal.config.hardware import cuda_allocator
from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.errors import refuse
from frugal.planning.plan import Plan
from frugal.planning.report import ADDED_LOSS
from frugal.planning.strategy import Strategy
from frugal.units import plural

Target = Literal["hf", "accelerate", "script"]
FILES: dict[Target, str] = {"hf": "planned_trainer.py", "accelerate": "accelerate.yaml", "script": "train.py"}
DEEPSPEED_FILE = "ds_config.json"
PLAN_FILE = "plan.json"

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}


OWN = "own"
"""The task of a module with a loss of its own."""

_SAMPLES = {
    "causal-lm": '{"input_ids": [token, ...]}, with "labels" where some tokens are not to be learned (-100)',
    "masked-lm": '{"input_ids": [token, ...], "labels": [token or -100, ...]}, masked already',
    "seq2seq": '{"input_ids": [token, ...], "labels": [token, ...]}',
    "sequence-classification": '{"input_ids": [token, ...], "label": class}',
    "own": "a sample as in the example of its objective, lists for tensors",
}
_LOSS = """logits, labels = engine(**inputs).logits, labels.flatten().to(engine.device)
loss = F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=-100, reduction="sum")"""


_NAMES: dict[Target, str] = {
    "hf": "transformers' Trainer",
    "accelerate": "Accelerate",
    "script": "a plain DeepSpeed script",
}
_RECOMPUTE = 'model.activation_checkpointing_enable({"use_reentrant": False})'
_SEGMENTS = "expandable_segments:True"
_JOIN = """# - deepspeed.init_distributed() and accelerate.PartialState(cpu=True) before Accelerator(),
#   which takes each CPU rank for the only one otherwise"""
_SEVERAL_NODES = """deepspeed_multinode_launcher: pdsh
deepspeed_hostfile: hostfile  # a line `NAME slots=GPUS` for each node"""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan for another trainer: files by name, the trainer's first, and the command that starts it."""

    files: dict[str, str]
    start: str


def export(plan: Plan, target: Target, *, folder: str = "", make_model: str = "", decoder_inputs: str = "") -> Export:
    """Return the plan for `target`, with paths of files in `folder`.

    `make_model` is Python that makes the script's model, `decoder_inputs` Python that makes the inputs of decoders
    (`frugal.models.losses.decoder_inputs.source`).

    Raises:
        RequestError: the target cannot follow the plan.
    """
    check(plan, target)
    assert not needs_even(plan, target), "it would be cut otherwise"
    batch, strategy, task, nodes = plan.batch, plan.strategy, plan.model.task, plan.cluster.nodes
    on_cpu, is_script = nodes[0].devices[0].kind == "cpu", target == "script"
    is_segmented = strategy.expandable_segments
    start = _start_command(plan, target, folder)
    recompute = _RECOMPUTE if strategy.activation_checkpointing == "full" else ""
    ranks = plural(batch.world_size, plan.cluster.rank_noun)
    text = _filled(
        FILES[target],
        sum=(
            f"{batch.global_batch} samples = {ranks} x {'' if batch.is_uniform else 'up to '}micro-batch "
            f"{batch.largest_micro_batch} x {plural(batch.accumulation_steps, 'accumulation step')}"
        ),
        origin=f"{strategy}. Written by `frugal export` from plan {plan.digest[:12]}.",
        start=start,
        auto_class=AUTO_CLASSES.get(task, ""),
        import_model="from frugal.models.resolve import resolve"
        if "resolve(" in make_model
        else f"from transformers import AutoConfig, {AUTO_CLASSES.get(task, '')}",
        padding="" if task == OWN else 'PADDING = getattr(model.config, "pad_token_id", None) or 0',
        loss="loss = objective.loss_sum(engine, inputs)" if task == OWN else _LOSS,
        global_batch=batch.global_batch,
        micro_batch=batch.largest_micro_batch,
        accumulation_steps=batch.accumulation_steps,
        deepspeed_file=DEEPSPEED_FILE,
        world_size=batch.world_size,
        recompute=recompute if is_script or not recompute else f"# - {recompute}",
        join_process_group=_JOIN if on_cpu else "",
        config_file=json.dumps(_in(folder, DEEPSPEED_FILE)),
        is_zero3=json.dumps(strategy.zero_stage == 3),
        several_nodes=_SEVERAL_NODES if len(nodes) > 1 else "",
        num_nodes=len(nodes),
        is_cpu=json.dumps(on_cpu),
        pad_token=(
            "model.config.pad_token_id = PADDING  # decoders look for the last token before it"
            if task == "sequence-classification"
            else ""
        ),
        import_sys="import sys" if task == "seq2seq" else "",
        import_os="import os" if is_segmented else "",
        segments=(
            f'os.environ.setdefault("{cuda_allocator.NAME}", "{_SEGMENTS}")  # the plan\'s memory counts on it'
            if is_segmented
            else ""
        ),
        decoder_inputs=f"\n\n{decoder_inputs}\n\ncomplete(model.config)" if task == "seq2seq" else "",
        sample=_SAMPLES.get(task, ""),
        make_model=make_model,
        partition=_template("train_partition.py") if strategy.zero_stage == 3 else "",
        collate=_template(f"collate_{task}.py") if is_script else "",
    )
    if target == "hf":
        return Export(files={FILES[target]: text, PLAN_FILE: plan.to_json().decode()}, start=start)
    config = json.dumps(deepspeed_config(plan), indent=2) + "\n"
    return Export(files={FILES[target]: text, DEEPSPEED_FILE: config}, start=start)


def _start_command(plan: Plan, target: Target, folder: str) -> str:
    environment = "DS_ACCELERATOR=cpu " if plan.cluster.devices[0].kind == "cpu" else ""
    program = f"{_in(folder, FILES['script'])} samples.jsonl" if target == "script" else "YOUR_SCRIPT.py"
    if target == "accelerate":
        if plan.strategy.expandable_segments:
            environment += f"{cuda_allocator.NAME}={_SEGMENTS} "
        return f"{environment}accelerate launch --config_file {_in(folder, FILES[target])} {program}"
    if len(plan.cluster.nodes) > 1:
        return f"{environment}deepspeed --hostfile HOSTS {program}"
    return f"{environment}torchrun --standalone --nproc-per-node {plan.batch.world_size} {program}"


def _in(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder else name


def _template(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.tmpl").read_text(encoding="utf-8")


def _filled(name: str, **values: object) -> str:
    """Fill a template. A line that is only `$name` becomes the lines of its value, indented; none, if it is empty."""

    def whole_line(line: re.Match[str]) -> str:
        value = str(values[line["name"]]).rstrip().replace("$", "$$")
        return textwrap.indent(value, line["indent"]) + "\n" if value else ""

    text = re.sub(r"^(?P<indent> *)\$(?P<name>\w+)\n", whole_line, _template(name), flags=re.MULTILINE)
    return string.Template(text).substitute({name: str(value) for name, value in values.items()})


def needs_even(plan: Plan, target: Target) -> bool:
    """Return True if `target` needs equal micro-batches, and the plan has others."""
    batch = plan.batch
    if target != "script":
        return target != "hf" and not batch.is_uniform
    # a script leaves no micro-batch empty, and those of a micro-step differ by at most one sample
    return len(batch.groups) > 1 or any(sum(steps.samples) < batch.world_size for steps in batch.micro_steps)


def evened(request: Request, strategy: Strategy) -> Request:
    """Return the request of a plan with equal micro-batches that keeps loss and activation checkpointing."""
    return replace(
        request,
        even=True,
        loss=strategy.loss,
        activation_checkpointing=strategy.activation_checkpointing,
        layer_modes=request.layer_modes if strategy.layer_modes else None,
    )


def check(plan: Plan, target: Target) -> None:
    """Refuse what `target` cannot do, or could only do in more memory than the plan has.

    How the global batch is cut into micro-batches is for `needs_even`.

    Raises:
        RequestError: with the nearest thing that it can do.
    """
    who, request, strategy, batch = _NAMES[target], plan.request, plan.strategy, plan.batch
    added_loss = next((warning for warning in plan.warnings if ADDED_LOSS in warning), "")
    refuse(
        (
            plan.model.task == OWN and target == "hf",
            f"{who} cannot train {request.model}",
            "its loss is Python of its own",
            "--to script exports it, --to accelerate all but the loss; `frugal train` and `frugal.initialize` train it",
        ),
        (
            added_loss and target != "accelerate",
            f"{who} would leave out the loss that the model adds to the cross entropy",
            added_loss,
            "train it with `frugal train`, or without output_router_logits in its config.json",
        ),
        (
            not request.decays_all,
            f"{who} does not know which parameters decay",
            "the plan has optimizer.decay-norms = false, which frugal does itself when it trains",
            "plan without optimizer.decay-norms",
        ),
        (
            "optimizer" not in deepspeed_config(plan),
            f"{who} cannot make the optimizer {request.optimizer.name}",
            "DeepSpeed does not know it by name, and frugal hands it over ready made",
            "plan with --optimizer adamw",
        ),
        (
            strategy.sequence_parallel > 1,
            f"{who} cannot split samples over {strategy.sequence_parallel} ranks as planned",
            "frugal's engine makes the parts and exchanges them in attention",
            "train it with `frugal train`, or plan with --sequence-parallel 1",
        ),
        (
            request.pack and target != "hf",
            f"{who} cannot keep packed documents apart as planned",
            "frugal packs them itself, and the plan counts the attention mask that this takes",
            "use --to hf, which can, or plan without --pack",
        ),
        (
            batch.global_tokens is not None,
            f"{who} cannot fill a global batch of {batch.global_tokens} tokens",
            "it counts samples, and short ones would leave the batch too small",
            f"plan with --global-batch {batch.global_batch} instead of --global-tokens",
        ),
        (
            request.quantize is not None,
            f"{who} is not exported to with quantised weights",
            f"the plan has --quantize {request.quantize}, which frugal does while it reads the model",
            "train it with `frugal train --plan DIR`, or export a plan without --quantize",
        ),
    )
    if target == "hf":  # frugal.integrations.transformers does the rest
        return
    why_tiled = next((reason for reason in plan.why if reason.startswith("the loss is tiled")), None)
    sizes = [len(node.devices) for node in plan.cluster.nodes]
    refuse(
        (
            request.lora is not None,
            f"{who} is not exported to with adapters",
            f"the plan has --lora {request.lora}, which frugal adds to the model when it trains",
            "train it with `frugal train --plan DIR`, or export a plan without --lora",
        ),
        (
            request.batch_norm not in (None, "local"),
            f"{who} takes BatchNorm as it is",
            f"the plan has --batch-norm {request.batch_norm}, which frugal does when it trains",
            "plan without --batch-norm",
        ),
        (
            strategy.loss == "tiled",
            f"{who} does not know frugal's tiled loss",
            why_tiled or "it holds the logits whole, for which the plan may have no memory",
            "plan with --loss plain",
        ),
        (
            strategy.mlp == "tiled",
            f"{who} does not know frugal's tiled MLP",
            "it runs MLPs whole, for which the plan may have no memory",
            "plan with --mlp plain",
        ),
        (
            strategy.kernels == "liger",
            f"{who} does not run Liger's kernels as frugal does",
            "without them activations take more, for which the plan may have no memory",
            "plan with --kernels plain",
        ),
        (
            target == "accelerate" and len(set(sizes)) > 1,
            "Accelerate starts equally many ranks on each node",
            f"the nodes have {', '.join(map(str, sizes))} GPUs",
            "use --to script, which starts with `deepspeed --hostfile`",
        ),
        (
            strategy.activation_checkpointing not in ("off", "full"),
            f"{who} does not know activation checkpointing {strategy.checkpointing}",
            "it recomputes whole layers, or nothing",
            "plan with --activation-checkpointing full, or off",
        ),
    )
