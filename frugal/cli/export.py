"""`frugal export`."""

from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import click

from frugal.cli.options import planned, read_plan
from frugal.deepspeed_adapter.export import AUTO_CLASSES, Target, check, evened, export, needs_even
from frugal.deepspeed_adapter.json_config import write_files
from frugal.distributed.env import silence_libraries
from frugal.dryrun.cache import presets
from frugal.errors import RequestError, refuse
from frugal.planning.plan import Plan

_WEIGHTS = ("*.safetensors*", "pytorch_model*.bin*")
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


@click.command("export")
@click.argument("path", metavar="RUN|PLAN", type=click.Path(path_type=Path))
@click.option(
    "--to", "target", type=click.Choice(["model", *get_args(Target)]), default="model", show_default=True,
    help="A model folder, transformers' Trainer (hf), Accelerate, or a plain DeepSpeed script.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--step", "which", metavar="N", help="Checkpoint of the run: `last`, `best` or a step.  [default: last]")
@click.option("--merge", is_flag=True, help="Merge adapters into the base model.")
def command(
    path: Path, target: Literal["model", "hf", "accelerate", "script"], output: Path | None, which: str | None,
    merge: bool,
) -> None:  # fmt: skip
    """Export a model from a run, or a plan to another trainer.

    RUN is a run's folder, or one of its checkpoints, whichever ranks wrote it. It becomes a model folder for
    `from_pretrained`, or, with adapters and without --merge, for `PeftModel.from_pretrained`. This runs on the CPU, in
    the memory of the model alone.

    PLAN is a plan.json or its folder. A target that needs equal micro-batches gets a plan of these. What else it cannot
    do as planned is an error that names what it can. Without -o the file is printed.
    """
    if target == "model":
        if output is None:
            raise RequestError(
                "there is no folder for the model",
                hint="add -o DIR; a plan is exported with --to hf, accelerate or script",
            )
        silence_libraries()
        from frugal.engine import model_folder  # torch takes seconds

        kind = model_folder.write(model_folder.find(path, which), output, merge=merge)
        click.echo(f"wrote {output}: {kind}")
        return
    refuse((which is not None or merge, "--step and --merge are for --to model", "", "leave them out"))
    plan = _as_cut(read_plan(path), target)
    if target != "hf" and plan.cluster.world_size == 1 and plan.cluster.devices[0].kind == "cuda":
        click.echo(
            "note: NCCL, which DeepSpeed starts and frugal leaves out on one GPU, takes 0.2 to 0.9 GiB that the plan "
            "does not count",
            err=True,
        )
    make_model = _make_model(plan) if target == "script" else ""
    decoder_inputs = ""
    if plan.model.task == "seq2seq" and target != "accelerate":
        from frugal.models.losses.decoder_inputs import source  # torch takes a second

        decoder_inputs = source()
    exported = export(
        plan, target, folder=str(output or ""), make_model=make_model, decoder_inputs=decoder_inputs
    )  # fmt: skip
    if output is None:
        click.echo(next(iter(exported.files.values())), nl=False)
        click.echo(f"it reads {list(exported.files)[1]} beside it: -o DIR writes both", err=True)
    else:
        for name, text in exported.files.items():
            there = output / name
            if there.is_file() and there.read_bytes() != text.encode():
                raise RequestError(
                    f"{there} is there already, and differs",
                    because="it may have been edited, or be another plan's",
                    hint="move it away, or choose another folder with -o",
                )
        written = write_files(output, {name: text.encode() for name, text in exported.files.items()})
        click.echo(f"wrote {' and '.join(map(str, written))}\n\nstart it with\n  {exported.start}")


def _as_cut(plan: Plan, target: Target) -> Plan:
    """Return the plan, or, with a note, one of equal micro-batches for a target that needs these.

    Raises:
        RequestError: the target cannot do what the plan says, or no equal micro-batches make its global batch.
    """
    if not needs_even(plan, target):
        return plan
    check(plan, target)
    even = planned(evened(plan.request, plan.strategy), plan.cluster, plan.defaults)
    change = 100 * (even.time.total_seconds / plan.time.total_seconds - 1)
    slower = f", {change:.0f} % slower" if change >= 1 else ""
    click.echo(
        f"note: equal micro-batches, which --to {target} needs: {even.arithmetic} instead of {plan.arithmetic}{slower}",
        err=True,
    )
    return even


def _make_model(plan: Plan) -> str:
    """Return Python that makes the plan's model as frugal does."""
    from transformers import CONFIG_MAPPING  # takes a second

    reference = plan.request.model
    auto = AUTO_CLASSES.get(plan.model.task)
    path = Path(reference).expanduser()
    dtype = f"dtype={_DTYPES[plan.request.precision]}"
    if ":" in reference and not path.exists():
        return (
            f"factory = resolve({reference!r}, {plan.request.task!r})\n"
            f"model, objective = factory.build({dtype}), factory.objective()"
        )
    if reference in presets():
        preset: dict[str, Any] = presets()[reference]
        values = ", ".join(f"{name}={value!r}" for name, value in preset["config"].items())
        config = f'AutoConfig.for_model("{preset["type"]}", {values}, use_cache=False)'
    elif path.is_file() or (path.is_dir() and not any(chain.from_iterable(map(path.glob, _WEIGHTS)))):
        config = f'AutoConfig.from_pretrained("{path}", use_cache=False)'
    elif not path.exists() and reference in CONFIG_MAPPING:
        config = f'AutoConfig.for_model("{reference}", use_cache=False)'
    else:
        name = path if path.exists() else reference
        return f'model = {auto}.from_pretrained("{name}", {dtype}, use_cache=False).train()'
    return f"config = {config}\nmodel = {auto}.from_config(config, {dtype}).train()"
