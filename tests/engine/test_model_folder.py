"""`frugal export`: of any checkpoint the folder that the run itself would have written, in one process."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from bench.ranks import Ranks
from frugal import cli
from frugal.checkpoint import run_folder, saving
from frugal.checkpoint.progress import Progress
from frugal.config.adapters import Lora
from frugal.config.run_settings import RunSettings
from frugal.data.corpus import tokenizer_for
from frugal.data.tokenizer import byte_tokenizer
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.models.resolve import resolve_request
from tests.engine.engines import plan_here, running
from tests.engine.gradients import bound_by, relative_error
from tests.engine.small_models import TINY, ragged_samples

DATA = ragged_samples(4, longest=24)
TOKENS = torch.arange(24)[None]


def make_base(folder: Path, seed: int = 0) -> None:
    """A model folder with weights and tokenizer, fp32."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig.from_dict({**TINY["llama"], "vocab_size": 260, "tie_word_embeddings": True})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def run(base: Path, out: Path, zero_stage: int, precision: str, lora: str | None, quantize: str | None = None) -> None:
    """Three steps, with a checkpoint after each and the final model; the second is the best. Runs on ranks."""
    plan = plan_here(
        zero_stage, 4, 1,
        {"model": str(base), "precision": precision, "learning_rate": 1e-2, "lora": lora and Lora.of(lora),
         "quantize": quantize},
        persistence_threshold_elements=100,
    )  # fmt: skip
    spec = resolve_request(plan.request)
    tokenizer, _ = tokenizer_for(spec, None, None)
    spec = spec.for_tokenizer(tokenizer)
    with running(plan, spec.build(dtype=DTYPES[precision])) as engine:
        if engine.rank == 0:
            out.mkdir()
            run_folder.record(plan, RunSettings(out=out))
        for step, loss in enumerate((3.0, 1.0, 2.0), start=1):
            engine.train_step(DATA)
            saving.save(engine, out / "checkpoints", Progress(step=step, validation_loss=loss), keep=3)
        saving.save_model(engine, out / "model", tokenizer, uses_cache=spec.uses_cache)


def model(*words: object) -> int:
    return cli.run(["export", *map(str, words)])


def assert_same_files(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names - {"README.md"}:  # peft's, with a date
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def logits(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return model.to(dtype).eval()(input_ids=TOKENS).logits.double()


@pytest.mark.parametrize(
    ("zero_stage", "precision", "lora"),
    [
        (3, "bf16", None),
        (3, "fp32", "r=4,dora"),
        pytest.param(0, "fp32", None, marks=pytest.mark.exhaustive),
        pytest.param(2, "bf16", "r=4", marks=pytest.mark.exhaustive),
    ],
)
def test_the_last_checkpoint_s_folder_is_that_of_the_run(
    zero_stage: int, precision: str, lora: str | None, tmp_path: Path, two_ranks: Ranks
) -> None:
    make_base(tmp_path / "base")
    out = tmp_path / "run"
    two_ranks.run(run, tmp_path / "base", out, zero_stage, precision, lora)
    for own in ("last.tmp", "last.old"):  # folders of the user's
        (tmp_path / own).mkdir()
    assert model(out, "-o", tmp_path / "last") == 0
    assert (tmp_path / "last.tmp").exists() and (tmp_path / "last.old").exists()
    assert_same_files(tmp_path / "last", out / "model")
    if lora is not None:
        assert model(out, "-o", tmp_path / "merged", "--merge") == 0
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        error, bound, dtype = merged_error(base, out, tmp_path / "merged")
        assert dtype == torch.float32, "as the base's folder has it, whatever it was trained in"
        assert error < bound


def merged_error(base: Any, out: Path, merged: Path) -> tuple[float, float, torch.dtype]:
    """Return how far a merged model is off adapters around this base, how far it may be in fp32, and its type."""
    adapted = {"logits": logits(peft.PeftModel.from_pretrained(base, out / "model"))}
    exact = {"logits": logits(peft.PeftModel.from_pretrained(base, out / "model"), torch.float64)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(merged)
    dtype = loaded.dtype
    return relative_error({"logits": logits(loaded)}, exact), bound_by(adapted, exact), dtype


@pytest.mark.parametrize(
    ("zero_stage", "precision"), [(3, "fp32"), pytest.param(2, "bf16", marks=pytest.mark.exhaustive)]
)
def test_adapters_are_merged_into_what_quantisation_made_of_their_base(
    zero_stage: int, precision: str, tmp_path: Path, two_ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base")
    out = tmp_path / "run"
    two_ranks.run(run, tmp_path / "base", out, zero_stage, precision, "r=4", "nf4")
    assert model(out, "-o", tmp_path / "merged", "--merge") == 0
    kept_in = str(DTYPES[precision]).removeprefix("torch.")
    said = f"with its adapters merged in {kept_in} into what nf4 made of its base"
    assert capsys.readouterr().out.splitlines()[-1].endswith(said)
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=DTYPES[precision], quantization_config=asked
    ).dequantize(torch.float32)
    error, bound, dtype = merged_error(base, out, tmp_path / "merged")
    assert dtype == DTYPES[precision]
    assert error < (bound if precision == "fp32" else 4 * 2**-8)  # of the rounding of bf16


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> Path:
    """A folder with a base and a run."""
    folder = tmp_path_factory.mktemp("adapters")
    make_base(folder / "base")
    two_ranks.run(run, folder / "base", folder / "run", 2, "fp32", "r=4")
    return folder


def test_a_checkpoint_is_the_last_the_best_a_step_or_a_folder(
    with_adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = with_adapters / "run"
    for number, (given, words) in enumerate(
        [(out, ["--step", "best"]), (out, ["--step", "2"]), (out / "checkpoints" / "step-000002", [])]
    ):
        assert model(given, "-o", tmp_path / f"{number}", *words) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"wrote {tmp_path}/0: the adapters of step 2, whose base is {with_adapters / 'base'}"
    )
    assert_same_files(tmp_path / "0", tmp_path / "1")
    assert_same_files(tmp_path / "0", tmp_path / "2")
    last = (out / "model" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "0" / "adapter_model.safetensors").read_bytes() != last


def test_what_cannot_be_is_refused(
    with_adapters: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = with_adapters / "run"
    one = run / "checkpoints" / "step-000001"
    assert model("nowhere", "-o", "x") == 2
    assert model(run, "-o", run) == 2
    assert model(run, "-o", "x", "--step", "9") == 6
    assert model(one, "-o", "x", "--step", "2") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said == [
        "error: there is no run in nowhere",
        f"error: {run} is there already",
        f"error: there is no checkpoint of step 9 in {run}/checkpoints",
        "error: --step 2 was given for one checkpoint",
    ]


def test_adapters_are_not_merged_into_another_base(
    with_adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, kept = with_adapters / "base", tmp_path / "kept"
    base.rename(kept)
    try:
        make_base(base, seed=1)
        assert model(with_adapters / "run", "-o", tmp_path / "merged", "--merge") == 4
    finally:
        for path in base.iterdir():
            path.unlink()
        base.rmdir()
        kept.rename(base)
    assert "holds adapters of another base model" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
