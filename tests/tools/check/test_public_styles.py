"""Files in the style of public ones that `frugal check` once misread (`bench.check.public`)."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeeds
from hypothesis import given, settings
from hypothesis import strategies as st

from frugal.errors import RequestError
from frugal.tools.check.checked import resolved
from frugal.tools.check.deepspeed_json import REMOVED, REMOVED_OF_ZERO
from frugal.tools.check.document import Settings
from frugal.tools.check.gather import gather
from frugal.tools.check.traps import traps

TINY = str(Path(__file__).parent / "configs" / "tiny-llama.json")
TRAINS = "--model_name_or_path base --output_dir out --learning_rate 1e-4 --per_device_train_batch_size 4"


def of(folder: Path, *texts: tuple[str, str], given: int = 1) -> Settings:
    """The settings of files by name and text, of which the first ones are given on the command line."""
    for name, text in texts:
        (folder / name).write_text(text)
    return gather([folder / name for name, _ in texts[:given]], {"model": TINY})[0]


def why(of_file: Settings) -> str:
    return "; ".join(each.text for each in of_file.refusals)


SHARED = {
    "axolotl.yaml": ("tensor_parallel_size", None, None),
    "llama-factory.yaml": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "transformers.json": ("parallelism_config.tp_size", None, "parallelism_config.cp_size"),
    "accelerate.yaml": (
        "parallelism_config.parallelism_config_tp_size", None, "parallelism_config.parallelism_config_cp_size",
    ),
}  # fmt: skip
BATCHES: dict[str, dict[str, Any]] = {
    "axolotl.yaml": {"base_model": "base", "micro_batch_size": 3, "gradient_accumulation_steps": 2},
    "llama-factory.yaml": {
        "finetuning_type": "full", "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2,
    },
    "transformers.json": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    "accelerate.yaml": {"distributed_type": "MULTI_GPU"},
}  # fmt: skip


@given(
    file=st.sampled_from(sorted(SHARED)), sizes=st.tuples(*[st.sampled_from((1, 2, 4))] * 3), replicas=st.integers(1, 4)
)
@settings(max_examples=30, deadline=None)
def test_gpus_that_split_the_model_or_a_sample_have_the_same_samples(
    file: str, sizes: tuple[int, int, int], replicas: int
) -> None:
    content, shared_by = json.loads(json.dumps(BATCHES[file])), 1
    for name, size in zip(SHARED[file], sizes, strict=True):
        if name is not None:
            block, _, key = name.rpartition(".")
            (content.setdefault(block, {}) if block else content)[key] = size
            shared_by *= size
    with TemporaryDirectory() as folder:
        read = of(Path(folder), (file, json.dumps(content)))
    read.micro_batch, read.accumulation_steps = read.micro_batch or 3, read.accumulation_steps or 2
    _, arithmetic = resolved(read, replicas * shared_by)
    assert arithmetic.global_batch == 3 * 2 * replicas
    assert bool(read.refusals) == (shared_by > 1)


@given(in_file=st.integers(1, 64), in_flag=st.none() | st.integers(1, 64), machines=st.sampled_from((1, 2, 4)))
@settings(max_examples=20, deadline=None)
def test_flags_of_accelerate_launch_win_over_its_file(in_file: int, in_flag: int | None, machines: int) -> None:
    launcher = f"distributed_type: MULTI_GPU\nnum_processes: {in_file * machines}\nnum_machines: {machines}\n"
    flag = "" if in_flag is None else f"--num_processes {in_flag * machines} "
    for precision in ("--mixed_precision bf16", ""):
        script = f"accelerate launch --config_file a.yaml {flag}{precision} train.py {TRAINS} --bf16"
        with TemporaryDirectory() as folder:
            read = of(Path(folder), ("train.sh", script), ("a.yaml", launcher))
        assert (read.gpus, read.nodes, read.precision) == (in_flag or in_file, machines, "bf16")


def test_a_flag_of_accelerate_launch_that_is_not_known_leaves_open_what_its_file_says(tmp_path: Path) -> None:
    script = f"accelerate launch --config_file a.yaml --num_processes $N train.py {TRAINS}"
    launcher = ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert of(tmp_path, ("train.sh", script), launcher).gpus is None


@pytest.mark.parametrize("micro", [3, "auto"])
def test_accelerate_fills_in_the_batch_of_a_micro_batch_in_the_json(micro: Any, tmp_path: Path) -> None:
    """`_prepare_deepspeed` of its `accelerator.py` takes the JSON's micro-batch where it is a number."""
    content = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": 2}}
    launcher = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    read = of(tmp_path, ("a.yaml", launcher), ("ds.json", json.dumps(content)))
    if micro == "auto":
        with pytest.raises(RequestError, match="accelerate takes it from the data loader of the training script"):
            resolved(read, 4)
    else:
        assert resolved(read, 4)[1].global_batch == 12


def test_a_script_of_its_own_that_names_a_base_model_has_trainers_batch(tmp_path: Path) -> None:
    read = of(tmp_path, ("a.yaml", "base_model: gpt2\nper_device_train_batch_size: 4\ntotal_length: 9\n"))
    assert (read.tool, read.micro_batch) == ("transformers' Trainer", 4) and "`total_length`" in why(read)


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=$HOME/a data.micro_batch_size=8", "verl.trainer"),
        ("torchrun tasks/train.py $(dirname $0)/config.py output_dir ${OUT}", "tasks/train.py"),
        ("accelerate launch train.py --batch-size 2 --lr 1e-4 --seq-length 16000", "train.py"),
    ],
)
def test_a_script_with_flags_of_its_own_is_named(script: str, program: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no configuration that frugal knows") as error:
        of(tmp_path, ("a.sh", script))
    assert f"it starts {program}" in error.value.because[0] and "frugal dryrun" in str(error.value.hint)


def test_accelerates_flags_alone_say_how_deepspeed_runs(tmp_path: Path) -> None:
    script = f"accelerate launch --use_deepspeed --zero_stage 3 --num_processes $N train.py {TRAINS}"
    read = of(tmp_path, ("train.sh", script))
    assert read.deepspeed is not None and read.deepspeed["zero_optimization"]["stage"] == 3 and read.gpus is None
    conf = ("stage3.conf", '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 1e6}, "train_batch_size": "auto"}')
    script = f"accelerate launch --use_deepspeed --deepspeed_config_file stage3.conf train.py {TRAINS}"
    read = of(tmp_path, ("train.sh", script), conf)
    assert read.deepspeed is not None and read.deepspeed["zero_optimization"]["reduce_bucket_size"] == 1e6


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("N=${N:-32}\nsrun --nodes=$((N / 8)) --ntasks=$N --ntasks-per-node=8 python x.py", 32),
        ("srun --nodes=2 --ntasks=8 python -u x.py", 8),
        ("srun --ntasks=1 python x.py", None),
        ("srun --nodes=4 --ntasks-per-node=1 torchrun --nproc_per_node 2 --nnodes 4 x.py", 8),
        ("python launch.py --num_nodes 2 --gpus 4 -- source setup.sh \\&\\& torchrun --nproc_per_node=4 x.py", 4),
    ],
)
def test_processes_are_those_that_start_the_script(script: str, ranks: int | None, tmp_path: Path) -> None:
    read = of(tmp_path, ("train.sh", f"{script} {TRAINS}\n"))
    assert (read.gpus and read.gpus * (read.nodes or 1), read.micro_batch) == (ranks, 4)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.sh", f"deepspeed main.py {TRAINS} --zero_stage 3 --deepspeed", "`zero_stage`: unknown"),
        ("b.sh", f"deepspeed main.py {TRAINS} --deepspeed", "the script itself decides how DeepSpeed runs"),
        ("j.sh", f"deepspeed main.py {TRAINS} --deepspeed 1", "the script itself decides how DeepSpeed runs"),
        ("k.yaml", "per_device_train_batch_size: 2\ndeepspeed: false\n", ""),
        ("c.sh", f"accelerate launch --config_file none.yaml x.py {TRAINS}", "`--config_file none.yaml` is not there"),
        ("l.sh", f"accelerate launch --config_file n.yaml --zero_stage 3 x.py {TRAINS}", "n.yaml` is not there"),
        ("d.yaml", "distributed_type: MULTI_CPU\nuse_cpu: true\n", "it trains on no GPU"),
        ("e.yaml", "per_device_train_batch_size: 2\nuse_cpu: true\n", "it trains on the CPU"),
        ("f.json", '{"train_batch_size": 8, "data_efficiency": {"enabled": true}}', "`data_efficiency` changes"),
        ("g.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}', ""),
        ("h.json", '{"train_batch_size": 8, "data_efficiency": {"enabled": false}}', ""),
        ("i.sh", f"deepspeed main.py {TRAINS} --enable_tensorboard --tensorboard_path out", ""),
    ],
)  # fmt: skip
def test_what_decides_memory_and_is_not_followed_is_named(name: str, text: str, reason: str, tmp_path: Path) -> None:
    told = why(of(tmp_path, (name, text)))
    assert reason in told and bool(reason) == bool(told)


def test_a_deepspeed_config_of_the_script_is_its_json(tmp_path: Path) -> None:
    file = ("ds.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    read = of(tmp_path, ("a.sh", f"deepspeed main.py {TRAINS} --deepspeed --deepspeed_config ds.json"), file)
    assert read.deepspeed is not None and read.deepspeed["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_at_stage_0_is_checked_with_torchs_adam_alone(precision: str, tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 takes FP16_Optimizer with its own Adam, FP16_UnfusedOptimizer with another."""
    for of_torch, is_refused in ((False, True), (True, False)):
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": of_torch}}
        content = {"train_batch_size": 8, precision: {"enabled": True}, "optimizer": optimizer}
        read = of(tmp_path, ("ds.json", json.dumps(content)))
        resolved(read, 8)
        assert ("FP16_Optimizer" in why(read)) == is_refused


@pytest.mark.parametrize(("device", "kernels"), [("none", "foreach"), ("cpu", "for-loop")])
def test_torchs_adam_updates_one_tensor_at_a_time_on_the_host(device: str, kernels: str, tmp_path: Path) -> None:
    content = {
        "train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}},
    }  # fmt: skip
    assert of(tmp_path, ("ds.json", json.dumps(content))).optimizer.implementation == kernels


@pytest.mark.parametrize("bf16", ["bf16", "bfloat16"])
@pytest.mark.parametrize("fp16", [None, "auto", False])
@pytest.mark.parametrize("asked", ["bf16", None])
def test_bf16_by_either_name_is_what_deepspeed_and_accelerate_make_of_it(
    bf16: str, fp16: Any, asked: str | None, tmp_path: Path
) -> None:
    """Alone DeepSpeed takes the old name, too; accelerate always adds the new one, by its own precision."""
    from accelerate import DeepSpeedPlugin

    block = {bf16: {"enabled": "auto" if asked else True}, **({} if fp16 is None else {"fp16": {"enabled": fp16}})}
    text = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, **block})
    if asked:
        plugin = DeepSpeedPlugin(hf_ds_config=json.loads(text) | {"gradient_accumulation_steps": 1})
        plugin.set_mixed_precision(asked)
        theirs = deepspeeds.get_bfloat16_config(plugin.deepspeed_config)
        files = (("a.yaml", f"per_device_train_batch_size: 4\n{asked}: true\ndeepspeed: ds.json\n"), ("ds.json", text))
    else:
        theirs, files = deepspeeds.get_bfloat16_config(json.loads(text)), (("ds.json", text),)
    deepspeed, _ = resolved(of(tmp_path, *files), 2)
    assert theirs.enabled and deepspeed is not None and deepspeed.precision == "bf16"


def test_every_key_that_deepspeed_removed_is_found(tmp_path: Path) -> None:
    assert set(REMOVED) == deepspeeds._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    assert set(REMOVED_OF_ZERO) == deepspeeds._REMOVED_ZERO_CONFIG_KEYS.keys()
    content = {name: {} for name in REMOVED} | {"zero_optimization": dict.fromkeys(REMOVED_OF_ZERO, 1)}
    read = of(tmp_path, ("ds.json", json.dumps({"train_batch_size": 8, **content})))
    found = [each for each in traps(read, *resolved(read, 8)) if each.rule == "removed-block"]
    assert len(found) == len(REMOVED) + len(REMOVED_OF_ZERO) and not read.unknown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "python x.py --model_name_or_path m --output_dir o --learning_rate 1e-4 --train_batch_size 1"),
        ("b.sh", "deepspeed x.py --finetuning_type full --train_micro_batch_size_per_gpu 4 --max_steps 9"),
        ("c.yaml", "base_model: gpt2\nnum_epochs: 1\nbatch_size_per_gpu: 4\n"),
        ("d.sh", "python x.py --model_name_or_path m --output_dir o --learning_rate 1e-4 --bs 1"),
    ],
)
def test_a_batch_by_another_name_has_no_default_of_the_tool(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no file says how large the micro-batch is") as error:
        resolved(of(tmp_path, (name, text)), 4)
    assert "other defaults than the tool's" in error.value.because[0]


def test_a_file_that_a_script_reads_and_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("train.yaml", "$1"):
        with pytest.raises(RequestError, match=re.escape(f"reads its settings from {name}, which is not there")):
            of(tmp_path, ("a.sh", f"axolotl train {name}"), ("b.yaml", ""))


@pytest.mark.parametrize("config", ["$1", "recipes/$NAME.yaml", "$1 $MORE"])
@pytest.mark.parametrize("is_first", [True, False])
def test_settings_that_a_scripts_caller_names_are_those_that_are_given_with_it(
    config: str, is_first: bool, tmp_path: Path
) -> None:
    recipe = (
        "recipe.yaml",
        "model_name_or_path: base\nper_device_train_batch_size: 3\nlearning_rate: 1\nuse_peft: on\n",
    )
    launch = (
        "a.sh",
        f"C={config}\nL='accelerate launch --num_processes 4'\nsrun bash -c \"$L run_grpo.py --config $C\"",
    )
    made = of(tmp_path, *((launch, recipe) if is_first else (recipe, launch)), given=2)
    assert (made.tool, made.micro_batch, made.gpus) == ("TRL", 3, 4) and "run_grpo.py says GRPO" in why(made)


def test_a_size_that_is_known_when_the_script_runs_is_asked_for_and_taken_from_the_flag(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"python x.py {TRAINS} --per_device_train_batch_size $2 --max_length $N\n")
    with pytest.raises(RequestError, match="'\\$N'") as error:
        gather([tmp_path / "a.sh"], {"micro_batch": 4})
    assert error.value.hint == "say --seq-len"
    made, _ = gather([tmp_path / "a.sh"], {"micro_batch": 4, "seq_len": 9})
    assert (made.micro_batch, made.seq_len) == (4, 9)


@pytest.mark.parametrize("key", ["dataset_num_proc: 4", "dataset_train_split: train", "max_prompt_length: 512"])
def test_trl_is_known_by_fields_that_trainer_lacks(key: str, tmp_path: Path) -> None:
    assert of(tmp_path, ("a.yaml", f"model_name_or_path: base\nper_device_train_batch_size: 2\n{key}\n")).tool == "TRL"


@pytest.mark.parametrize("key", ["tuner_type: lora", "rlhf_type: dpo", "split_dataset_ratio: 0.1"])
def test_files_of_ms_swift_are_refused_as_its_commands_are(key: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a file of ms-swift, whose arguments frugal does not read"):
        of(tmp_path, ("a.yaml", f"model: base\npacking: true\nmicro_batch_size: 1\n{key}\n"))
