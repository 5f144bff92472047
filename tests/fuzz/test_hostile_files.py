"""Whatever stands in a file that is read from outside: one clear message or none, no traceback, no hang."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from bench.plans import plan_by_hand
from frugal.checkpoint import manifest
from frugal.checkpoint.manifest import File, Manifest
from frugal.checkpoint.progress import TRAINING, Progress, read_progress
from frugal.config import sample_lengths, schema
from frugal.config.hardware import build_cluster
from frugal.config.run_settings import RunSettings
from frugal.config.schema import PLAN_SETTINGS, understand
from frugal.config.setting import build
from frugal.data.batches import MicroBatchLimits
from frugal.data.report import BuildReport
from frugal.data.store import cache
from frugal.deepspeed_adapter.json_config import deepspeed_config
from frugal.engine.oom_limits import LearntLimits
from frugal.errors import FrugalError
from frugal.planning.plan import Plan, _expanded
from frugal.planning.report import summary
from tests.corpora import load_corpus
from tests.fuzz.hostile import DEEP, bytes_like, documents_like, json_like

SOME = pytest.mark.parametrize("number", [200, pytest.param(1000, marks=pytest.mark.exhaustive)])
SECONDS = 20  # for one input: nothing here should take a second
"""Well above what a busy machine needs."""


@contextmanager
def in_time(text: bytes) -> Iterator[None]:
    """Fail where it hangs, or with what is no message for the user."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"not done within {SECONDS} s: {text[:2000]!r}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    except FrugalError as error:
        message = str(error)
        assert message.strip() and len(message) < 20_000, message[:1000]
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nfor {text[:2000]!r}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def survives(read: Callable[[Path], object], path: Path, texts: Iterator[bytes], *, refused: int) -> None:
    """`read` takes each text from `path` or refuses it; it refuses `refused` at least, so they are hostile enough."""
    number = num_read = 0
    for text in texts:
        number += 1
        path.write_bytes(text)
        with in_time(text):
            read(path)
            num_read += 1
    assert number >= 200
    assert number - num_read >= refused


@SOME
def test_plan_json(number: int, tmp_path: Path) -> None:
    good = msgspec.json.decode(plan_by_hand(world_size=2, global_batch=9, micro_batch=2, zero_stage=2).to_json())

    def resealed(document: Any) -> Any:
        """With the digest of what it says now, where it says anything."""
        with suppress(Exception):
            document["digest"] = msgspec.convert(_expanded(document), Plan, strict=True).compute_digest()
        return document

    def use(path: Path) -> None:
        plan = Plan.read(path)
        summary(plan)
        deepspeed_config(plan)

    survives(use, tmp_path / "plan.json", json_like(good, number, after=resealed), refused=number // 2)


TOML = b"""
model = "gpt2"
gpus = 4
mem = "12G"
precision = "bf16"
seq-len = 512
global-batch = 500
learning-rate = 3e-4
activation-checkpointing = "auto"
loss = "plain"
[train]
data = ["a.jsonl", "b"]
steps = 100
warmup-steps = 10
too-long = "skip"
validation-data = "10%"
"""


@SOME
def test_frugal_toml(number: int, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        file = schema.read_toml(path)
        understand({name: value for name, value in file.items() if name in PLAN_SETTINGS})
        build(RunSettings, file)

    def texts() -> Iterator[bytes]:
        yield from bytes_like(TOML, number // 2)
        yield b"data = " + DEEP
        for document in documents_like(msgspec.toml.decode(TOML), number - number // 2):
            document = document if isinstance(document, dict) else {"": document}
            lines = (f"{json.dumps(key)} = {toml(value)}\n" for key, value in document.items())
            yield "".join(lines).encode("utf-8", "surrogatepass")

    survives(use, tmp_path / "frugal.toml", texts(), refused=number // 2)


def toml(value: Any) -> str:
    """A value as it stands in TOML; null, which has none, as it stands in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


HOSTS = b"""# two kinds
node1 slots=4  # gpu=rtx3060-12g host-mem=64G disk=500G
node2 slots=2  # mem=24G

10.0.0.7 slots=8 # mem=12G,12G,12G,12G,24G,24G,24G,24G
"""


@SOME
def test_hostfile(number: int, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        understand({"hostfile": str(path), "model": "gpt2", "mem": "24G"})

    path = tmp_path / "hosts"
    path.write_bytes(HOSTS)
    assert len(build_cluster.read_hostfile(path)) == 3
    survives(use, path, bytes_like(HOSTS, number), refused=number // 3)


@SOME
def test_lengths(number: int, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        found = sample_lengths.of(str(path), too_long="skip")
        understand({"model": "gpt2", "gpus": 2, "mem": "12G", "lengths": found})

    path = tmp_path / "lengths.json"
    texts = [*json_like({"7": 100, "900": 3, "12": 4}, number // 2), *json_like([7, 900, 12, 12, 5], number // 2)]
    survives(use, path, iter(texts), refused=number // 3)


@SOME
def test_record_of_tokenised_data(number: int, tmp_path: Path) -> None:
    def write(folder: Path) -> BuildReport:
        (folder / "train.arrow").write_bytes(b"tokens")
        return BuildReport(documents=1, samples=2, tokens=3, largest_token=(4, "a.txt:1"))

    entry = tmp_path / "entry"
    cache.read_or_build(entry, write)
    good = (entry / cache.CHECKSUMS).read_bytes()

    def use(path: Path) -> None:
        try:
            assert cache.read(path.parent).tokens == 3
        except cache.DamagedError as error:  # which is said, and the data is read again
            raise FrugalError(str(error)) from None

    texts = (*bytes_like(good, number // 2), *json_like(msgspec.json.decode(good), number // 2))
    survives(use, entry / cache.CHECKSUMS, iter(texts), refused=number // 2)


@SOME
def test_manifest(number: int, tmp_path: Path) -> None:
    file = File(num_bytes=2, sha256="0" * 64, rank=0)
    made = Manifest(
        step=3, world_size=2, zero_stage=2, offload=("none", "none"), strategy="ZeRO-2", optimizer="adamw",
        model="gpt2", shapes="0" * 64, recipe={}, plan_digest="0" * 64, versions={"torch": "2"},
        files={"a.pt": file, "training.json": file},
    )  # fmt: skip

    def use(path: Path) -> None:
        try:
            read = manifest.read(path.parent)
        except ValueError as error:  # a reason, not yet a message: an older checkpoint may be whole
            raise FrugalError(str(error)) from None
        for rank in range(2):
            manifest.first_damage(path.parent, read, rank, 2)

    good = msgspec.json.decode(msgspec.json.encode(made))
    survives(use, tmp_path / manifest.MANIFEST, json_like(good, number), refused=number // 2)


@SOME
def test_record_of_a_run(number: int, tmp_path: Path) -> None:
    limits = MicroBatchLimits(max_samples=(4, 4), seq_len=16, shortest=2, overhead=None)
    learnt = LearntLimits(planned=limits, limits=limits, larger=(limits,), evaluation=limits)

    def use(path: Path) -> None:
        try:
            read_progress(path.parent)
        except ValueError as error:
            raise FrugalError(str(error)) from None

    good = msgspec.json.decode(msgspec.json.encode(Progress(step=3, validation_loss=0.5, learnt=learnt)))
    survives(use, tmp_path / TRAINING, json_like(good, number), refused=number // 2)


ROWS = b'{"text": "to be or not to be"}\n{"text": "that is the question", "n": 3}\n{"text": "\\u00e9t\\u00e9"}\n'


@SOME
def test_jsonl(number: int, tmp_path: Path) -> None:
    from frugal.data.tokenizer import load_tokenizer

    tokenizer, turns = load_tokenizer(), iter(range(number))

    def use(path: Path) -> None:
        is_tolerant = next(turns) % 2 == 0
        found = load_corpus(
            [str(path)], tokenizer=tokenizer, task="causal-lm", seq_len=16, skip_bad_rows=is_tolerant,
            cache_dir=tmp_path / "cache",
        )  # fmt: skip
        assert all(len(sample["input_ids"]) for sample in found.train)

    survives(use, tmp_path / "text.jsonl", bytes_like(ROWS, number), refused=number // 4)


CONFIG = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@SOME
def test_config_json(number: int, tmp_path: Path) -> None:
    import torch

    from frugal.models.resolve import resolve

    def use(path: Path) -> None:
        spec = resolve(str(path))
        spec.build(dtype=torch.bfloat16, device="meta")
        spec.objective()

    survives(use, tmp_path / "config.json", json_like(CONFIG, number), refused=number // 3)
