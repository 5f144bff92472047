"""The manifests of a run on Kubernetes: a headless Service, and an Indexed Job with one pod a node."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

NAME, FOLDER, SECRET_FOLDER = "frugal-run", "/workspace", "/etc/frugal"
PORT_NAME = "rendezvous"
MOST_FAILURES = 3
"""Failures of pods until the Job is given up; those of machines that are taken away do not count."""

LAST_SECONDS = 60
"""Time that a pod has to end, beyond that in which a run saves its step."""

BEFORE = f"""\
# Before: an IMAGE with frugal, a PersistentVolumeClaim `{NAME}` that all pods can write (ReadWriteMany), with the plan
# and the data in it, paths as below {FOLDER}, and the run's secret, by which pods know each other:
#     kubectl create secret generic {NAME} --from-literal=secret="$(head -c 32 /dev/urandom | base64)"
# A pod that is evicted saves its step within its grace period; the Job starts pods anew, and they resume the run.
# These manifests fit the published schemas; they have not run on a cluster.
"""


def manifests(
    command: Sequence[str], environment: Mapping[str, str], *, num_nodes: int, num_gpus: int, grace: int
) -> str:
    """Return YAML that starts `command` once a node.

    `environment` has at least MASTER_PORT. `num_gpus` of each node; 0: ranks are CPU processes. `grace`: seconds in
    which a run that is asked to stop saves its step.
    """
    labels = {"app": NAME}
    variables = {
        **environment,
        "MASTER_ADDR": f"{NAME}-0.{NAME}" if num_nodes > 1 else "127.0.0.1",
        "FRUGAL_SECRET_FILE": f"{SECRET_FOLDER}/secret",
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": PORT_NAME, "port": int(environment["MASTER_PORT"])}],
        },
    }
    container = {
        "name": "ranks",
        "image": "IMAGE",
        "workingDir": FOLDER,
        "command": [*command],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        **({"resources": {"limits": {"nvidia.com/gpu": num_gpus}}} if num_gpus else {}),
        "volumeMounts": [
            {"name": "run", "mountPath": FOLDER},
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # NCCL and gloo share memory there
        ],
    }
    pod = {
        "subdomain": NAME,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace + LAST_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": NAME}},
            {"name": "secret", "secret": {"secretName": NAME, "defaultMode": 0o400}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME},
        "spec": {
            "completionMode": "Indexed",
            "completions": num_nodes,
            "parallelism": num_nodes,
            "backoffLimit": MOST_FAILURES * num_nodes,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return BEFORE + yaml.safe_dump_all([service, job], sort_keys=False, width=120)
