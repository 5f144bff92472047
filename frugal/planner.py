"""From settings to a plan: one that was made before, or a new one."""

import logging
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from frugal.dryrun.cache import Cache, digest, model_key
from frugal.planning.cluster import Cluster
from frugal.planning.plan import Plan
from frugal.planning.request import Request
from frugal.planning.settings import understand
from frugal.training import calibrations

if TYPE_CHECKING:
    from frugal.planning.source import Rehearse

logger = logging.getLogger("frugal")


def plan(**settings: Any) -> Plan:
    """The fastest plan that fits. Settings have the names of `frugal plan`'s flags: `plan(model="gpt2", gpus=4,
    mem="12G", global_batch=512)`.

    Raises:
        RequestError: a setting is unknown or wrong, or settings contradict each other.
        NothingFitsError: no strategy fits.
    """
    found, notes = calibrations.chosen(settings)
    for note in notes:
        logger.warning(note)
    return make_plan(*understand(settings, found))


def make_plan(
    request: Request, cluster: Cluster, defaults: tuple[str, ...] = (), *, rehearse: "Rehearse | None" = None
) -> Plan:
    """The plan for a request; `defaults` names its fields that nobody set, `rehearse` where profiles come from.

    Plans are kept in the user's cache, except where `rehearse` is given.

    Raises: as `plan`.
    """
    if rehearse is not None:
        from frugal.decision import decide

        return decide(request, cluster, defaults, rehearse)
    cache = Cache.of_user()
    key = digest("plan", model_key(request), request, cluster, defaults)
    found = cache.read(key, Plan)
    if found is None or found.digest != found.compute_digest():
        found = _decided(request, cluster, defaults)
        cache.write(key, found)
    return found


def _decided(request: Request, cluster: Cluster, defaults: tuple[str, ...]) -> Plan:
    from frugal.decision import decide  # a tenth of a second that a kept plan does not need
    from frugal.dryrun.client import Rehearsals, workers

    with closing(workers()) as pool:
        return decide(request, cluster, defaults, partial(Rehearsals, pool=pool))
