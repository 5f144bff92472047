"""The conditions of a measurement: command, date, device, versions."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from frugal.config.hardware.local_host import cpu_name

PACKAGES = ("frugal-trainer", "torch", "deepspeed", "transformers")


def environment(command: str) -> dict[str, Any]:
    """The head of a kept result of CPU ranks."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
