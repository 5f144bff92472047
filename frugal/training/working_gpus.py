"""Which GPUs of this machine still work. No torch here: each is asked by a process of its own.

A GPU that has fallen off the bus may still be counted by the driver, and asking it may take for ever.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

PROBE_SECONDS = 60


def working(names: Sequence[str]) -> list[str]:
    """Those that give a few bytes; `names` as in CUDA_VISIBLE_DEVICES."""
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        return [name for name, works in zip(names, threads.map(_works, names), strict=True) if works]


def _works(gpu: str) -> bool:
    probe = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    try:
        return subprocess.run(probe, env=environment, capture_output=True, timeout=PROBE_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False
