"""Under which circumstances something was measured."""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from frugal.training.circumstances import cpu_name


def circumstances(command: str) -> dict[str, Any]:
    """The head of a kept result of CPU ranks."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": cpu_name(),
        "versions": {name: version(name) for name in ("frugal-trainer", "torch", "deepspeed", "transformers")},
    }
