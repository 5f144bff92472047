"""The decisions in ds_configs/ are the ones frugal makes today; `python ds_configs/generate.py` renews them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_cases_come_out_as_they_are_kept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "ds_configs/generate.py", str(tmp_path)], cwd=ROOT, timeout=400, check=True)
    kept = {path.name: path.read_text() for path in (ROOT / "ds_configs").iterdir() if path.suffix in (".json", ".txt")}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept
