"""Models that cannot be had, and what is said instead."""

import json
from pathlib import Path

import pytest
import torch

from frugal.data.tokenizer import byte_tokenizer
from frugal.errors import RequestError
from frugal.models import factories
from frugal.models.resolve import resolve
from frugal.models.spec import check_sequence_length
from tests.engine.small_models import TINY, tiny_gpt2

pytestmark = pytest.mark.usefixtures("offline")


def message(reference: str, task: str | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        resolve(reference, task)
    return str(caught.value)


IMPORT = "hint: name it as package.module:name or path/to/file.py:name"
MODULE = "hint: return a torch.nn.Module, or (module, objective)"
OF_TEXT = "hint: give a factory that returns a module and its objective"
ON_META = "also called with torch.device('meta') as default"
REFUSED: list[tuple[str, str | None, tuple[str, ...]]] = [
    ("gtp2-xl", None, ("there is no model `gtp2-xl`", "(HF_HUB_OFFLINE is set)", "did you mean gpt2-xl?")),
    ("somebody/zzzzzz", None, ("there is no model `somebody/zzzzzz`", "hint: give a preset such as gpt2")),
    ("runs/nope/config.json", None, ("there is no model at runs/nope/config.json", "hint: give a config.json")),
    (
        "./empty",
        None,
        ("./empty is no model folder", "empty/config.json cannot be read\n  because No such file or directory"),
    ),
    ("gpt2", "masked-lm", ("gpt2 cannot be trained as masked-lm", "hint: use --task causal-lm")),
    ("gpt2", "translation", ("there is no task `translation`", "tasks are causal-lm, masked-lm, seq2seq")),
    ("vit", None, ("vit cannot be trained on text", "has no such model for `vit`", OF_TEXT)),
    ("whisper", None, ("WhisperModel reads `input_features`", "hint: give a factory")),
    ("whisper", "causal-lm", ("WhisperModel reads `input_features`", "hint: give a factory")),
    ("musicgen", None, ("musicgen is no single model for text", "Multiple valid text configs were found")),
    ("no_such_module:make", None, ("cannot import no_such_module", "ModuleNotFoundError", IMPORT)),
    ("script.py:make", None, ("cannot import script.py", "SystemExit", IMPORT)),
    ("broken.py:make", None, ("cannot import broken.py", "SyntaxError", IMPORT)),
    ("my_models.py:mime", None, ("my_models.py has no `mime`", "did you mean my_models.py:mine?")),
    ("my_models.py:SIZE", None, ("my_models.py:SIZE cannot be called", "its type is int")),
    ("my_models.py:fails", None, ("my_models.py:fails failed", "KeyError: 'layers'", ON_META)),
    ("my_models.py:exits", None, ("my_models.py:exits failed", "SystemExit: 3", ON_META)),
    ("my_models.py:no_module", None, ("returned an object of type int", MODULE)),
    ("my_models.py:nothing", None, ("returned None", MODULE)),
    (
        "my_models.py:module_only",
        None,
        (
            "makes a Linear, but does not say how to train it",
            'return module, {"input": torch.zeros(SHAPE)} where forward',
        ),
    ),
    ("given.py:Net", None, ("given.py:Net takes width", "hint: add `def make(): return Net(...)` to its file")),
    ("given.py:with_loss", None, ("a module and an object of type function", 'module, {"x": torch.zeros(SHAPE), "y"')),
    ("given.py:with_optimizer", None, ("returned a module and an object of type SGD", "SummedLoss(loss, example=...)")),
    (
        "given.py:needs",
        None,
        ("No module named 'soundfile_'", "hint: install it into this Python: pip install soundfile_"),
    ),
    ("given.py:lazy", None, ("parameters that have no shape", "hint: call the module once before it is returned")),
    ("needs.py:make", None, ("cannot import needs.py", "hint: install it into this Python: pip install soundfile_")),
    ("given.py:made", None, ("given.py:made cannot be called", "its type is Linear", "a function in given.py that")),
    (
        "given.py",
        None,
        (
            "given.py does not say which function makes the model",
            "it defines with_loss, with_optimizer, needs, on_card, lazy, Net",
            "hint: name the one that returns a module: --model given.py:with_loss",
        ),
    ),
    ("broken.py", None, ("broken.py cannot be read as Python", "invalid syntax (<unknown>, line 1)")),
    ("none.py", None, ("there is no model at none.py",)),
    (
        "given.py:on_card",
        None,
        ("Torch not compiled with CUDA", "given.py, line 24, runs `return nn.Linear(4, 4).cuda(), {}`", ON_META),
    ),
    ("cut.json", None, ("cut.json is no JSON\n  because Expecting value: line 1 column 16",)),
    ("list.json", None, ('hint: add one that transformers knows, such as "model_type": "gpt2"',)),
    ("typo.json", None, ("hint: did you mean gpt2",)),
    ("code.json", None, ("because frugal never runs the code that comes with a model",)),
]
GIVEN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layer(x), y)

def with_loss():
    return Net(4), nn.functional.cross_entropy

def with_optimizer():
    net = Net(4)
    return net, torch.optim.SGD(net.parameters(), 0.1)

def needs():
    import soundfile_.core

def on_card():
    return nn.Linear(4, 4).cuda(), {}

made = nn.Linear(4, 4)

def lazy():
    return nn.Sequential(nn.LazyLinear(4)), {"input": torch.zeros(3)}
"""
FILES = {
    "given.py": GIVEN, "needs.py": "from soundfile_ import core\n",
    "script.py": "import sys\n\nsys.exit()\n", "broken.py": "def make(:\n", "cut.json": '{"model_type": ',
    "list.json": "[1]", "typo.json": '{"model_type": "gtp2"}',
    "code.json": '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}',
}  # fmt: skip


@pytest.mark.parametrize(("reference", "task", "said"), REFUSED)
@pytest.mark.usefixtures("factories")
def test_what_makes_no_model_is_refused_with_a_way_out(
    reference: str, task: str | None, said: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    text = message(reference, task)
    assert all(part in text for part in said), text


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RequestError) as caught:
        resolve("./saved").build(dtype=torch.float32)
    said = str(caught.value)
    assert said.startswith("the weights of ./saved cannot be loaded\n  because SafetensorError: ")
    assert said.endswith("\n\nhint: to train from random weights give the path of its config.json")


def test_what_does_not_fit_the_model_is_refused_with_its_numbers(tmp_path: Path) -> None:
    check_sequence_length(resolve("gpt2"), 1024)
    check_sequence_length(resolve("t5-small"), 1_000_000)
    with pytest.raises(RequestError, match=r"(?s)--seq-len 1025 .* 1024 positions.*hint: use --seq-len 1024 or less"):
        check_sequence_length(resolve("gpt2"), 1025)
    (tmp_path / "small.json").write_text(json.dumps({"model_type": "gpt2", **TINY["gpt2"]}))
    with pytest.raises(
        RequestError, match=r"tokenizer has 260 tokens, small.json has embeddings for 256\n\nhint: take"
    ):
        resolve("small.json").for_tokenizer(byte_tokenizer())


def test_an_unreachable_hub_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for retries where the host has no address."""
    lookups = []

    def no_address(*arguments: object) -> None:
        lookups.append(arguments)
        raise OSError("Name or service not known")

    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", no_address)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    factories.hub_unreachable_because.cache_clear()
    try:
        assert "the network does not reach it" in message("gtp2")
        assert lookups.count(("huggingface.co", 443)) == 1  # the hub's own library may look once for itself
    finally:
        factories.hub_unreachable_because.cache_clear()
