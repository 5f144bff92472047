"""A plan's alternatives, found before its ranks start: what they may try in their first steps."""

import logging
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frugal.config.run_settings import RunSettings
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.errors import FrugalError
from frugal.planning.plan import Alternative, Plan
from frugal.planning.search import alternatives
from frugal.planning.search.alternatives import is_worth_it, other_engine_may_pay
from frugal.planning.search.candidate import OpenSource

if TYPE_CHECKING:
    from frugal.planning.search.search import Search

logger = logging.getLogger("frugal")
_Find = Callable[["Search", Plan, OpenSource], tuple[Alternative, ...]]


def with_alternatives(plan: Plan) -> Plan:
    """The plan with what a run may try in its first steps, for `Engine.tune`; another digest, the same decision.

    What was traced for the plan is in the user's cache; ways to recompute that it did not need are traced now.

    Raises:
        FrugalError: the model cannot be built, or not be trained as planned.
    """
    if plan.alternatives or plan.tuned_from:
        return plan
    return _with(plan, _kept(plan, "dry-run alternatives", alternatives.find))


def _with(plan: Plan, others: tuple[Alternative, ...]) -> Plan:
    return replace(plan, alternatives=others).sealed() if others else plan


def _kept(plan: Plan, name: str, find: _Find) -> tuple[Alternative, ...]:
    """What `find` finds for a plan, once for a user."""
    cache = Cache.of_user()
    key = digest(name, model_key(plan.request), plan.digest)
    kept = cache.read(key, tuple[Alternative, ...])
    if kept is None:
        kept = _found(plan, find)
        cache.write(key, kept)
    return kept


def _found(plan: Plan, find: _Find) -> tuple[Alternative, ...]:
    from frugal.dryrun.client import DryRunSource, workers  # a tenth of a second that kept alternatives do not need
    from frugal.planning.search.search import Search

    with closing(workers()) as pool:
        open_source = partial(DryRunSource, pool=pool, will_dry_run=False)
        with open_source(plan.request, plan.cluster) as source:
            return find(Search(plan.request, plan.cluster, source), plan, open_source)


def for_run(plan: Plan, settings: RunSettings) -> Plan:
    """The plan of a run, with alternatives where they are asked for or may pay."""
    steps = most_steps(plan, settings)
    if settings.tune is False or not (settings.tune or is_worth_it(plan, steps)):
        return plan
    if plan.alternatives or plan.tuned_from:
        return plan
    try:
        others = with_alternatives(plan).alternatives
        if other_engine_may_pay(plan, steps):
            others += _kept(plan, "dry-run alternative of another engine", alternatives.find_of_other_engine)
        return _with(plan, others)
    except FrugalError as error:  # such as a plan of elsewhere whose model gives no trace here; the run needs none
        logger.warning("note: no alternatives to the plan were found: %s", error.what)
        return plan


def most_steps(plan: Plan, settings: RunSettings) -> float:
    """Optimizer steps of a run at most, as far as it is known before its data is read.

    A sample of full length takes no less than a byte for a token; what is compressed, or on the hub, is not known.
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
