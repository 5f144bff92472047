"""Manifests for Kubernetes: they fit the published schemas, and what their pods run trains on several hosts."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from bench.reliability.hosts import Hosts, environment, plan, start
from frugal.launch import commands
from tests.multinode.conftest import RUN, frugal, losses

VERSION = "1.34"


def printed(hosts: Hosts, path: Path, *words: object) -> list[dict[str, Any]]:
    """The manifests of a run of a plan, paths as seen from the hosts' folder."""
    code, output, errors = frugal(hosts, "train", "--plan", path, *RUN, *words, "--print", "kubernetes")
    assert (code, errors) == (0, "")
    return list(yaml.safe_load_all(output))


@pytest.mark.exhaustive  # what a pod runs, a task of SLURM runs in every run; the manifests are checked below
def test_pods_train_on_two_nodes_as_on_one(hosts: Hosts, on_one_host: list[float]) -> None:
    service, job = printed(hosts, plan(hosts, 1, 1), "--out", "pods", "--set", "train.grace=120")
    for manifest in (service, job):
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120 + commands.LAST_SECONDS
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    (hosts.folder / "secret").touch(mode=0o600)
    (hosts.folder / "secret").write_text("known to all ranks, and to nobody else")
    with (hosts.folder / "hosts").open("a") as names:  # as the headless Service has them
        names.write(f"{hosts.address('n1')} {job['metadata']['name']}-0.{service['metadata']['name']}\n")
    given = environment(hosts) | variables | {"FRUGAL_SECRET_FILE": str(hosts.folder / "secret")}
    pods = [
        start(hosts, name, "env", *(f"{key}={value}" for key, value in given.items()), f"JOB_COMPLETION_INDEX={index}",
              *container["command"])
        for index, name in enumerate(hosts.names)
    ]  # fmt: skip
    said = [each.communicate(timeout=200) for each in pods]
    assert [each.returncode for each in pods] == [0, 0], said
    assert losses(hosts.folder / "pods") == on_one_host


@pytest.mark.parametrize("num_gpus", [0, 8])
def test_manifests_fit_the_schemas(num_gpus: int) -> None:
    text = commands.manifests(["true"], {"MASTER_PORT": "29500"}, num_nodes=3, num_gpus=num_gpus, grace=600)
    service, job = yaml.safe_load_all(text)
    for manifest in (service, job):
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    limits = job["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits")
    assert limits == ({"nvidia.com/gpu": 8} if num_gpus else None)
