"""`frugal check`: the batch that a configuration comes to, and a verdict that is the dry run of its own settings."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.config.optimizers import Optimizer
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.pool import Pool
from frugal.planning.batch import BatchPlan
from frugal.planning.strategy import Strategy
from frugal.tools.check import deepspeed_json, verdict
from frugal.tools.check.checked import Check, check, resolved
from frugal.tools.check.gather import gather
from frugal.tools.check.report import report
from tests.commands import frugal

CONFIGS = Path(__file__).parent / "configs"
TINY = str(CONFIGS / "tiny-llama.json")
HIDDEN = 128
DEFAULT_3 = {
    "reduce_bucket_elements": HIDDEN**2,
    "prefetch_bucket_elements": int(0.9 * HIDDEN**2),
    "persistence_threshold_elements": 10 * HIDDEN,
    "max_live_elements": 10**9,
    "sub_group_elements": 10**9,
    "overlap_comm": True,
}
"""What a usual JSON for ZeRO-3 comes to, its sizes filled in from the hidden size."""
DEFAULT_2 = {
    "reduce_bucket_elements": HIDDEN**2, "prefetch_bucket_elements": 50_000_000, "max_live_elements": 10**9,
    "sub_group_elements": 10**9,
}  # fmt: skip


FULL = {"activation_checkpointing": "full"}
ZERO_2 = {"zero_stage": 2, "gradient_accumulation_dtype": "bf16", **DEFAULT_2}
ZERO_3 = {"zero_stage": 3, "gradient_accumulation_dtype": "bf16", **DEFAULT_3}
ACCELERATES_3 = {
    **ZERO_3, "reduce_bucket_elements": 500_000_000, "prefetch_bucket_elements": 50_000_000,
    "persistence_threshold_elements": 100_000,
}  # fmt: skip
"""With DeepSpeed's own sizes, which accelerate leaves to it."""
OPTIMIZER_ON_HOST = {"offload_optimizer": "cpu"}
ALL_ON_HOST = {**OPTIMIZER_ON_HOST, "offload_parameters": "cpu"}


def by(implementation: Any, seq_len: int, name: Any = "adamw", momentum: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return a request."""
    optimizer = Optimizer(name=name, implementation=implementation, momentum=momentum)
    return {"optimizer": optimizer, "seq_len": seq_len, **more}


@dataclass(frozen=True)
class Example:
    """A configuration, and what it comes to: worked out by hand from the tools' own code."""

    file: str
    gpus: int
    micro_batch: int
    steps: int
    strategy: dict[str, Any]
    request: dict[str, Any]
    rules: tuple[str, ...] = ()
    flags: dict[str, Any] = field(default_factory=dict)


EXAMPLES = {
    "deepspeed-zero2": Example(
        "deepspeed/zero2.json", gpus=2, micro_batch=4, steps=8, rules=("bf16-accumulation",), flags={"seq_len": 256},
        strategy={**ZERO_2, "overlap_comm": True, "reduce_bucket_elements": 200_000_000}, request=by("foreach", 256),
    ),
    "deepspeed-zero1-fp16": Example(
        "deepspeed/zero1-fp16.json", gpus=4, micro_batch=8, steps=2, rules=("loss-scale",), flags={"seq_len": 128},
        strategy={
            **ZERO_2, "zero_stage": 1, "gradient_accumulation_dtype": "fp16", "reduce_bucket_elements": 5_000_000,
        },
        request=by("foreach", 128, precision="fp16"),
    ),
    "trainer-zero2": Example(
        "transformers/arguments.yaml", gpus=4, micro_batch=4, steps=8,
        strategy={**ZERO_2, **FULL}, request=by("fused", 512),
        rules=("bf16-accumulation", "evaluation-batch", "evaluation-keeps-logits", "round-robin-gradients"),
    ),
    "trainer-script-zero3": Example(
        "transformers/run_clm.sh", gpus=8, micro_batch=2, steps=4,
        strategy={**ZERO_3, "expandable_segments": True}, request=by("deepspeed", 256),
        rules=("evaluation-batch", "evaluation-keeps-logits", "large-live-parameters"),
    ),
    "trainer-zero3-offload": Example(
        "transformers/offload.json", gpus=2, micro_batch=1, steps=4, flags={"seq_len": 64},
        strategy={**ZERO_3, **FULL, **ALL_ON_HOST}, request=by("deepspeed", 64),
        rules=("unpinned-offload", "large-live-parameters"),
    ),
    "trl-sft-no-deepspeed": Example(
        "trl/sft.yaml", gpus=1, micro_batch=2, steps=8, rules=("packing-mixes-documents",),
        strategy={"zero_stage": 2, **FULL, "loss": "tiled", "reduce_bucket_elements": 28_672},
        request=by("fused", 256, lora="r=32,alpha=16,dropout=0.05,targets=q_proj,v_proj"),
    ),
    "trl-script-accelerate-zero3": Example(
        "trl/sft.sh", gpus=8, micro_batch=4, steps=2, rules=("large-bucket", "large-live-parameters"),
        strategy={**ACCELERATES_3, **FULL, "loss": "tiled"}, request=by("fused", 128),
    ),
    "accelerate-zero2-offload": Example(
        "accelerate/zero2-offload.yaml", gpus=2, micro_batch=4, steps=2, rules=("large-bucket",),
        strategy={**ZERO_2, **OPTIMIZER_ON_HOST, "reduce_bucket_elements": 500_000_000},
        request=by(None, 64), flags={"seq_len": 64, "micro_batch": 4},
    ),
    "axolotl-lora-zero1": Example(
        "axolotl/lora-8b.yml", gpus=2, micro_batch=2, steps=4, rules=("large-bucket",),
        strategy={**ZERO_2, "zero_stage": 1, **FULL, "overlap_comm": True, "reduce_bucket_elements": 500_000_000},
        request=by(None, 256, "adamw-8bit", lora="r=16,alpha=32,dropout=0.05,targets=all-linear"),
    ),
    "axolotl-full-zero3": Example(
        "axolotl/fft-zero3.yml", gpus=4, micro_batch=1, steps=1,
        strategy={**ZERO_3, **FULL, "loss": "tiled"}, request=by("deepspeed", 128),
        rules=("packing-mixes-documents", "large-live-parameters"),
    ),
    "accelerate-shared-samples": Example(
        "accelerate/zero3-shared-samples.yaml", gpus=4, micro_batch=1, steps=2,
        strategy={**ACCELERATES_3, "sequence_parallel": 2}, request=by(None, 256, sequence_parallel=2),
        rules=("large-bucket", "large-live-parameters"), flags={"seq_len": 256, "micro_batch": 1},
    ),
    "axolotl-shared-samples-tiled": Example(
        "axolotl/long-context.yml", gpus=4, micro_batch=1, steps=4, rules=("round-robin-gradients",),
        strategy={**ZERO_2, **FULL, "mlp": "tiled", "sequence_parallel": 2},
        request=by("foreach", 512, sequence_parallel=2),
    ),
    "llama-factory-lora-zero3": Example(
        "llama-factory/lora-zero3.yaml", gpus=2, micro_batch=1, steps=2, rules=("large-live-parameters",),
        strategy={**ZERO_3, **FULL}, request=by("deepspeed", 256, lora="r=8,alpha=16,targets=all-linear"),
    ),
    "llama-factory-full-zero3-offload": Example(
        "llama-factory/full-zero3-offload.yaml", gpus=2, micro_batch=2, steps=4,
        strategy={**ZERO_3, **ALL_ON_HOST}, request=by("fused", 128, "sgd", momentum=0.9),
        rules=("unpinned-offload", "large-live-parameters"),
    ),
    "llama-factory-lora-no-deepspeed": Example(
        "llama-factory/lora-one-gpu.yaml", gpus=1, micro_batch=2, steps=8, rules=("evaluation-keeps-logits",),
        strategy={"zero_stage": 2, **FULL, "reduce_bucket_elements": 14_336},
        request=by("fused", 256, lora="r=16,alpha=32,targets=q_proj,v_proj"),
    ),
    "llama-factory-qlora-no-deepspeed": Example(
        "llama-factory/qlora-8b.yaml", gpus=1, micro_batch=1, steps=8,
        strategy={"zero_stage": 2, **FULL, "reduce_bucket_elements": 37_376},
        request=by("fused", 256, lora="r=8,alpha=16,targets=all-linear", quantize="nf4"),
    ),
}  # fmt: skip
QUICK = ("trainer-script-zero3", "axolotl-lora-zero1")


def checked(files: tuple[str, ...], pool: Pool | None, gpus: int | None = None, mem: str = "6G", **flags: Any) -> Check:
    settings, documents = gather([CONFIGS / name for name in files], {"model": TINY, **flags})
    return check(settings, documents, {"gpus": gpus, "mem": mem}, with_plan=False, pool=pool)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.exhaustive) for each in EXAMPLES]
)
def test_the_verdict_is_the_dry_run_of_the_same_settings(name: str, pool: Pool) -> None:
    example = EXAMPLES[name]
    done = checked((example.file,), pool, example.gpus, **example.flags)
    batch = example.micro_batch * example.steps * example.gpus // example.strategy.get("sequence_parallel", 1)
    assert (done.arithmetic.global_batch, done.arithmetic.micro_batch) == (batch, example.micro_batch)
    assert {finding.rule for finding in done.findings} == {*example.rules}
    wanted = {"model": TINY, "gpus": example.gpus, "mem": "6G", **example.request}
    request, cluster, _ = understand(wanted)
    with DryRunSource(request, cluster, pool=pool) as source:
        memory = source.dry_run(Strategy(**example.strategy), example.micro_batch, example.steps)
    assert done.verdict is not None
    assert done.verdict.subject.strategy == Strategy(**example.strategy)
    host = done.verdict.memory.host_bytes_per_node
    assert host == pytest.approx(memory.host_bytes_per_node, abs=64)  # a number more or less of the optimizer's
    assert replace(done.verdict.memory, host_bytes_per_node=0) == replace(memory, host_bytes_per_node=0)
    assert done.verdict.fits == memory.fits and done.exit_code == (0 if memory.fits else 3)


@pytest.mark.parametrize("name", ["accelerate-shared-samples", "axolotl-shared-samples-tiled"])
def test_gpus_that_share_samples_count_once_and_every_field_of_theirs_is_known(name: str) -> None:
    example = EXAMPLES[name]
    settings, _ = gather([CONFIGS / example.file], {"model": TINY, **example.flags})
    deepspeed, arithmetic = resolved(settings, example.gpus)
    assert deepspeed is not None and not settings.unknown and not settings.refusals
    assert (arithmetic.num_takers, arithmetic.global_batch) == (2, 2 * example.micro_batch * example.steps)
    assert str(arithmetic).startswith(f"{arithmetic.global_batch} samples = 2 groups of 2 GPUs x micro-batch")
    assert deepspeed_json.strategy(settings, deepspeed).sequence_parallel == 2


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({"sequence_parallel_size": 2}, ()),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, ()),
        ({"tensor_parallel": {"autotp_size": 2}}, ("`tensor_parallel` splits the model otherwise than ZeRO",)),
    ],
)
def test_deepspeeds_json_says_how_many_gpus_share_samples(
    more: dict[str, Any], refused: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    file.write_text(json.dumps(config | more))
    settings, _ = gather([file], {"model": TINY, "seq_len": 64})
    _, arithmetic = resolved(settings, 4)
    assert tuple(each.text for each in settings.refusals) == refused and not settings.unknown
    assert arithmetic.global_batch == 8 and not settings.findings
    assert arithmetic.accumulation_steps == (1 if refused else 2), "4 GPUs, or 2 groups"


def test_gpus_that_do_not_divide_into_groups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "axolotl" / "long-context.yml")
    code, _, err = frugal(capsys, "check", file, "--model", TINY, "--gpus", "3", "--mem", "6G")
    assert code == 2
    assert err == (
        "error: 2 GPUs cannot share samples on 3 GPUs\n"
        f"  because {file}:9 names 2, and 3 is no multiple of it\n\n"
        "hint: check on 2, for instance with --gpus\n"
    )


@pytest.mark.exhaustive
def test_a_model_whose_samples_cannot_be_shared_is_not_checked(tmp_path: Path, pool: Pool) -> None:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(Path(TINY).read_text()) | heads))
    settings, documents = gather([CONFIGS / "axolotl" / "long-context.yml"], {"model": str(tmp_path)})
    done = check(settings, documents, {"gpus": 4, "mem": "6G"}, pool=pool)
    assert done.verdict is None and done.exit_code == 2
    assert report(done).startswith("not checked: ") and "heads" in report(done).splitlines()[0]


@pytest.mark.parametrize("name", ["zero2-auto", "zero3-auto", "zero3-offload"])
def test_auto_comes_to_what_transformers_makes_of_it(name: str) -> None:
    """Its own code fills in the same JSON, with the same arguments, on one rank."""
    from transformers import AutoConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    path = CONFIGS / "deepspeed" / f"{name}.json"
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    args = TrainingArguments("out", **arguments, bf16=True, use_cpu=True, report_to=[])
    theirs = HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    theirs.trainer_config_process(args)
    theirs.trainer_config_finalize(args, SimpleNamespace(config=AutoConfig.from_pretrained(TINY)), 100)
    config = theirs.config

    trainer = CONFIGS / "transformers" / "arguments.yaml"
    settings, _ = gather([trainer, path], {"model": TINY, "micro_batch": 3, "accumulation_steps": 4})
    deepspeed, arithmetic = resolved(settings, 1)
    assert deepspeed is not None
    assert deepspeed.batch == (
        config["train_batch_size"], config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    )  # fmt: skip
    assert arithmetic.global_batch == config["train_batch_size"] == 12
    filled = config["zero_optimization"]
    sizes = {key: value for key, value in filled.items() if key in deepspeed.zero and value != "auto"}
    assert {key: deepspeed.zero[key] for key in sizes} == sizes
    assert deepspeed.precision == ("bf16" if config["bf16"]["enabled"] else "fp32")


def test_a_batch_that_deepspeed_refuses_is_an_error_with_its_place(tmp_path: Path, pool: Pool) -> None:
    file = tmp_path / "ds.json"
    file.write_text("""{
  "train_batch_size": 100,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000}
}
""")
    done = checked((str(file),), pool, 2, seq_len=64)
    assert done.exit_code == 2
    assert (
        f"error: {file}:2: train_batch_size 100 is not 4 x 4 x 2 = 32: DeepSpeed stops with `Check batch related "
        "parameters`  [batch-mismatch]" in report(done)
    )


def test_auto_that_nobody_fills_in_is_refused_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "deepspeed" / "zero2-auto.json")
    code, _, err = frugal(capsys, "check", file, "--model", TINY, "--gpus", "2", "--mem", "6G")
    assert code == 2
    assert f"`train_batch_size` in {file}:13 is auto, and no tool fills it in" in err
    settings, _ = gather([Path(file)], {"model": TINY, "micro_batch": 2, "accumulation_steps": 1, "seq_len": 64})
    deepspeed, _ = resolved(settings, 2)
    assert deepspeed is not None
    nobodys = {each.name: each.value for each in deepspeed.filled if not each.by}
    assert nobodys["zero_optimization.reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize(("name", "batch"), [("accelerate/fsdp.yaml", 16), ("axolotl/qlora-fsdp.yml", 16)])
def test_fsdp_is_said_not_to_be_deepspeed_and_its_batch_is_told(name: str, batch: int, pool: Pool) -> None:
    flags = {"micro_batch": 4, "seq_len": 64} if name.startswith("accelerate") else {}
    done = checked((name,), pool, 4, **flags)
    assert done.verdict is None and done.exit_code == 2
    assert done.arithmetic.global_batch == batch
    assert "FSDP is not DeepSpeed" in report(done)


def of_a_base(tmp_path: Path, *lines: str) -> Check:
    """The same with other quantisation of the base."""
    text = (CONFIGS / "llama-factory" / "qlora-8b.yaml").read_text()
    for line in lines:
        key = line.partition(":")[0]
        text = "\n".join(line if old.startswith(f"{key}:") else old for old in text.splitlines())
    (tmp_path / "changed.yaml").write_text(text)
    return checked((str(tmp_path / "changed.yaml"),), None, 1)


def test_a_base_in_8_bits_and_those_of_other_libraries_are_not_checked(tmp_path: Path) -> None:
    eight = of_a_base(tmp_path, "quantization_bit: 8")
    assert eight.verdict is None and eight.exit_code == 2
    assert "the base in int8: columns of activations with an outlier" in report(eight)
    other = of_a_base(tmp_path, "quantization_method: hqq")
    assert other.verdict is None and other.exit_code == 2
    assert "weights that hqq quantises" in report(other)


def test_a_field_that_is_not_known_is_listed_with_its_line(pool: Pool) -> None:
    settings, _ = gather([CONFIGS / "llama-factory" / "lora-one-gpu.yaml"], {})
    assert [str(place).rpartition("/")[2] + " " + place.key for place in settings.unknown] == [
        "lora-one-gpu.yaml:18 my_own_field"
    ]


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*/*.*")), ids=lambda path: path.name)
def test_every_other_field_of_the_examples_is_known(path: Path) -> None:
    settings, _ = gather([path], {"micro_batch": 1, "accumulation_steps": 1})
    assert {place.key for place in settings.unknown} <= {"my_own_field"}


def test_every_field_of_training_arguments_is_known_or_read() -> None:
    """Take all fields of the installed transformers: a new one would be listed as unknown."""
    from dataclasses import fields

    from transformers import TrainingArguments

    from frugal.tools.check.document import Document, Settings
    from frugal.tools.check.tools import table_of, take

    names = [each.name for each in fields(TrainingArguments) if each.init]
    settings = Settings()
    take(Document(Path("all.yaml"), "transformers", dict.fromkeys(names)), settings, table_of("transformers"))
    assert names and not settings.unknown


def test_defaults_are_those_of_training_arguments() -> None:
    from transformers import TrainingArguments

    from frugal.tools.check.tools import table_of

    args = TrainingArguments("out", use_cpu=True, report_to=[])
    theirs = (args.per_device_train_batch_size, args.optim, args.learning_rate, args.max_grad_norm)
    names = ("micro_batch", "optim", "learning_rate", "gradient_clipping")
    assert theirs == tuple(table_of("transformers")["default"][name] for name in names)


def test_an_unknown_field_inside_a_block_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true,\n "immediate_grad_update": true},\n "zero_optimization": {"stage": 2}}')
    settings, _ = gather([file], {})
    assert [(str(place), place.key) for place in settings.unknown] == [(f"{file}:2", "bf16.immediate_grad_update")]


@pytest.mark.parametrize(("stage", "said"), [(2, "1.86 GiB of every GPU, twice"), (3, "953.7 MiB of every GPU,")])
def test_a_default_bucket_is_named_with_its_size_where_it_is_left_open(stage: int, said: str, tmp_path: Path) -> None:
    """ZeRO-1 and 2 have a second one for overlapped communication, ZeRO-3 has one."""
    from frugal.tools.check import traps

    file = tmp_path / "acc.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 2\n"
        f"deepspeed_config:\n  zero_stage: {stage}\n"
    )
    settings, _ = gather([file], {"model": TINY, "micro_batch": 1})
    assert settings.deepspeed is not None
    settings.deepspeed["zero_optimization"]["overlap_comm"] = True  # which accelerate leaves to DeepSpeed
    findings = {each.rule: each for each in traps.traps(settings, *resolved(settings, 2))}
    assert said in findings["large-bucket"].text
    assert str(findings["large-bucket"].place) == f"{file}:4"


REAL: list[tuple[str, dict[str, Any]]] = [
    ("deepspeed/zero2.json", {"overlap_comm": False, "reduce_bucket_size": 200_000}),
    ("deepspeed/zero1-fp16.json", {}),
    ("deepspeed/zero3-auto.json", {"overlap_comm": False}),
]
"""JSONs, and what is changed in them: a loop's dry run counts side streams otherwise, which is not what is tested."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "changed"), REAL)
def test_the_verdict_is_what_deepspeed_takes_with_that_json(
    name: str, changed: dict[str, Any], tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed itself gets the JSON, its `auto` filled in by transformers; the loss is the model's own."""
    config = json.loads((CONFIGS / name).read_text())
    config["zero_optimization"].update(changed)
    config |= {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "gradient_clipping": 1.0}
    config.pop("scheduler", None)
    sizes = {"reduce_bucket_size": HIDDEN**2, "stage3_prefetch_bucket_size": int(0.9 * HIDDEN**2)}
    sizes |= {"stage3_param_persistence_threshold": 10 * HIDDEN}
    zero = config["zero_optimization"]
    zero.update({key: size for key, size in sizes.items() if zero.get(key) == "auto"})
    if "fp16" not in config:
        config["bf16"] = {"enabled": True}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(config=str(file), model=TINY))
    code, out, err = frugal(capsys, "dryrun", f"{script}:step", "--gpus", "2", "--mem", "6G", "--json")
    assert code == 0, err
    theirs = json.loads(out)
    done = checked((str(file),), pool, 2, seq_len=128)
    assert done.verdict is not None
    live = sum(size for category, size in theirs["categories"].items() if category != "rounding")
    assert done.verdict.memory.live_bytes == pytest.approx(live, rel=0.005)


LOOP = """
import json
import deepspeed, torch
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG = json.load(open("{config}"))

def engine():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("{model}", use_cache=False)).train()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]

def batch():
    return [torch.randint(0, 2000, (4, 128)) for _ in range(2)]

def step(engine, batch):
    for ids in batch:
        ids = ids.to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
"""


@given(
    stage=st.integers(0, 3), offload=st.sampled_from(("none", "cpu")), micro=st.sampled_from((1, 4, 6)),
    gpus=st.integers(1, 3), overlap=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_fields_of_a_change_are_those_of_the_strategy_that_is_evaluated(
    stage: int, offload: Any, micro: int, gpus: int, overlap: bool
) -> None:
    """Also where two changes name the same field; and no change touches the global batch."""
    request, cluster, _ = understand({"model": TINY, "gpus": gpus, "mem": "6G", "seq_len": 64})
    strategy = Strategy(
        zero_stage=stage, offload_optimizer=offload if stage else "none", reduce_bucket_elements=500_000_000,
        overlap_comm=overlap and stage > 0,
    )  # fmt: skip
    batch = BatchPlan.of(12 * micro * gpus, (micro,) * gpus)
    subject = verdict.Subject(request=request, cluster=cluster, strategy=strategy, batch=batch)
    all_changes = list(verdict._changed(subject))
    assert len(all_changes) >= 4
    for words, changed in all_changes:
        fields, now = verdict._fields(subject, changed), changed.strategy
        assert words and fields and changed.batch.global_batch == batch.global_batch
        assert fields.get("zero_optimization.stage", stage) == now.zero_stage
        assert "zero_optimization.stage" in fields or not any("offload" in field for field in fields)
        assert fields.get("zero_optimization.offload_optimizer.device", strategy.offload_optimizer) == (
            now.offload_optimizer
        )
        assert fields.get("train_micro_batch_size_per_gpu", micro) == changed.batch.largest_micro_batch
