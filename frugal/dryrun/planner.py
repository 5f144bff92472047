"""Settings to a plan: one from the cache, or a new one."""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frugal import required
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.calibration import chosen
from frugal.config.hardware.cluster import Cluster
from frugal.config.hardware.local_host import library_versions
from frugal.config.request import Request
from frugal.config.run_settings import SAMPLE_NAMES, RunSettings
from frugal.config.schema import in_full, signature, understand
from frugal.config.setting import build
from frugal.dryrun.cache import Cache, digest, model_key, presets
from frugal.errors import RequestError, logger
from frugal.planning.plan import Plan

if TYPE_CHECKING:
    from frugal.models.objectives import Objective
    from frugal.planning.search.candidate import OpenSource


def plan(*, objective: "Objective | None" = None, draft: bool = False, **settings: Any) -> Plan:
    """Return the fastest plan that fits. Settings have the names of `frugal plan`'s flags: `plan(model="gpt2", gpus=4,
    mem="12G", global_batch=512, lr=1e-4)`.

    `model` may also be a configuration of transformers, a `torch.nn.Module` (on meta, too: its weights are not read),
    or a class or function that makes one without arguments, wherever it was defined. `objective` says how it is
    trained, where that is not the task of a model of transformers. `draft` does not wait for the dry run that proves
    the plan: its memory is then what arithmetic says, and `Plan.is_draft` is True unless a proven plan was kept.
    `data` and what says how it is read (`columns`, `format`, `tokenizer`, `validation_data`, ...) are those of
    `frugal train`: the plan is then for samples of these lengths.

    Raises:
        RequestError: a setting is unknown or wrong, settings contradict each other, or the data cannot be used.
        NothingFitsError: no strategy fits.
    """
    settings = in_full(settings)
    samples = {name: settings.pop(name) for name in SAMPLE_NAMES if name in settings}
    model = settings.get("model")
    if objective is not None or not isinstance(model, str | None):
        from frugal.dryrun.model_object import reference_of

        if isinstance(model, str | None):
            raise RequestError(
                "`objective` was given without a model to train with it",
                hint="pass model=, a module or a function that makes one; a named factory returns (module, objective)",
            )
        settings["model"] = reference_of(model, objective)
    calibration, notes = chosen(settings)
    for note in notes:
        logger.warning(note)
    request, cluster, defaults = understand(settings, calibration)
    with closing(
        plans_here(with_lengths(request, samples, defaults), cluster, defaults, will_dry_run=not draft)
    ) as made:
        return next(made) if draft else list(made)[-1]


plan.__signature__ = signature(plan)  # type: ignore[attr-defined]  # for help() and completion


def with_lengths(request: Request, samples: Mapping[str, Any], defaults: Sequence[str]) -> Request:
    """Return the request with the lengths of the training samples, if the settings of `samples` name the data.

    A maximum of tokens that is one of the `defaults` becomes that of the data, where these are much shorter. Lengths
    that the request has win over data that the file names; --too-long holds for both.

    Raises:
        RequestError: the data cannot be used, or has samples that are too long.
    """
    asked = build(RunSettings, samples)
    if request.lengths is not None and "too_long" in samples:
        return replace(request, lengths=replace(request.lengths, too_long=asked.too_long))
    if request.lengths is not None or not asked.data:
        return request
    from frugal.distributed.env import silence_libraries

    silence_libraries()
    from frugal.data import corpus  # DeepSpeed, which prints when it is imported, and torch: they take seconds

    lengths, seq_len, document_tokens = corpus.lengths_of(request, asked, defaults)
    return replace(request, lengths=lengths, seq_len=seq_len, document_tokens=document_tokens)


def plans_here(
    request: Request, cluster: Cluster, defaults: tuple[str, ...], *, will_dry_run: bool = True
) -> Generator[Plan]:
    """Yield drafts and last the plan, with this environment's settings of torch's allocator; warnings about them, and
    about versions that were not tested. `will_dry_run`: whether more than the first is wanted."""
    if "/" not in request.model and Path(request.model, "config.json").is_file():
        from transformers import CONFIG_MAPPING  # torch and more

        if request.model in presets() or request.model in CONFIG_MAPPING:
            logger.warning("--model %s is not the folder %s here, which is --model ./%s", *[request.model] * 3)
    request = cuda_allocator.planned(request, cluster, os.environ)
    notes = (
        *cuda_allocator.notes(request.expandable_segments is not False, cluster, os.environ),
        *required.untested(library_versions()),
    )
    for made in _plans(request, cluster, defaults, will_dry_run=will_dry_run):
        yield replace(made, warnings=(*made.warnings, *notes)).sealed() if notes else made


def make_plan(
    request: Request,
    cluster: Cluster,
    defaults: tuple[str, ...] = (),
    *,
    dry_run: "OpenSource | None" = None,
) -> Plan:
    """Return the plan for a request; `defaults` names its fields that the user did not set.

    `dry_run`: where profiles come from; the plan is then not cached.

    Raises: as `plan`.
    """
    return list(_plans(request, cluster, defaults, dry_run))[-1]


def _plans(
    request: Request,
    cluster: Cluster,
    defaults: tuple[str, ...],
    dry_run: "OpenSource | None" = None,
    *,
    will_dry_run: bool = True,
) -> Iterator[Plan]:
    """Yield drafts and last the plan: the one in the user's cache, or a new one."""
    cache = Cache.of_user() if dry_run is None else Cache(None)
    key = digest("plan", model_key(request), request, cluster, defaults)
    made = cache.read(key, Plan)
    if made is not None and made.digest == made.compute_digest():
        yield made
        return
    from frugal.dryrun.client import DryRunSource, workers
    from frugal.planning.planner import decide  # a tenth of a second that a cached plan does not need

    with closing(workers()) as pool:
        dry_run = dry_run or partial(DryRunSource, pool=pool, will_dry_run=will_dry_run)
        for made in decide(request, cluster, defaults, dry_run):
            if not made.is_draft:
                cache.write(key, made)
            yield made


def what_helps(plan: Plan) -> str:
    """Return the one change that would help a plan most, in words; see `frugal.planning.what_if.what_helps_most`.

    Predicted from drafts, which takes some seconds the first time; then it is in the user's cache.
    """

    def predict() -> str:
        from frugal.dryrun.client import DryRunSource, workers
        from frugal.planning.what_if import what_helps_most  # the search takes a while to import

        with closing(workers()) as pool:
            return what_helps_most(plan, partial(DryRunSource, pool=pool, will_dry_run=False))

    return Cache.of_user().read_or_make(digest("what helps", model_key(plan.request), plan.digest), str, predict)
