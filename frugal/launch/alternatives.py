"""A plan's alternatives, found before its ranks start: what they may try in their first steps."""

import logging
import math
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from frugal.config.run_settings import RunSettings
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.errors import FrugalError
from frugal.planning.plan import Alternative, Plan
from frugal.planning.search import alternatives
from frugal.planning.search.alternatives import is_worth_it

logger = logging.getLogger("frugal")


def with_alternatives(plan: Plan) -> Plan:
    """The plan with what a run may try in its first steps, for `Engine.tune`; another digest, the same decision.

    What was traced for the plan is in the user's cache; ways to recompute that it did not need are traced now.

    Raises:
        FrugalError: the model cannot be built, or not be trained as planned.
    """
    if plan.alternatives or plan.tuned_from:
        return plan
    cache = Cache.of_user()
    key = digest("dry-run alternatives", model_key(plan.request), plan.digest)
    kept = cache.read(key, tuple[Alternative, ...])
    if kept is None:
        kept = _found(plan)
        cache.write(key, kept)
    return replace(plan, alternatives=kept).sealed() if kept else plan


def _found(plan: Plan) -> tuple[Alternative, ...]:
    from frugal.dryrun.client import DryRunSource, workers  # a tenth of a second that kept alternatives do not need
    from frugal.planning.search.search import Search

    with closing(workers()) as pool:
        open_source = partial(DryRunSource, pool=pool, will_dry_run=False)
        with open_source(plan.request, plan.cluster) as source:
            return alternatives.find(Search(plan.request, plan.cluster, source), plan, open_source)


def for_run(plan: Plan, settings: RunSettings) -> Plan:
    """The plan of a run, with alternatives where they are asked for or may pay."""
    if settings.tune is False or not (settings.tune or is_worth_it(plan, most_steps(plan, settings))):
        return plan
    try:
        return with_alternatives(plan)
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
