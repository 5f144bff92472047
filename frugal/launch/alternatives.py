"""Find a plan's alternatives before its ranks start: the ways that the run may try in its first steps."""

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

logger = logging.getLogger("frugal")


def for_run(plan: Plan, settings: RunSettings) -> Plan:
    """Return the plan of a run, with alternatives if --tune asks for them or the run may gain by them.

    With the ways that `Engine.tune` may try a plan has another digest, and makes the same decision. They are kept in
    the user's cache, as are the plan's traces; further modes of activation checkpointing are traced.
    """
    if settings.tune is False or not (settings.tune or alternatives.is_worth_it(plan, most_steps(plan, settings))):
        return plan
    if plan.alternatives or plan.tuned_from:
        return plan
    cache = Cache.of_user()
    key = digest("dry-run alternatives", model_key(plan.request), plan.digest)
    others = cache.read(key, tuple[Alternative, ...])
    if others is None:
        from frugal.dryrun.client import DryRunSource, workers  # a tenth of a second that kept ones do not need
        from frugal.planning.search.search import Search

        try:
            with closing(workers()) as pool:
                open_source = partial(DryRunSource, pool=pool, will_dry_run=False)
                with open_source(plan.request, plan.cluster) as source:
                    others = alternatives.find(Search(plan.request, plan.cluster, source), plan, open_source)
        except FrugalError as error:  # such as a plan from elsewhere, whose model cannot be traced here
            logger.warning("note: no alternatives to the plan were found: %s", error.what)
            return plan
        cache.write(key, others)
    return replace(plan, alternatives=others).sealed() if others else plan


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
