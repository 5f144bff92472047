"""The flags that describe what to plan for, shared by every command that plans."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from frugal.config import calibration as calibrations
from frugal.config import learning_rate, optimizers, request, schema
from frugal.config.cluster import CARDS, Cluster, DeviceKind, recognise_card
from frugal.config.local_host import held_on_gpus
from frugal.config.request import Request
from frugal.config.schema import NAMES, understand


def _choice(literal: Any) -> click.Choice:
    return click.Choice(get_args(literal))


# No option has a default here: `None` means that neither file nor default has been overruled.
_OPTIONS = (
    click.option("--config", type=click.Path(path_type=Path), help="Settings file.  [default: frugal.toml, if there]"),
    click.option("--gpus", type=int, help="GPUs of one node (with --device cpu: ranks).  [default: those found here]"),
    click.option("--nodes", type=int, help="Nodes, all alike.  [default: 1]"),
    click.option("--mem", metavar="SIZE[,SIZE...]", help="Memory of each GPU, such as 12G; or one size for each."),
    click.option(
        "--hostfile",
        metavar="FILE",
        help="Nodes that differ: `NAME slots=GPUS # mem=12G gpu=CARD host-mem=64G disk=1T`.",
    ),
    click.option(
        "--gpu", metavar="CARD[,CARD...]", help=f"A known card instead of --mem, or one for each: {', '.join(CARDS)}."
    ),
    click.option(
        "--held", metavar="SIZE[,SIZE...]", help="What other processes keep of each GPU.  [default: what they do here]"
    ),
    click.option("--host-mem", metavar="SIZE", help="Memory of a node's host, to check plans against."),
    click.option("--host-disk", metavar="SIZE", help="Free disk of a node, to check --offload nvme against."),
    click.option("--device", type=_choice(DeviceKind), help="What to run on.  [default: cuda]"),
    click.option(
        "--calibration/--no-calibration",
        default=None,
        help="Whether to plan with what `frugal measure --calibrate` found here.  [default: yes, if there is any]",
    ),
    click.option(
        "--model",
        help=f"Preset, config.json, model folder, package.module:factory or hub name.  [default: {Request.model}]",
    ),
    click.option("--task", type=_choice(request.Task), help="What is trained.  [default: what the model is for]"),
    click.option(
        "--global-batch",
        type=int,
        help=f"Samples per optimizer step over all GPUs.  [default: {request.DEFAULT_GLOBAL_BATCH}]",
    ),
    click.option(
        "--global-tokens", type=int, help="Tokens per optimizer step, of pairs the target's; wins over --global-batch."
    ),
    click.option("--seq-len", type=int, help=f"Tokens in the longest sample.  [default: {Request.seq_len}]"),
    click.option(
        "--lengths",
        metavar="FILE",
        help="Plan for samples of these lengths: JSON, tokens of each or `{tokens: samples}`.",
    ),
    click.option(
        "--pack/--no-pack",
        default=None,
        help="Put several documents into one sample of --seq-len tokens; none sees another.  [default: no]",
    ),
    click.option("--max-samples-per-gpu", type=int, help="Cap on the micro-batch, samples."),
    click.option("--max-tokens-per-gpu", type=int, help="Cap on the micro-batch, tokens; of pairs on either side."),
    click.option("--micro-batch", type=int, help="Pin the samples of one GPU in one micro-step."),
    click.option("--accumulation-steps", type=int, help="Pin the micro-steps per optimizer step."),
    click.option("--zero-stage", type=int, help="Pin the ZeRO stage, 0-3."),
    click.option(
        "--activation-checkpointing",
        type=_choice(request.ActivationCheckpointingChoice),
        help=f"[default: {Request.activation_checkpointing}]",
    ),
    click.option("--loss", type=_choice(request.LossChoice), help=f"[default: {Request.loss}]"),
    click.option(
        "--offload",
        type=_choice(request.OffloadChoice),
        help=f"What may live in host memory, or on disk.  [default: {Request.offload}]",
    ),
    click.option("--nvme-path", metavar="DIR", help="Folder on a local disk of each node, to use where memory ends."),
    click.option("--precision", type=_choice(request.Precision), help=f"[default: {Request.precision}]"),
    click.option("--optimizer", type=_choice(optimizers.OptimizerName), help=f"[default: {Request.optimizer}]"),
    click.option(
        "--optimizer-implementation",
        type=_choice(optimizers.OptimizerImplementation),
        help="Whose kernels.  [default: torch's fused ones, if there are any]",
    ),
    click.option("--momentum", type=float, help="Of --optimizer sgd.  [default: none]"),
    click.option("--learning-rate", "--lr", type=float, help=f"[default: {Request.learning_rate}]"),
    click.option(
        "--reference-batch",
        type=int,
        help="The global batch that --learning-rate was found for: samples, or tokens with --global-tokens.",
    ),
    click.option(
        "--lr-rule",
        type=_choice(learning_rate.Rule),
        help="How the rate follows the batch from --reference-batch: linear (for SGD) or sqrt (for Adam).",
    ),
    click.option("--weight-decay", type=float, help=f"[default: {Request.weight_decay}]"),
    click.option(
        "--gradient-clipping",
        type=float,
        help=f"Largest gradient norm; 0: no clipping.  [default: {Request.gradient_clipping}]",
    ),
    click.option(
        "--gradient-accumulation-dtype",
        type=_choice(request.AccumulationDtype),
        help="Of gradients summed over micro-steps; bf16 is smaller and less exact.  [default: fp32]",
    ),
    click.option(
        "--overlap-comm/--no-overlap-comm",
        default=None,
        help="Let gradients travel while backward goes on, for a second bucket.  [default: no]",
    ),
    click.option("--reduce-bucket-elements", type=int, help="Pin DeepSpeed's gradient bucket, elements."),
)


def planning_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the planning flags; pass what it receives to `collect`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def collect(values: Mapping[str, Any], file: schema.TomlFile | None = None) -> tuple[Request, Cluster, tuple[str, ...]]:
    """Request, cluster, and the request's fields left to their defaults, from a command's `values`.

    Flags win over `file` (read from `values["config"]` if not given), the file over defaults. Where neither GPUs nor
    memory are named, this machine's GPUs are taken. A calibration of these devices is used; one that cannot be read
    is told on standard error. Values of other commands' flags are ignored.

    Raises:
        RequestError: the request is wrong.
    """
    if file is None:
        file = schema.read_toml(values.get("config"))
    flags = {name: value for name, value in values.items() if name in NAMES and value is not None}
    settings = file.plan | flags
    is_described = bool({"gpu", "hostfile"} & settings.keys()) or {"gpus", "mem"} <= settings.keys()
    is_described = is_described or "," in str(settings.get("mem", ""))
    gpu_name = None
    if settings.get("device", "cuda") == "cuda" and not is_described:
        here, gpu_name = found_here(settings.get("gpus"))
        if "mem" in settings:  # then it says what there is to take
            here.pop("held", None)
        settings = here | settings
    calibration, notes = calibrations.chosen(settings, gpu_name)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    return understand(settings, calibration)


def found_here(num_gpus: int | None) -> tuple[dict[str, Any], str | None]:
    """The settings that describe `num_gpus` of this machine's GPUs (None: all), and what the driver calls them.

    Nothing where torch sees none; no name where they differ.
    """
    import torch  # takes a second: only where flags leave the question open

    found = torch.cuda.device_count()
    if not found:
        return {}, None
    import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

    held = held_on_gpus()
    cards = [torch.cuda.get_device_properties(i) for i in range(found)]
    settings, name = described(cards, held, num_gpus)
    return settings | {"host_mem": psutil.virtual_memory().total}, name


def described(cards: Sequence[Any], held: Mapping[str, int], num_gpus: int | None) -> tuple[dict[str, Any], str | None]:
    """The settings for `num_gpus` of these cards (None: all), and the name they share, if they do.

    `cards` are what torch tells of them; `held` has the bytes that processes hold of each, by UUID.
    """
    cards = cards[:num_gpus]
    if num_gpus is not None and num_gpus > len(cards):
        cards = [min(cards, key=lambda card: card.total_memory)] * num_gpus  # a plan for a larger machine of this kind
        held = {}
    settings: dict[str, Any] = {"gpus": len(cards), "mem": [card.total_memory for card in cards]}
    known = [recognise_card(card.name, card.total_memory) for card in cards]
    if all(known):
        settings["gpu"] = known[0] if len(set(known)) == 1 else ",".join(map(str, known))
    if held:
        settings["held"] = [held.get(str(card.uuid), 0) for card in cards]
    return settings, cards[0].name if len({card.name for card in cards}) == 1 else None
