"""Several "hosts" on this machine: namespaces of network, names, processes and mounts, each with its own sshd.

    n1 ── p1 ┐
    n2 ── p2 ┤ bridge in a namespace of its own, 10.77.0.0/24
    n3 ── p3 ┘

Each also has an address in fd77::/64. All see the same files; each has its own /run, /dev/shm, /etc/hosts and /etc/ssh.
No namespace has a name, so nothing is left when the processes that hold them are gone, and these are
killed with the process that started them. Needs root.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.plans import plan_by_hand
from frugal.config.hardware.cluster import Cluster, Node
from frugal.planning.plan import Plan

SSH_PORT = 2222
_PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "pdsh", "pkill", "/usr/sbin/sshd")


def why_not() -> str | None:
    """Return why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)} (.ci/packages)"
    trial = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"], check=False)
    return "namespaces are not allowed here" if trial.returncode else None


class Hosts:
    """`number` hosts, n1 and so on, until `close`. `folder` is for keys and logs, and where programs run."""

    def __init__(self, number: int, folder: Path) -> None:
        self.names = [f"n{k}" for k in range(1, number + 1)]
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._inits: dict[str, int] = {}
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id")
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self.names)
        )
        (self.folder / "nsswitch").write_text("passwd: files\ngroup: files\nhosts: files\n")
        self._switch = self._start("unshare", "--net", "sleep", "infinity").pid
        until(lambda: _namespace(self._switch) != _namespace(os.getpid()))
        for words in ("link add br0 type bridge", "link set br0 up"):
            _call("nsenter", "-t", self._switch, "-n", "ip", *words.split())
        for name in self.names:
            self._boot(name)
        for name in self.names:
            until(lambda name=name: _listens(self, name))

    def address(self, name: str) -> str:
        """Return the address of a host on the network they share."""
        return f"10.77.0.{name.removeprefix('n')}"

    def address6(self, name: str) -> str:
        """Return the address of a host in IPv6."""
        return f"fd77::{name.removeprefix('n')}"

    def inside(self, name: str, *words: object) -> list[str]:
        """The words that run a program on a host."""
        enter = ["nsenter", "-t", str(self._inits[name]), "-n", "-u", "-i", "-p", "-m", f"--wd={self.folder}"]
        return [*enter, *map(str, words)]

    def run(self, name: str, *words: object, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program on a host to its end."""
        options.setdefault("timeout", 60)
        return subprocess.run(self.inside(name, *words), capture_output=True, **{"check": False, **options})

    def link(self, name: str, state: str) -> None:
        """Cut a host off the network (`down`), on the switch's side, or let it back (`up`)."""
        _call("nsenter", "-t", self._switch, "-n", "ip", "link", "set", f"p{name.removeprefix('n')}", state)

    def close_to_ssh(self, name: str) -> None:
        """Have a host answer no more logins, while those there are stay."""
        (self.folder / name / "closed").touch()
        self.run(name, "pkill", "-KILL", "-f", "^sshd: /usr/sbin/sshd -D", check=True)

    def open_to_ssh(self, name: str) -> None:
        """Let a host answer again."""
        (self.folder / name / "closed").unlink(missing_ok=True)
        until(lambda: _listens(self, name))

    def processes(self, name: str) -> list[str]:
        """Command lines of what runs on a host, without its sshd and this question."""
        listed = self.run(name, "ps", "-eo", "args", "--no-headers", text=True, check=True).stdout.splitlines()
        return [line for line in listed if "sshd" not in line and not line.startswith("ps -eo")]

    def close(self) -> None:
        """End all hosts."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _boot(self, name: str) -> None:
        own = self.folder / name
        (own / "ssh").mkdir(parents=True)
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own / "hostkey")
        key = " ".join((own / "hostkey.pub").read_text().split()[:2])
        with (self.folder / "known_hosts").open("a") as known:
            places = (name, self.address(name), self.address6(name))
            known.write(f"{','.join(f'[{place}]:{SSH_PORT}' for place in places)} {key}\n")
        (own / "sshd_config").write_text(
            f"Port {SSH_PORT}\nHostKey {own}/hostkey\nPidFile none\nAuthorizedKeysFile {self.folder}/id.pub\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PermitRootLogin prohibit-password\nMaxStartups 64\nPrintMotd no\n"
        )
        (own / "ssh" / "ssh_config").write_text(
            f"Host *\n  Port {SSH_PORT}\n  IdentityFile {self.folder}/id\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )
        (own / "init.sh").write_text(
            "set -e\n"
            f"hostname {name}\n"
            "mount --make-rprivate /\n"
            "mount -t tmpfs -o mode=755 tmpfs /run; mkdir -p /run/sshd\n"
            "mount -t tmpfs tmpfs /dev/shm\n"
            "[ ! -d /root/.ssh ] || mount -t tmpfs tmpfs /root/.ssh\n"
            f"mount --bind {self.folder}/hosts /etc/hosts\n"
            f"mount --bind {own}/ssh /etc/ssh\n"
            f"mount --bind {self.folder}/nsswitch /etc/nsswitch.conf\n"  # no DNS: it would be waited for
            "set +e\n"
            f"while :; do [ -e {own}/closed ] || /usr/sbin/sshd -D -e -f {own}/sshd_config; sleep 0.1; done\n"
        )
        with (own / "log").open("wb") as log:
            outer = self._start(
                "unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc",
                "sh", own / "init.sh", output=log,
            )  # fmt: skip
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        until(lambda: children.read_text().strip())
        init = self._inits[name] = int(children.read_text())
        port = f"p{name.removeprefix('n')}"
        _call("ip", "link", "add", "eth0", "netns", init, "type", "veth", "peer", "name", port, "netns", self._switch)
        _call("nsenter", "-t", self._switch, "-n", "ip", "link", "set", port, "master", "br0", "up")
        for words in (
            "link set lo up", f"addr add {self.address(name)}/24 dev eth0",
            f"addr add {self.address6(name)}/64 dev eth0 nodad", "link set eth0 up",
        ):  # fmt: skip
            _call("nsenter", "-t", init, "-n", "ip", *words.split())

    def _start(self, *words: object, output: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """A process that is killed with this one."""
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *map(str, words)], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        self._processes.append(process)
        return process


def _listens(hosts: Hosts, name: str) -> bool:
    return hosts.run(name, "ssh", "-o", "BatchMode=yes", name, "true").returncode == 0


def _namespace(process: int) -> str:
    return str(Path(f"/proc/{process}/ns/net").readlink())


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=30)


def until(is_true: Any, seconds: float = 20) -> None:
    """Wait for something; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "the hosts do not come up"
        time.sleep(0.05)


def plan(hosts: Hosts, *slots: int, zero_stage: int = 2, global_batch: int = 8) -> Path:
    """A plan for nodes with so many ranks each, and beside it a hostfile `hosts` that names them."""
    made = plan_by_hand(
        world_size=sum(slots), global_batch=global_batch, micro_batch=2, zero_stage=zero_stage,
        request={"model": str(hosts.folder / "config.json")},
    )  # fmt: skip
    device = made.cluster.devices[0]
    nodes = tuple(Node(devices=(device,) * number) for number in slots)
    made = replace(made, cluster=Cluster(nodes=nodes, intra_bandwidth=1e9, inter_bandwidth=1e9))
    folder = hosts.folder / f"plan-{'-'.join(map(str, slots))}-{zero_stage}-{global_batch}"
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_bytes(msgspec.convert(msgspec.to_builtins(made), Plan).sealed().to_json())
    lines = (f"{name} slots={number}  # mem=1G\n" for name, number in zip(hosts.names, slots, strict=False))
    (folder / "hosts").write_text("".join(lines))
    return folder / "plan.json"


def environment(hosts: Hosts) -> dict[str, str]:
    """As a user's shell has it on n1: nothing of ours but where frugal is."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PYTHONPATH") if name in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return kept | {
        "PATH": path, "XDG_CACHE_HOME": str(hosts.folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu", "COLUMNS": "200",
    }  # fmt: skip


def start(hosts: Hosts, name: str, *words: object) -> subprocess.Popen[str]:
    """A program on a host, with pipes."""
    return subprocess.Popen(
        hosts.inside(name, *words), env=environment(hosts), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
