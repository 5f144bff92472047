"""Runs without DeepSpeed, as far as one of frugal's dry runs matches them.

    fp32        torch's optimizer on every GPU equals stage 0; DDP's buckets, of the gradients' size, are taken to be
                the copy of all gradients that stage 0 makes to average them
    adapters    the frozen base decides: evaluated on one GPU under stage 2, as every GPU holds all of it under DDP

Mixed precision over fp32 weights (autocast) is neither: it is refused.
"""

from dataclasses import replace

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan
from frugal.planning.model_facts import ModelFacts
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import with_gpus
from frugal.tools.check.batch import Arithmetic
from frugal.tools.check.settings import Settings
from frugal.tools.check.verdict import Subject

AUTOCAST = (
    "mixed precision without DeepSpeed keeps fp32 weights under autocast: `frugal dryrun SCRIPT.py:step` measures "
    "such a loop"
)


def refuse_autocast(settings: Settings) -> None:
    """Note why memory cannot be checked, if it cannot."""
    if settings.sequence_parallel > 1:
        settings.refuse(
            "samples that GPUs share are checked under DeepSpeed alone", settings.place("sequence_parallel")
        )
    if settings.lora is None and settings.precision != "fp32":
        settings.refuse(f"it does not use DeepSpeed, and {AUTOCAST}", settings.place("precision"))


def subject_of(
    settings: Settings, arithmetic: Arithmetic, request: Request, cluster: Cluster, facts: ModelFacts
) -> Subject:
    """Return the nearest subject that frugal can dry-run. Differences are noted in `settings`."""
    strategy = Strategy(
        zero_stage=0 if request.precision == "fp32" else 2,
        activation_checkpointing="full" if settings.activation_checkpointing and facts.can_recompute else "off",
        loss="tiled" if settings.tiled_loss and facts.can_tile else "plain",
        mlp="tiled" if settings.tiled_mlp else "plain",
        reduce_bucket_elements=max(2, facts.trainable_parameters + facts.trainable_parameters % 2),
        expandable_segments=bool(settings.expandable_segments),
    )
    if request.precision == "fp32":
        if arithmetic.world_size > 1:
            settings.deviate("without DeepSpeed: DDP is evaluated as stage 0, which averages all gradients at once")
        return Subject(request=request, cluster=cluster, strategy=strategy, batch=arithmetic.planned)
    settings.deviate(
        "without DeepSpeed: adapters are evaluated under ZeRO-2 on one GPU, with 18 bytes for each of their parameters "
        "instead of 16 to 20; the inputs that peft copies for adapters in fp32 are not counted"
    )
    alone = BatchPlan.of(arithmetic.micro_batch * arithmetic.accumulation_steps, (arithmetic.micro_batch,))
    one = with_gpus(replace(cluster, nodes=cluster.nodes[:1]), 1)
    return Subject(request=request, cluster=one, strategy=strategy, batch=alone)
