"""The whole check of a configuration, from files to `Check`."""

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from frugal.config.hardware.calibration import Calibration
from frugal.config.hardware.cluster import GENERIC, Card, Cluster
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError, NothingFitsError, RequestError
from frugal.planning.model_facts import ModelFacts
from frugal.planning.plan import Plan
from frugal.tools.check import traps
from frugal.tools.check.batch import Arithmetic
from frugal.tools.check.changes import Change, smallest
from frugal.tools.check.deepspeed_json import Resolved
from frugal.tools.check.document import Document
from frugal.tools.check.out_of_memory import Asked, OutOfMemoryMessage, askers
from frugal.tools.check.settings import Finding, Settings
from frugal.tools.check.verdict import (
    Subject,
    Verdict,
    readable,
    refuse_autocast,
    refuse_model,
    request_of,
    resolved,
    subject_of,
    verdict_of,
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a check.

    `verdict`: None where memory could not be checked, see `settings.refusals`. `change`: the smallest that fits, None
    if none was searched or none fits. `plan`: frugal's own; if there is none, `no_plan` gives the reason.
    `out_of_memory`: torch's message, and `askers` the dry run's requests of that size.
    `seq_len_is_assumed`: no file and no flag gives the length of samples.
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
    seq_len_is_assumed: bool = False

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
    of_files = {"gpus": settings.gpus, "nodes": settings.nodes}
    described = {name: value for name, value in [*of_files.items(), *hardware.items()] if value is not None}
    precision = {"precision": settings.precision} if settings.precision else {}
    _, cluster, _ = understand(described | precision, calibration, unnamed)
    deepspeed, arithmetic = resolved(settings, cluster.world_size)
    if deepspeed is None:
        refuse_autocast(settings)
    done = Check(
        settings=settings, documents=documents, cluster=cluster, deepspeed=deepspeed, arithmetic=arithmetic,
        findings=traps.traps(settings, deepspeed, arithmetic), seq_len_is_assumed=settings.seq_len is None,
        out_of_memory=message,
    )  # fmt: skip
    if deepspeed is not None and not deepspeed.is_known:
        return done
    with nullcontext(pool) if pool is not None else closing(workers()) as pool:
        try:
            request = request_of(settings, deepspeed, arithmetic)
            with DryRunSource(request, cluster, pool=pool) as source:
                request = readable(request, _facts(source, settings, pool), settings)
        except RequestError as error:
            refuse_model(settings, error)
            return done
        if not settings.refusals:
            done = _evaluated(done, request, pool)
        return _planned(done, request, pool) if with_plan else done


def _facts(source: DryRunSource, settings: Settings, pool: Pool) -> ModelFacts:
    """Return the facts of the model. If GPUs cannot share its samples, note that its memory is not checked."""
    try:
        return source.facts()
    except RequestError as error:
        if settings.sequence_parallel == 1:
            raise
        settings.refuse(": ".join((error.what, *error.because)), settings.place("sequence_parallel"))
    with DryRunSource(replace(source.request, sequence_parallel=None), source.cluster, pool=pool) as whole:
        return whole.facts()


def _verdict(subject: Subject, source: DryRunSource, settings: Settings) -> Verdict:
    """Return the verdict, with whole MLPs where a trial shows that the model cannot take tiled ones."""
    try:
        return verdict_of(subject, source)
    except RequestError as error:
        if subject.strategy.mlp != "tiled":
            raise
        settings.deviate(f"evaluated with whole MLPs: {error.what}", settings.place("tiled_mlp"))
    return verdict_of(replace(subject, strategy=replace(subject.strategy, mlp="plain")), source)


def _evaluated(done: Check, request: Request, pool: Pool) -> Check:
    with DryRunSource(request, done.cluster, pool=pool) as source:
        subject = subject_of(done.settings, done.deepspeed, done.arithmetic, request, done.cluster, source.facts())
    with DryRunSource(request, subject.cluster, pool=pool) as source:
        verdict = _verdict(subject, source, done.settings)
        subject = verdict.subject
        change = None if verdict.fits else smallest(subject, source)
        asked: Sequence[Asked] = ()
        if done.out_of_memory is not None:
            batch = subject.batch
            runs = source.dry_runs(subject.strategy, batch.largest_micro_batch, batch.accumulation_steps)
            asked = askers(done.out_of_memory, runs)
    return replace(done, verdict=verdict, change=change, askers=asked)


def _planned(done: Check, request: Request, pool: Pool) -> Check:
    """Add frugal's own plan for the same model, batch, precision, optimizer and adapters."""
    from frugal.dryrun.planner import make_plan

    try:
        plan = make_plan(
            replace(request, optimizer=replace(request.optimizer, implementation=None), sequence_parallel=None),
            done.cluster,
            dry_run=partial(DryRunSource, pool=pool),
        )
    except FrugalError as error:
        return replace(done, no_plan=str(error))
    return replace(done, plan=plan)
