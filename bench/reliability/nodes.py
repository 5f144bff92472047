"""The cost of a fault on two hosts: `frugal train --hostfile`, interrupted in ways that only several hosts have.

    python -m bench.reliability.nodes

Two network namespaces with their own sshd stand for hosts (root, iproute2, openssh-server, pdsh), one CPU rank on each;
the command runs on the first. For each fault: seconds until the command has ended, until no rank is left on any host,
its exit code and its first line of error. Results go to `bench/results/nodes-cpu.json`; the table
of docs/reliability.md is printed.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.environment import environment
from bench.goals import report_goals
from bench.reliability.hosts import Hosts, plan, start, why_not
from bench.runs import prepared

RESULTS = Path(__file__).parents[1] / "results" / "nodes-cpu.json"
PATIENCE_SECONDS = 180


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one fault; seconds count from the fault."""

    fault: str
    ended_seconds: float
    gone_seconds: float
    exit_code: int
    message: str


def kill(hosts: Hosts, name: str) -> None:
    """SIGKILL to the rank of a host."""
    hosts.run(name, "pkill", "-KILL", "-f", "[l]ocal_rank=", check=True)


FAULTS: dict[str, Callable[[Hosts], None]] = {
    "SIGKILL of the rank on the second host": lambda hosts: kill(hosts, "n2"),
    "SIGKILL of rank 0": lambda hosts: kill(hosts, "n1"),
    "second host cut off the network": lambda hosts: hosts.link("n2", "down"),
}


def disturbed(hosts: Hosts, fault: str) -> Outcome:
    """A run that would not end by itself, and the fault at its first steps."""
    path = plan(hosts, 1, 1)
    process = start(
        hosts, "n1", sys.executable, "-m", "frugal", "train", "--plan", path, "--hostfile", path.with_name("hosts"),
        "--data", "text.jsonl", "--steps", 1_000_000, "--eval-every", 0, "--out",
        f"run{list(FAULTS).index(fault)}",
    )  # fmt: skip
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 1/"):
        if process.poll() is not None:
            raise RuntimeError(process.communicate()[1])
    time.sleep(2)
    began = time.monotonic()
    FAULTS[fault](hosts)
    try:
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        ended = time.monotonic() - began
        while any("frugal" in line for name in hosts.names for line in hosts.processes(name)):
            if time.monotonic() - began > PATIENCE_SECONDS:
                raise RuntimeError(f"ranks are left after: {fault}")
            time.sleep(0.2)
        gone = time.monotonic() - began
    finally:
        hosts.link("n2", "up")
    message = next(line for line in errors.splitlines() if line.startswith("error: "))
    return Outcome(
        fault=fault, ended_seconds=round(ended, 1), gone_seconds=round(gone, 1), exit_code=process.returncode,
        message=message,
    )  # fmt: skip


def table(outcomes: list[Outcome]) -> str:
    """Return the table of docs/reliability.md."""
    lines = ["| fault on two hosts | command ends after | no rank is left after | exit code |", "|---|---|---|---|"]
    for each in outcomes:
        lines.append(f"| {each.fault} | {each.ended_seconds:.0f} s | {each.gone_seconds:.0f} s | {each.exit_code} |")
    return "\n".join(lines)


def main() -> int:
    """Disturb, time, and keep what came of it."""
    if (reason := why_not()) is not None:
        raise SystemExit(f"this needs hosts: {reason}")
    with tempfile.TemporaryDirectory() as place:
        prepared(Path(place))
        hosts = Hosts(2, Path(place))
        try:
            outcomes = [disturbed(hosts, fault) for fault in FAULTS]
        finally:
            hosts.close()
    result = environment("python -m bench.reliability.nodes") | {
        "hosts": 2,
        "outcomes": [asdict(each) for each in outcomes],
        "goals": {"nothing is left after a minute": all(each.gone_seconds < 60 for each in outcomes)},
    }
    print(table(outcomes))
    return report_goals(result, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
