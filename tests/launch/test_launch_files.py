"""Files of launch/ for containers and clouds: they fit published schemas, and what they start is a node of a plan."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from frugal.config.run_settings import RunSettings
from frugal.config.schema import parse
from frugal.config.setting import settings_of
from frugal.launch import commands

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"


def loaded(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((LAUNCH / name).read_text()))


def node_settings(words: list[str]) -> dict[str, Any]:
    """The settings of a command that starts a node's ranks."""
    assert words[:3] == ["python", "-m", "frugal.launch.one_node"]
    return parse(words[3:], {"plan": Path}, settings_of(RunSettings), needed=["plan"])


def test_a_trainjob_fits_the_published_models_and_starts_a_node() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="a dependency of tests")
    job = loaded("trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job, "a key that the models lack is dropped"
    trainer = job["spec"]["trainer"]
    assert node_settings(trainer["command"])["plan"] == Path(commands.FOLDER, "run", "plan.json")
    environment = {each["name"]: each["value"] for each in trainer["env"]}
    (node,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    name = job["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-{node['name']}-0-0.{name}", "as Kubeflow names the first pod"
    pod = node["template"]["spec"]["template"]["spec"]
    _, own = yaml.safe_load_all(commands.manifests([], {"MASTER_PORT": "1"}, num_nodes=2, num_gpus=4, grace=600))
    ours = own["spec"]["template"]["spec"]
    assert pod["volumes"] == ours["volumes"]
    assert pod["containers"][0]["volumeMounts"] == ours["containers"][0]["volumeMounts"]
    assert pod["terminationGracePeriodSeconds"] == ours["terminationGracePeriodSeconds"]
    assert environment["FRUGAL_SECRET_FILE"] == f"{commands.SECRET_FOLDER}/secret"


def test_a_task_of_skypilot_gives_each_node_its_number_the_first_ones_address_and_the_secret(tmp_path: Path) -> None:
    task = loaded("skypilot.yaml")
    *before, last = task["run"].strip().splitlines()
    assert node_settings(shlex.split(last))["steps"] == "1000"
    shown = "echo $NODE_RANK $MASTER_ADDR; stat -c %a $FRUGAL_SECRET_FILE; cat $FRUGAL_SECRET_FILE"
    given = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "RUN_SECRET": "a b"}
    done = subprocess.run(
        ["sh", "-ec", "\n".join([*before, shown])], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **given}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1 10.0.0.5\n600\na b"
    assert set(task["secrets"]) <= set(given)


def test_the_steps_of_the_container_are_readmes() -> None:
    steps = re.findall(r"^([A-Z]+) (.+)$", (LAUNCH / "Containerfile").read_text(), re.MULTILINE)
    assert {kind for kind, _ in steps} == {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "CMD"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    defaults = dict(words.split("=", 1) for kind, words in steps if kind == "ARG")
    assert set(defaults["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    (python,) = (words.rpartition(":")[2] for kind, words in steps if kind == "FROM")
    assert f">={python.partition('-')[0]}" == project["requires-python"]
    torch, own = (shlex.split(words) for kind, words in steps if kind == "RUN" and words.startswith("pip "))
    assert torch[-1] in project["dependencies"]
    (of_readme,) = re.findall(r"^\$ (pip install \.)(?:\s|$)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [*own[:2], own[-1].partition("[")[0]] == of_readme.split()
