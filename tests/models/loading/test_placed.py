"""Weights that go to their place as they are read are those of transformers' own `from_pretrained`, bit for bit."""

import gc
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.engine.engine import initialize
from frugal.models.loading import placed
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from frugal.models.spec import random_weights

TASKS = {"bert": "masked-lm", "t5": "seq2seq"}
FOLDERS = ("llama", "bert", "untied-pickle")
MORE_FOLDERS = ("gpt2", "t5", "mixtral", "pickle", "old-pickle")
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pretrained models: one file, several, a lacking head, tied, with experts of their own, and pickles."""
    import transformers as t

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("pretrained")
    gpt2 = t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=301, n_positions=64))
    gpt2.save_pretrained(folder / "gpt2")
    shards: dict[str, Any] = {"max_shard_size": "50KB"}
    llama = t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=301))
    llama.save_pretrained(folder / "llama", **shards)
    t.BertModel(t.BertConfig(**SMALL, vocab_size=301)).save_pretrained(folder / "bert")
    t5 = t.T5Config(num_layers=2, d_model=32, d_ff=48, num_heads=4, d_kv=8, vocab_size=301)
    t.T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    mixtral = t.MixtralConfig(**SMALL, num_key_value_heads=2, vocab_size=301, num_local_experts=4)
    t.MixtralForCausalLM(mixtral).save_pretrained(folder / "mixtral", **shards)
    for name, options in (("pickle", {}), ("old-pickle", {"_use_new_zipfile_serialization": False})):
        gpt2.config.save_pretrained(folder / name)
        torch.save(gpt2.state_dict(), folder / name / "pytorch_model.bin", **options)
    states = {name: tensor.clone() for name, tensor in gpt2.state_dict().items()}
    states["lm_head.weight"] += 1  # the configuration ties it, the file says otherwise
    gpt2.config.save_pretrained(folder / "untied-pickle")
    torch.save(states, folder / "untied-pickle" / "pytorch_model.bin")
    return folder


def states(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, under each of their names, and buffers; put together where ranks hold parts."""
    whole = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            whole[name] = parameter.detach().clone()
    return whole | {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}


def hashes(states: dict[str, Tensor]) -> dict[str, str]:
    """Return dtype, shape and a hash of the bytes of each tensor."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} "
        + hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in states.items()
    }


def in_place(model: str, zero_stage: int, precision: str = "bf16") -> tuple[dict[str, str], tuple[str, ...], int]:
    """On a rank: the weights when they are in place, which of them are random, and the rank's own elements."""
    plan = plan_by_hand(
        world_size=2, global_batch=2, micro_batch=1, zero_stage=zero_stage, request={"precision": precision}
    )
    spec = resolve(model, TASKS.get(Path(model).name))
    module = placed.build(spec, plan, torch.device("cpu"), seed=5)
    num_own, new = sum(parameter.numel() for parameter in module.parameters()), random_weights(module)
    engine = initialize(module, plan, CausalLM())
    found = hashes(states(engine.module))
    engine.destroy()
    del engine, module
    gc.collect()
    return found, new, num_own


def of_one_process(model: str, precision: str = "bf16") -> dict[str, str]:
    """The same by transformers alone."""
    import transformers as t

    auto = {"bert": t.AutoModelForMaskedLM, "t5": t.AutoModelForSeq2SeqLM}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        made = auto.get(Path(model).name, t.AutoModelForCausalLM).from_pretrained(model, dtype=dtype)
    return hashes(states(made))


@pytest.mark.parametrize(
    "name", [*FOLDERS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_FOLDERS)]
)
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_every_rank_ends_up_with_what_from_pretrained_gives(
    two_ranks: Ranks, folders: Path, name: str, zero_stage: int
) -> None:
    expected = of_one_process(str(folders / name))
    for found, new, own in two_ranks.run(in_place, str(folders / name), zero_stage):
        assert found == expected
        assert bool(new) == (name == "bert")
        assert (own == 0) == (zero_stage == 3), "before DeepSpeed's engine is made, ZeRO-3 has split all of them"


@pytest.mark.parametrize("name", MORE_FOLDERS)
def test_a_whole_model_is_loaded_the_same(folders: Path, name: str) -> None:
    module = resolve(str(folders / name), TASKS.get(name)).build(dtype=torch.float32, seed=5)
    assert hashes(states(module)) == of_one_process(str(folders / name), "fp32")


def adapted_in_place(model: str, task: str | None, lora: str, zero_stage: int) -> tuple[dict[str, str], dict[str, str]]:
    """On a rank: a model with adapters in place, and that of one process."""
    spec = replace(resolve(model, task, num_labels=3 if task else None), lora=Lora.of(lora))
    plan = plan_by_hand(world_size=2, global_batch=2, micro_batch=1, zero_stage=zero_stage)
    module = placed.build(spec, plan, torch.device("cpu"), seed=5)
    engine = initialize(module, plan, CausalLM())
    found = hashes(states(engine.module))
    engine.destroy()
    return found, hashes(states(spec.build(dtype=torch.float32, seed=5)))


@pytest.mark.parametrize(
    ("name", "task", "lora"),
    [
        ("llama", None, "r=4,dora"),
        ("llama", "sequence-classification", "r=4"),
        *(pytest.param(name, None, "r=4", marks=pytest.mark.exhaustive) for name in ("gpt2", "llama/config.json")),
    ],
)
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_adapters_around_weights_in_place_are_those_of_one_process(
    two_ranks: Ranks, folders: Path, name: str, task: str | None, lora: str, zero_stage: int
) -> None:
    for found, expected in two_ranks.run(adapted_in_place, str(folders / name), task, lora, zero_stage):
        assert found == expected


def random_in_place(reference: str, zero_stage: int) -> tuple[dict[str, str], dict[str, str]]:
    """On a rank: random weights in place, and those of one process with the same seed."""
    found, _, _ = in_place(reference, zero_stage, "fp32")
    return found, hashes(states(resolve(reference).build(dtype=torch.float32, seed=5)))


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_random_weights_of_several_ranks_are_those_of_one_process(
    two_ranks: Ranks, folders: Path, zero_stage: int
) -> None:
    for found, expected in two_ranks.run(random_in_place, str(folders / "llama" / "config.json"), zero_stage):
        assert found == expected
