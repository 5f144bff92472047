"""Hosts for the tests of this folder, and a tiny run to give them."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.reliability.hosts import Hosts, environment, plan, start, why_not
from bench.runs import frugal_train, prepared, without_waiting

RUN = ("--data", "text.jsonl", "--steps", "4", "--save-every", "2", "--eval-every", "0")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, and a folder they share with a model, text, plans and hostfiles."""
    yield from _up(tmp_path_factory.mktemp("hosts"), 2)


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three of them."""
    yield from _up(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def on_one_host(hosts: Hosts) -> list[float]:
    """The losses of two ranks on one host: this machine itself, where a run starts at once."""
    code, _, errors = frugal_train(hosts.folder, "--plan", plan(hosts, 2), *RUN, "--out", "one")
    assert (code, errors) == (0, "")
    return losses(hosts.folder / "one")


def _up(folder: Path, number: int) -> Iterator[Hosts]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    prepared(folder, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # masks would depend on the number of ranks
    up = Hosts(number, folder)
    try:
        yield up
    finally:
        up.close()


def frugal(hosts: Hosts, *words: object, on: str = "n1", timeout: float = 200) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command on a host."""
    done = hosts.run(on, sys.executable, "-m", "frugal", *words, env=environment(hosts), text=True, timeout=timeout)
    return done.returncode, done.stdout, without_waiting(done.stderr)


def train(hosts: Hosts, path: Path, out: str, *more: object, timeout: float = 200) -> tuple[int, str, str]:
    """A run on the plan's nodes, started on n1."""
    return frugal(
        hosts, "train", "--plan", path, "--hostfile", path.with_name("hosts"), *RUN,
        "--out", out, *more, timeout=timeout,
    )  # fmt: skip


def by_hand(hosts: Hosts, plans: Sequence[Path], *words: object) -> tuple[list[int], str]:
    """Exit codes and stderr of ranks that were started without a launcher, one on each host, each with its plan."""
    secret = hosts.folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("known to all ranks, and to nobody else")
    ranks = [
        start(
            hosts, name, "env", f"RANK={rank}", f"WORLD_SIZE={len(plans)}", "LOCAL_RANK=0", "LOCAL_SIZE=1",
            "MASTER_ADDR=n1", "MASTER_PORT=29500", f"FRUGAL_SECRET_FILE={secret}",
            sys.executable, "-m", "frugal.engine.run", "--plan", path, *words,
        )
        for rank, (name, path) in enumerate(zip(hosts.names, plans, strict=True))
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(errors for _, errors in said)


def losses(folder: Path) -> list[float]:
    """Return the loss of each step of a run."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]
