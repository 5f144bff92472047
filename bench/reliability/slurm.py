"""Debian's SLURM on the hosts of `bench.reliability.hosts`: munged and slurmd on each, slurmctld on the first.

Jobs are seen by their number; everything ends with the hosts. Needs root, and slurmctld, slurmd, slurm-client and
munge (.ci/packages).
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from bench.reliability import hosts as of_hosts
from bench.reliability.hosts import Hosts

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
FOLDERS = "/usr/sbin:/sbin"


def why_not() -> str | None:
    """Return why there can be no SLURM here; None if there can."""
    path = f"{os.environ['PATH']}:{FOLDERS}"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(missing)} (.ci/packages)" if missing else of_hosts.why_not()


class Slurm:
    """A cluster of all `hosts`, whose nodes have so many CPUs each."""

    def __init__(self, hosts: Hosts, *cpus: int) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        self.folder.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        nodes = "".join(
            f"NodeName={name} NodeAddr={hosts.address(name)} CPUs={number}\n"
            for name, number in zip(hosts.names, cpus, strict=True)
        )
        (self.folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost=n1({hosts.address('n1')})\nSlurmUser=root\nSlurmdUser=root\n"
            f"StateSaveLocation={self.folder}/state\nSlurmdSpoolDir={self.folder}/spool-%n\n"
            "SlurmctldPidFile=/run/slurmctld.pid\nSlurmdPidFile=/run/slurmd.pid\nAuthType=auth/munge\n"
            "AuthInfo=socket=/run/munge.socket,cred_expire=5\nCredType=cred/munge\nProctrackType=proctrack/linuxproc\n"
            "TaskPlugin=task/none\nMpiDefault=none\nSelectType=select/cons_tres\nReturnToService=2\nSlurmdTimeout=10\n"
            "KillWait=20\nMessageTimeout=30\nSchedulerParameters=bf_interval=1,sched_min_interval=100000\n"
            f"JobRequeue=1\n{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
        for name in hosts.names:
            self._daemon(name, "munged", "--foreground", "--force", "--key-file", self.folder / "key", "--socket",
                         "/run/munge.socket", "--pid-file", "/run/munged.pid", "--log-file",
                         self.folder / f"munged-{name}.log", "--seed-file", self.folder / f"seed-{name}")  # fmt: skip
            of_hosts.until(lambda name=name: hosts.run(name, "test", "-S", "/run/munge.socket").returncode == 0)
        self._daemon("n1", "slurmctld", "-D", "-i")
        for name in hosts.names:
            self._daemon(name, "slurmd", "-D", "-N", name)
        of_hosts.until(lambda: self.said("sinfo", "-h", "-o", "%T").split() == ["idle"], 60)

    def __call__(self, *words: object, given: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM's on the first host, with `given` added to a user's environment."""
        environment = of_hosts.environment(self.hosts) | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | dict(given or {})
        return self.hosts.run("n1", *words, env=environment, text=True, timeout=200)

    def said(self, *words: object) -> str:
        """The output of a command of SLURM's."""
        return self(*words).stdout.strip()

    def submit(self, *words: object, given: Mapping[str, str] | None = None) -> str:
        """Submit a batch script with its arguments; return the job's number."""
        done = self("sbatch", "--parsable", *words, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of what SLURM knows of a job, such as JobState, Restarts or ExitCode."""
        words = self.said("scontrol", "show", "job", job, "-o").split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def wait(self, job: str, *states: str, seconds: float = 180) -> str:
        """Wait until a job is in one of `states`, which are its ends if none is given; return it."""
        end = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) not in (states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")):
            assert time.monotonic() < end, f"job {job} is still {state}"
            time.sleep(0.2)
        return state

    def close(self) -> None:
        """End the daemons, and what they run."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        for name in self.hosts.names:
            for daemon in ("slurmstepd", "slurmd", "slurmctld", "munged"):
                self.hosts.run(name, "pkill", "-KILL", "-x", daemon)

    def _daemon(self, name: str, *words: object) -> None:
        environment = {
            **os.environ,
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "PATH": f"{os.environ['PATH']}:{FOLDERS}",
        }
        with Path(self.folder / f"{words[0]}-{name}.out").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self.hosts.inside(name, *words)], stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, env=environment,
                )
            )  # fmt: skip
