"""The whole check of a configuration, from files to `Check`.

Runs without DeepSpeed are dry runs of transformers' Trainer (`without_deepspeed`), but for adapters of a base in half
precision or 4 bits. There the frozen base decides, and GPUs are alike: they are evaluated on one, under stage 2.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import GENERIC, Card, Cluster, resized
from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.distributed.env import silence_libraries
from frugal.dryrun.cache import presets
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError, NothingFitsError, RequestError, refuse
from frugal.planning.batch import BatchPlan
from frugal.planning.model_facts import ModelFacts
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy
from frugal.planning.what_if import with_gpus
from frugal.tools.check import deepspeed_json, traps
from frugal.tools.check.deepspeed_json import UNKNOWN, Arithmetic, Resolved, arithmetic_of
from frugal.tools.check.document import Document, Finding, Settings
from frugal.tools.check.out_of_memory import Asked, OutOfMemoryMessage, askers
from frugal.tools.check.tools import PEFTS_OWN
from frugal.tools.check.verdict import Change, Subject, Verdict, smallest, verdict_of
from frugal.tools.check.without_deepspeed import TrainerSource, weights_of


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check.

    `verdict`: None where memory could not be checked, see `settings.refusals`. `change`: the smallest that fits, None
    if none was searched or none fits. `plan`: frugal's own; if there is none, `no_plan` gives the reason.
    `out_of_memory`: torch's message, and `askers` the dry run's requests of that size.
    """

    settings: Settings
    documents: Sequence[Document]
    cluster: Cluster
    deepspeed: Resolved | None
    arithmetic: Arithmetic
    findings: Sequence[Finding]
    verdict: Verdict | None = None
    change: Change | None = None
    plan: Plan | None = None
    no_plan: str = ""
    out_of_memory: OutOfMemoryMessage | None = None
    askers: Sequence[Asked] = ()

    @property
    def exit_code(self) -> int:
        """Return 0 if the run fits, 3 if it does not, 2 if it does not start or could not be checked."""
        if self.verdict is None or any(finding.rule in STOPS for finding in self.findings):
            return RequestError.exit_code
        return 0 if self.verdict.fits else NothingFitsError.exit_code


STOPS = ("batch-mismatch", "trainer-mismatch", "removed-block")
"""Rules whose findings keep a run from starting."""


def check(
    settings: Settings,
    documents: Sequence[Document],
    hardware: Mapping[str, Any],
    *,
    calibration: Calibration | None = None,
    unnamed: Card = GENERIC,
    with_plan: bool = True,
    message: OutOfMemoryMessage | None = None,
    pool: Pool | None = None,
) -> Check:
    """Check the settings from `gather` on the GPUs that `hardware` describes with the flags of `frugal plan`.

    `message`: torch's message that such a run was out of memory. `pool`: workers to share with others, left running at
    the end.

    Raises:
        RequestError: the files and flags are incomplete or contradict each other.
    """
    of_files = {"gpus": settings.gpus, "nodes": settings.nodes, "precision": settings.precision}
    described = {name: value for name, value in [*of_files.items(), *hardware.items()] if value is not None}
    _, cluster, _ = understand(described, calibration, unnamed)
    silence_libraries()  # which takes a second: not before it is known on which hardware
    deepspeed, arithmetic = resolved(settings, cluster.world_size)
    if deepspeed is not None and cluster.world_size == 1:  # NCCL, which other tools start for one GPU, too
        device = resized(cluster.devices[0], memory_bytes=cluster.devices[0].memory_bytes, num_ranks=(1, 2))
        cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=(device,)),))
    of_trainer = (
        (
            settings.sequence_parallel > 1,
            "samples that GPUs share are checked under DeepSpeed alone",
            "sequence_parallel",
        ),
        (
            weights_of(settings) is None,
            "it does not use DeepSpeed, and no field says in which type its script loads the weights that run under "
            "autocast: add `dtype: bfloat16`, or float32",
            "bf16",
        ),
        (
            settings.quantize == "nf4" and weights_of(settings) != settings.precision,
            "fp32 weights beside a base in 4 bits, without DeepSpeed (`dtype: bfloat16` is evaluated)",
            "dtype",
        ),
    )
    for applies, why, name in of_trainer:
        if applies and deepspeed is None and not settings.refusals:
            settings.refuse(why, settings.place(name))
    done = Check(
        settings=settings, documents=documents, cluster=cluster, deepspeed=deepspeed, arithmetic=arithmetic,
        findings=traps.traps(settings, deepspeed, arithmetic), out_of_memory=message,
    )  # fmt: skip
    has_no_sizes = deepspeed is not None and any(each.value == UNKNOWN for each in deepspeed.filled)
    if has_no_sizes or (settings.refusals and not with_plan):  # what the model adds to these takes seconds
        return done
    with nullcontext(pool) if pool is not None else closing(workers()) as pool:
        try:
            request = request_of(settings, deepspeed, arithmetic)
            with DryRunSource(request, cluster, pool=pool) as source:
                request = _readable(request, source.facts(), settings)
            if not settings.refusals:
                done = _evaluated(done, request, pool)
        except RequestError as error:
            _refuse_model(settings, error)
            return done
        return _planned(done, request, pool) if with_plan else done


def resolved(settings: Settings, world_size: int) -> tuple[Resolved | None, Arithmetic]:
    """Return DeepSpeed's JSON without `auto`, and the batch.

    Raises:
        RequestError: it cannot be resolved; see `frugal.tools.check.deepspeed_json.resolve`.
    """
    deepspeed, shared_by = None, settings.sequence_parallel
    refuse(
        (
            world_size % shared_by,
            f"{shared_by} GPUs cannot share samples on {world_size} GPUs",
            f"{settings.place('sequence_parallel', 'tensor', 'pipeline', 'context')} names {shared_by}, and "
            f"{world_size} is no multiple of it",
            f"check on {shared_by * max(1, world_size // shared_by)}, for instance with --gpus",
        )
    )
    if settings.deepspeed is not None:
        hidden_size = cache(partial(_hidden_size, settings))
        deepspeed = deepspeed_json.resolve(settings, world_size // shared_by, hidden_size)
    return deepspeed, arithmetic_of(settings, deepspeed, world_size)


def _hidden_size(settings: Settings) -> int | None:
    """Return the model's width, found as transformers' Trainer does; None if it has none, 0 if the model is not at
    hand."""
    try:
        config = _config_of(_model_of(settings), settings.task)
    except RequestError as error:
        _refuse_model(settings, error)
        return 0
    sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or [])]
    return max((size for size in sizes if size is not None), default=None)


def request_of(settings: Settings, deepspeed: Resolved | None, arithmetic: Arithmetic) -> Request:
    """Return the configuration's model, samples, precision and optimizer as a request that leaves the strategy open.

    Raises:
        RequestError: no file and no flag names the model, or frugal has nothing like it.
    """
    model, optimizer, lora = _model_of(settings), settings.optimizer, settings.lora
    if lora is not None and lora.targets == (PEFTS_OWN,):
        lora = replace(lora, targets=_targets_of_peft(model, settings.task))
    half = settings.block("bf16")
    both = [bool(half.get(name)) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")]
    if all(both):
        optimizer = replace(optimizer or Optimizer(), states="bf16")
    elif any(both):
        settings.deviate("states in bf16 are evaluated in fp32: only both kinds together are followed")
    clipping = (settings.deepspeed or {}).get("gradient_clipping")
    if not isinstance(clipping, int | float):
        clipping = settings.gradient_clipping
    values = {
        "model": model,
        "task": settings.task,
        "seq_len": settings.seq_len,
        "global_batch": arithmetic.global_batch,
        "precision": deepspeed.precision if deepspeed is not None else settings.precision,
        "optimizer": optimizer,
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "gradient_clipping": 1.0 if clipping is None else float(clipping),
        "lora": lora,
        "quantize": "nf4" if settings.quantize == "nf4" else None,
        "sequence_parallel": settings.sequence_parallel if settings.sequence_parallel > 1 else None,
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if settings.quantize == "int8":
        settings.refuse(
            "the base in int8: columns of activations with an outlier are computed apart, so memory depends on data",
            settings.place("quantize"),
        )
    return Request(**given)


def _model_of(settings: Settings) -> str:
    """Return the model as `--model` takes it: for a hub name the preset with its configuration, which saves a download.

    Raises:
        RequestError: no file and no flag names it.
    """
    if not settings.model or "$" in settings.model:
        raise RequestError(
            f"the model is {settings.model}, known when the script runs"
            if settings.model
            else "no file names the model",
            because="memory depends on the model",
            hint="add --model, a preset such as llama-3.1-8b, a model folder or a config.json",
        )
    page = f"huggingface.co/{settings.model}/blob/"
    return next((name for name, preset in presets().items() if page in preset["source"]), settings.model)


def _config_of(reference: str, task: str | None) -> Any:
    from frugal.models.resolve import resolve  # torch takes seconds

    return resolve(reference, task).config


def _targets_of_peft(reference: str, task: str | None) -> tuple[str, ...]:
    """Return the modules to which peft attaches adapters where none are named.

    Raises:
        RequestError: peft has no such table for this type of model.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    kind = getattr(_config_of(reference, task), "model_type", "")
    refuse(
        (
            kind not in TABLE,
            f"no file says which modules of {reference} get adapters",
            f"peft has no default for {kind or 'it'}",
            "name them, or say --lora r=16,targets=all-linear",
        )
    )
    return tuple(TABLE[kind])


def _refuse_model(settings: Settings, error: RequestError) -> None:
    """Note that the model is not at hand, or is none that can be trained like that."""
    why = ": ".join((error.what, *error.because))
    settings.refuse(f"{why}; {error.hint}" if error.hint else why, settings.place("model"))


def _readable(request: Request, facts: ModelFacts, settings: Settings) -> Request:
    """Return the request with samples that the model can read: a length that was not given is shortened.

    Raises:
        RequestError: a length that was named is too long.
    """
    if facts.max_positions is None or request.seq_len <= facts.max_positions:
        return request
    refuse(
        (
            settings.seq_len is not None,
            f"samples of {request.seq_len} tokens are longer than {request.model} can read",
            f"it has {facts.max_positions} positions",
            f"use --seq-len {facts.max_positions}",
        )
    )
    return replace(request, seq_len=facts.max_positions)


def _evaluated(done: Check, request: Request, pool: Pool) -> Check:
    """Add the verdict, and the smallest change. Raises as `Source.dry_run`."""
    settings = done.settings
    opened: Callable[[Request, Cluster], DryRunSource] = partial(DryRunSource, pool=pool)
    with opened(request, done.cluster) as source:
        subject = _subject_of(done, request, source.facts())
    if done.deepspeed is None and subject.strategy.zero_stage == 0:
        opened = partial(TrainerSource, settings=settings, pool=pool)
    with opened(request, subject.cluster) as source:
        verdict = verdict_of(subject, source)
        change = None if verdict.fits else smallest(subject, source)
        asked: Sequence[Asked] = ()
        if done.out_of_memory is not None:
            batch = subject.batch
            runs = source.dry_runs(subject.strategy, batch.largest_micro_batch, batch.accumulation_steps)
            asked = askers(done.out_of_memory, runs)
    return replace(done, verdict=verdict, change=change, askers=asked)


def _subject_of(done: Check, request: Request, facts: ModelFacts) -> Subject:
    """Return the subject of the dry run. Settings that frugal cannot follow are noted."""
    settings, arithmetic, cluster, micro = done.settings, done.arithmetic, done.cluster, done.arithmetic.micro_batch
    caps = (micro,) * arithmetic.num_takers
    batch = BatchPlan.of(arithmetic.global_batch, caps, sequence_parallel=arithmetic.shared_by)
    if done.deepspeed is not None:
        strategy = deepspeed_json.strategy(settings, done.deepspeed)
    else:
        strategy = Strategy(
            zero_stage=2
            if settings.lora and (settings.quantize or weights_of(settings) == settings.precision != "fp32")
            else 0,
            activation_checkpointing="full" if settings.activation_checkpointing else "off",
            loss="tiled" if settings.tiled_loss else "plain",
            reduce_bucket_elements=max(2, facts.trainable_parameters + facts.trainable_parameters % 2),
            expandable_segments=bool(settings.expandable_segments),
        )
        if strategy.zero_stage == 2:
            settings.deviate(
                "without DeepSpeed: adapters are evaluated under ZeRO-2 on one GPU, with 18 bytes for each of their "
                "parameters instead of 16 to 20; the inputs that peft copies for adapters in fp32 are not counted"
            )
            batch = BatchPlan.of(micro * arithmetic.accumulation_steps, (micro,))
            cluster = with_gpus(replace(cluster, nodes=cluster.nodes[:1]), 1)
        elif arithmetic.world_size > 1:
            settings.deviate("without DeepSpeed: DDP's buckets, of the gradients' size, are counted among activations")
    rows: list[tuple[bool, str, dict[str, Any]]] = [
        (strategy.loss == "tiled" and not facts.can_tile, "with whole logits: this model cannot take the tiled loss",
         {"loss": "plain"}),
        (strategy.activation_checkpointing != "off" and not facts.can_recompute,
         "without activation checkpointing, which this model does not take", {"activation_checkpointing": "off"}),
    ]  # fmt: skip
    for applies, how, change in rows:
        if applies:
            settings.deviate(f"evaluated {how}")
            strategy = replace(strategy, **change)
    if settings.tiled_mlp:
        strategy = replace(strategy, mlp="tiled")
    return Subject(request=request, cluster=cluster, strategy=strategy, batch=batch)


def _planned(done: Check, request: Request, pool: Pool) -> Check:
    """Add frugal's own plan for the same model, batch, precision, optimizer and adapters."""
    from frugal.dryrun.planner import make_plan

    free = replace(request, optimizer=replace(request.optimizer, implementation=None), sequence_parallel=None)
    try:
        return replace(done, plan=make_plan(free, done.cluster, dry_run=partial(DryRunSource, pool=pool)))
    except FrugalError as error:
        return replace(done, no_plan=str(error))
