"""Dry runs of a given plan before its ranks start: with other versions than it was made with, and of its alternatives,
the ways that the run may try in its first steps."""

import logging
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frugal.config.hardware import local_host
from frugal.config.run_settings import RunSettings
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.errors import FrugalError, PlanMismatchError
from frugal.planning.plan import Alternative, Plan
from frugal.planning.search import alternatives
from frugal.units import format_bytes

if TYPE_CHECKING:
    from frugal.planning.search.candidate import OpenSource
    from frugal.planning.search.search import Search

logger = logging.getLogger("frugal")


def with_alternatives(plan: Plan) -> Plan:
    """Return the plan with the ways that `Engine.tune` may try: another digest, the same decision.

    They are kept in the user's cache, as are the plan's traces; further modes of activation checkpointing are traced.

    Raises:
        FrugalError: the model cannot be built, or not be trained as planned.
    """
    if plan.alternatives or plan.tuned_from:
        return plan
    cache = Cache.of_user()
    key = digest("dry-run alternatives", model_key(plan.request), plan.digest)
    others = cache.read(key, tuple[Alternative, ...])
    if others is None:
        with _search(plan) as (search, open_source):
            others = alternatives.find(search, plan, open_source)
        cache.write(key, others)
    return replace(plan, alternatives=others).sealed() if others else plan


@contextmanager
def _search(plan: Plan) -> Iterator[tuple["Search", "OpenSource"]]:
    """Yield a search for the plan's request, and what opens sources of dry runs for others."""
    from frugal.dryrun.client import DryRunSource, workers  # a tenth of a second that kept ones do not need
    from frugal.planning.search.search import Search

    with closing(workers()) as pool:
        open_source = partial(DryRunSource, pool=pool, will_dry_run=False)
        with open_source(plan.request, plan.cluster) as source:
            yield Search(plan.request, plan.cluster, source), open_source


def proven_here(plan: Plan) -> Plan:
    """Return a plan that was made with other versions with the memory of a dry run with those installed.

    Where the model cannot be dry-run here, a note says so, and the plan stays as it is.

    Raises:
        PlanMismatchError: the plan does not fit with these versions.
    """
    if not (others := local_host.other_versions(plan.all_versions)):
        return plan
    from frugal.planning.search import ragged  # with the search, as `_search` says

    try:
        with _search(plan) as (search, open_source):
            memory = alternatives.dry_run_memory(search, plan, plan, open_source)
            memory = ragged.with_lengths(search, plan.strategy, plan.batch, memory)
    except FrugalError as error:
        logger.warning("note: %s: memory may differ, and no dry run could tell: %s", others, error.what)
        return plan
    found = f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.device_in(plan.cluster).memory_bytes)}"
    if not memory.fits:
        raise PlanMismatchError(
            "the plan does not fit with the versions installed here",
            because=(
                others,
                f"a dry run with these needs {found}, and {format_bytes(plan.memory.total_bytes)} was planned",
            ),
            hint="make a new one with them: frugal plan -o DIR",
        )
    logger.warning("note: %s; a dry run with these needs %s", others, found)
    here = local_host.versions()
    return replace(plan, frugal_version=here.pop("frugal"), versions=here, memory=memory, alternatives=()).sealed()


def for_run(plan: Plan, settings: RunSettings) -> Plan:
    """Return the plan of a run, with alternatives if --tune asks for them or the run may gain by them."""
    if settings.tune is False or not (settings.tune or alternatives.is_worth_it(plan, most_steps(plan, settings))):
        return plan
    try:
        return with_alternatives(plan)
    except (
        FrugalError
    ) as error:  # such as a plan made elsewhere whose model cannot be traced here; the run can do without
        logger.warning("note: no alternatives to the plan were found: %s", error.what)
        return plan


def most_steps(plan: Plan, settings: RunSettings) -> float:
    """Return an upper bound of a run's optimizer steps, before its data is read; infinite if nothing is known.

    A sample of full length takes at least a byte for each token. Compressed data and the hub's are not known.
    """
    if settings.steps is not None:
        return settings.steps
    lengths, paths = plan.request.lengths, [Path(path) for path in settings.data]
    if lengths is not None:
        samples: float = lengths.num_samples
    elif all(path.is_file() and path.suffix in (".txt", ".jsonl", ".json", ".csv") for path in paths):
        samples = sum(path.stat().st_size for path in paths) / plan.request.seq_len
    else:
        return math.inf
    return (settings.epochs or 1) * samples / plan.batch.global_batch + 1
