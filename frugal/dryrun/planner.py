"""From settings to a plan: one that was made before, or a new one."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from frugal.config import plan_arguments
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.calibration import chosen
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.errors import RequestError
from frugal.planning.plan import OnDraft, Plan
from frugal.planning.search import measured_ways
from frugal.planning.search.measured_ways import MeasuredRun

if TYPE_CHECKING:
    from frugal.planning.search.candidate import OpenSource
    from frugal.training.objectives import Objective

logger = logging.getLogger("frugal")

MOST_REPLAYS = 2000
"""Streams whose replays are kept for the next plan of a model, some 200 bytes each; a plan takes about thirty."""


def plan(*, objective: "Objective | None" = None, **settings: Any) -> Plan:
    """The fastest plan that fits. Settings have the names of `frugal plan`'s flags: `plan(model="gpt2", gpus=4,
    mem="12G", global_batch=512, lr=1e-4)`.

    `model` may also be a configuration of transformers, a `torch.nn.Module` (on meta, too: its weights are not read),
    or a class or function that makes one without arguments, wherever it was defined. `objective` says how it is
    trained, where that is not the task of a model of transformers.

    Raises:
        RequestError: a setting is unknown or wrong, or settings contradict each other.
        NothingFitsError: no strategy fits.
    """
    return _plan(objective, **settings)


plan.__signature__ = plan_arguments.signature(plan)  # type: ignore[attr-defined]  # for help() and completion


def _plan(objective: "Objective | None", **settings: Any) -> Plan:
    settings = plan_arguments.in_full(settings)
    model = settings.get("model")
    if objective is not None or not isinstance(model, str | None):
        from frugal.dryrun.model_object import reference_of

        if isinstance(model, str | None):
            raise RequestError(
                "`objective` was given without a model to train with it",
                hint="pass model=, a module or what makes one; a factory that is named returns (module, objective)",
            )
        settings["model"] = reference_of(model, objective)
    calibration, notes = chosen(settings)
    for note in notes:
        logger.warning(note)
    request, cluster, defaults = understand(settings, calibration)
    return make_plan_here(request, cluster, defaults, is_calibrated=settings.get("calibration") is not False)


def make_plan_here(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], on_draft: OnDraft | None = None, *,
    is_calibrated: bool = False,
) -> Plan:  # fmt: skip
    """`make_plan` with what this environment says of torch's allocator; what no plan knows of that is a warning.

    `is_calibrated`: with what runs have measured on this machine, too.
    """
    request = cuda_allocator.planned(request, cluster, os.environ)
    notes = cuda_allocator.notes(request.expandable_segments is not False, cluster, os.environ)
    measured, damaged = measured_ways.known(request, cluster) if is_calibrated else ((), [])
    return make_plan(request, cluster, defaults, warnings=[*notes, *damaged], on_draft=on_draft, measured=measured)


def make_plan(
    request: Request, cluster: Cluster, defaults: tuple[str, ...] = (), *, warnings: Sequence[str] = (),
    dry_run: "OpenSource | None" = None, on_draft: OnDraft | None = None, measured: Sequence[MeasuredRun] = (),
) -> Plan:  # fmt: skip
    """The plan for a request; `defaults` names its fields that nobody set, `dry-run` where profiles come from.

    Plans are kept in the user's cache, except where `dry-run` is given. `warnings` are of this machine, and added.
    `on_draft`: see `frugal.planning.plan.OnDraft`; a plan that is kept is told of by nothing but the result.
    `measured`: see `frugal.planning.planner.decide`.

    Raises: as `plan`.
    """
    if dry_run is not None:
        from frugal.planning.planner import decide

        return decide(request, cluster, defaults, dry_run, on_draft, measured)
    cache = Cache.of_user()
    key = digest("plan", model_key(request), request, cluster, defaults, *measured)
    kept = cache.read(key, Plan)
    if kept is None or kept.digest != kept.compute_digest():
        with replays_known(cache, request):
            kept = _decided(request, cluster, defaults, on_draft, measured)
        cache.write(key, kept)
    return replace(kept, warnings=(*kept.warnings, *warnings)).sealed() if warnings else kept


def _decided(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], on_draft: OnDraft | None,
    measured: Sequence[MeasuredRun],
) -> Plan:  # fmt: skip
    from frugal.dryrun.client import DryRunSource, workers
    from frugal.planning.planner import decide  # a tenth of a second that a kept plan does not need

    with closing(workers()) as pool:
        return decide(request, cluster, defaults, partial(DryRunSource, pool=pool), on_draft, measured)


@contextmanager
def replays_known(cache: Cache, request: Request) -> Iterator[None]:
    """Of the allocator's replays those that plans of the same model have done before, and afterwards also these."""
    from frugal.planning.memory.allocator import KNOWN, Replay

    key = digest("replays", model_key(request))
    KNOWN.update(cache.read(key, dict[str, list[Replay]]) or {})
    before = sum(map(len, KNOWN.values()))
    try:
        yield
    finally:
        if sum(map(len, KNOWN.values())) > before:
            cache.write(key, dict(list(KNOWN.items())[-MOST_REPLAYS:]))


def what_helps(plan: Plan) -> str:
    """The one change that would help a plan most, in words; see `frugal.planning.what_if.most_helpful`.

    Predicted from drafts, which takes some seconds the first time; then it is in the user's cache.
    """
    cache = Cache.of_user()
    key = digest("what helps", model_key(plan.request), plan.digest)
    kept = cache.read(key, str)
    if kept is None:
        from frugal.dryrun.client import DryRunSource, workers
        from frugal.planning.what_if import changes, most_helpful, predicted  # the search takes a while to import

        cases = changes(plan)
        with replays_known(cache, plan.request), closing(workers()) as pool:
            predictions = predicted(cases, partial(DryRunSource, pool=pool, will_dry_run=False))
        kept = most_helpful(plan, cases, predictions)
        cache.write(key, kept)
    return kept
