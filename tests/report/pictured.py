"""The run whose report is shown in the documentation: really trained on two CPU ranks, with a recovery and a restart.

Rank 1 is refused memory once, by a callback, and gets SIGKILL later; the run is started again from its checkpoint.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types

from bench.runs import environment, records
from tests.browser import Browser

CONFIG = {"model_type": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 260, "n_positions": 256}
CALLBACK = """
from pathlib import Path

import torch
import torch.distributed as dist

REFUSED = Path(__file__).with_name("refused")


class Once:
    def on_step(self, engine, step, result):
        if step == 17 and dist.get_rank() == 1 and not REFUSED.exists():
            layers = next(module for module in engine.module.modules() if isinstance(module, torch.nn.ModuleList))
            layers[1].register_forward_hook(self.refuse)

    def refuse(self, *_):
        if not REFUSED.exists():
            REFUSED.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
"""
STEPS, KILLED_AFTER = 60, 35


def trained(folder: Path) -> Path:
    """The run's folder. Takes one to three minutes."""
    (folder / "tiny-gpt2.json").write_text(json.dumps(CONFIG))
    lines = random.Random(1)
    rows = [
        {"text": f"line {i}: " + "to be or not to be, that is the question. " * lines.randint(1, 9)}
        for i in range(2000)
    ]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "refusing.py").write_text(CALLBACK)
    words = (
        "train --device cpu --gpus 2 --model tiny-gpt2.json --global-batch 16 --seq-len 256 --data text.jsonl "
        "--save-every 10 "
        "--eval-every 5 --learning-rate 2e-3 --warmup 6 --validation-data 2% --mem 900M --max-restarts 2 "
        f"--set train.callback=refusing.py:Once --steps {STEPS} --out run"
    )
    program = [sys.executable, "-m", "frugal", *words.split()]
    with subprocess.Popen(program, cwd=folder, env=environment(folder)) as process:
        while _steps(folder / "run") < KILLED_AFTER:
            assert process.poll() is None, "the run never came so far"
            time.sleep(0.05)
        for child in psutil.Process(process.pid).children(recursive=True):
            if "--local_rank=1" in child.cmdline():
                child.send_signal(signal.SIGKILL)
    assert process.returncode == 0
    return folder / "run"


def _steps(run: Path) -> int:
    return sum(record["event"] == "step" for record in records(run)) if (run / "metrics.jsonl").exists() else 0


def draw(folder: Path, images: Path) -> None:
    """The report of the run in `folder`, light and dark."""
    browser = Browser()
    for name, dark in (("report.webp", False), ("report-dark.webp", True)):
        browser.open(folder / "report.html", width=1000, dark=dark)
        browser.run("await new Promise(requestAnimationFrame)")
        browser.picture(images / name, quality=70)
    browser.close()
