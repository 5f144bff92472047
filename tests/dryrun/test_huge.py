"""A model that fits into no host is described all the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LLAMA_405B = {
    "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
DESCRIBE = """
import sys
from frugal.dryrun.messages import AskFacts
from frugal.dryrun.worker import _describe
from frugal.config.request import Request

print(_describe(AskFacts(Request(model=sys.argv[1], seq_len=8192))).parameters)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.exhaustive
def test_405_billion_parameters_take_less_than_a_gigabyte_and_a_half(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_405B))
    done = subprocess.run([sys.executable, "-c", DESCRIBE, config], capture_output=True, text=True, check=True)
    parameters, peak_kib = map(int, done.stdout.split())
    assert parameters == 405_853_388_800
    assert peak_kib * 1024 < 1.5e9
