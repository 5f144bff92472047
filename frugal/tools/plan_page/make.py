"""Writes the page of a plan, whose contents are kept in the user's cache."""

from pathlib import Path

from frugal.deepspeed_adapter.json_config import write_files
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.planning.plan import Plan
from frugal.tools.plan_page.page import PageData, plan_page


def write_page(plan: Plan, path: Path, *, in_full: bool, helps: str = "") -> Path:
    """Write the page of `plan` to `path`, atomically, and return the path. Makes its folder.

    `in_full`: with more answers, also for other lengths, and with tables of other machines, which takes from ten
    seconds to a minute the first time; otherwise with what takes a few seconds. `helps`: the change that would help
    most, in words.

    Raises:
        RequestError: it cannot be written.
        WorkerError: a trace crashed.
    """
    cache = Cache.of_user()
    key = digest("page with a grid of entries", model_key(plan.request), plan.digest, in_full)
    data = cache.read(key, PageData)
    if data is None:
        from frugal.tools.plan_page.answers import (
            contents,  # brings the simulation along, which a kept page does not need
        )

        data = contents(plan, in_full)
        cache.write(key, data)
    text = plan_page(plan, data.answers, helps=helps, tables=data.tables)
    (written,) = write_files(path.parent, {path.name: text.encode()})
    return written
