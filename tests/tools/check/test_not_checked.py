"""`frugal check` has a verdict only where it read everything that decides memory; the rest it says in any case."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from frugal.config.hardware.local_host import has_cuda_driver
from frugal.dryrun.pool import Pool
from frugal.errors import RequestError
from frugal.tools.check import checked
from frugal.tools.check.checked import check
from frugal.tools.check.gather import gather
from tests.commands import frugal

HERE = Path(__file__).parent
TINY = str(HERE / "configs" / "tiny-llama.json")
ADAPTERS = """
model_name_or_path: {model}
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1e-4
max_seq_length: 128
use_peft: true
lora_target_modules: [q_proj, v_proj]
bf16: true
"""


def refusals(tmp_path: Path, text: str, name: str = "train.yaml") -> str:
    """Return why memory is not checked with these settings."""
    (tmp_path / name).write_text(text)
    settings, _ = gather([tmp_path / name], {"model": TINY})
    return "; ".join(each.text for each in settings.refusals)


@pytest.mark.parametrize(
    "field",
    [
        "use_peft_lora: true", "lora_enable: true", "use_lora: true", "bits: 4", "modules_to_save: [embed_tokens]",
        "lora_modules_to_save: [lm_head]", "source_max_len: 512", "tensor_model_parallel_size: 2", "vision_tower: clip",
        "data_max_length: 512", "use_eaft_loss: true", "freeze_backbone: true",
        "ref_model_path: llama", "reward_model: llama", "use_vllm: true", "num_experts: 8",
        "label_smoothing_factor: 0.1", "fsdp: full_shard", "micro_batch_size: 3",
        "mxfp4: true", "spectrum_config_path: a.yaml", "tp: 2", "ds_stage: 3", "num_frames: 16", "use_ema: true",
        "num_negatives: 4", "train_group_size: 8", "use_lomo: true", "micro_bs: 2",
        "pipe-parallel-size: 2", "prompt_tuning: true", "hidden_size: 64", "classifier_dropout: 0.1",
        "config_overrides: n_layer=2",
    ],
)  # fmt: skip
def test_a_field_that_may_decide_memory_is_named_instead_of_a_verdict(field: str, tmp_path: Path) -> None:
    assert refusals(tmp_path, ADAPTERS) == ""
    assert f"`{field.partition(':')[0]}" in refusals(tmp_path, ADAPTERS + field)


@pytest.mark.parametrize(
    "field",
    [
        "chat_template: llama",
        "dataset_mixer: {a: 1.0}",
        "lora_enable: false",
        "my_own_field: 3",
        "eval_max_length: 9",
        "mxfp4: false",
        "schema: 1",
        "step: 3",
    ],
)
def test_other_fields_and_those_that_are_off_leave_the_verdict(field: str, tmp_path: Path) -> None:
    assert refusals(tmp_path, ADAPTERS + field) == ""


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("base_model: llama\nmicro_batch_size: 1\nrl: dpo\n", "dpo"),
        ("base_model: llama\nmicro_batch_size: 1\nreward_model: true\n", "reward"),
        ("base_model: llama\nmicro_batch_size: 1\nprocess_reward_model: true\n", "reward"),
        ("finetuning_type: lora\nstage: kto\nlearning_rate: 1e-5\n", "kto"),
        ("finetuning_type: lora\nstage: rm\nlearning_rate: 1e-5\n", "rm"),
        ("per_device_train_batch_size: 2\nbeta: 0.1\noutput_dir: data/zephyr-dpo-full\n", "DPO"),
        ("per_device_train_batch_size: 2\noutput_dir: out\nrun_name: mixtral-orpo\n", "ORPO"),
        (
            "per_device_train_batch_size: 2\noutput_dir: out\ngamma_beta_ratio: 0.5\ntrainer_type: simpo_trainer\n",
            "SIMPO",
        ),
        ("per_device_train_batch_size: 2\noutput_dir: out\nreward_funcs: [accuracy]\nnum_generations: 8\n", "rewards"),
    ],
)
def test_training_against_a_reference_or_rewards_is_named_as_such(text: str, method: str, tmp_path: Path) -> None:
    assert method in refusals(tmp_path, text)


@pytest.mark.parametrize(
    ("command", "method"),
    [("trl dpo", "DPO"), ("python scripts/run_grpo.py", "GRPO"), ("accelerate launch reward_modeling.py", "REWARD")],
)
def test_the_name_of_a_script_tells_its_method(command: str, method: str, tmp_path: Path) -> None:
    text = f"{command} --model_name_or_path llama --output_dir out --per_device_train_batch_size 2\n"
    assert method in refusals(tmp_path, text, "train.sh")


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("a.sh", "python x.py --output_dir out --per_device_train_batch_size 2 --lora_rank 8\n", "transformers"),
        ("b.sh", "python x.py --output_dir out --per_device_train_batch_size 2 --cutoff_len 9\n", "transformers"),
        ("c.sh", "python x.py --output_dir out --per_device_train_batch_size 2 --lora_r 8\n", "transformers"),
        ("d.sh", "trl sft --output_dir out --per_device_train_batch_size 2\n", "trl"),
        ("g.sh", "python src/sft_train.py --output_dir out --per_device_train_batch_size 2\n", "transformers"),
        ("h.sh", "python examples/scripts/sft_vlm.py --output_dir out --per_device_train_batch_size 2\n", "trl"),
        ("e.yaml", "model_name_or_path: llama\nmicro_batch_size: 1\nlearning_rate: 1e-4\n", "transformers"),
        ("f.yaml", "output_dir: out\nfinetuning_type: full\nlearning_rate: 1e-4\n", "llama-factory"),
    ],
)  # fmt: skip
def test_a_tool_is_known_by_what_it_alone_has(name: str, text: str, tool: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    _, documents = gather([tmp_path / name], {})
    assert documents[0].tool == tool


@pytest.mark.parametrize(
    "text",
    [
        "model_name_or_path: llama\nadapter_name_or_path: saves\nexport_dir: merged\n",
        "model_name_or_path: llama\ntemplate: llama3\ninfer_backend: vllm\n",
        "finetuning_type: lora\ndo_predict: true\noutput_dir: out\nlearning_rate: 1e-4\n",
        "finetuning_type: lora\ndo_train: true\ntokenized_path: saves\noutput_dir: out\n",
        "merge_method: ties\nbase_model: llama\n",
    ],
)
def test_files_that_merge_evaluate_or_preprocess_are_no_training(text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="trains nothing"):
        refusals(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "is_checked"),
    [("", True), ("dtype: auto", True), ("model_init_kwargs: {dtype: bfloat16}", True), ("load_in_4bit: true", False)],
)
def test_trls_loss_holds_no_whole_logits_and_its_frozen_weights_are_fp32_by_default(
    line: str, is_checked: bool, tmp_path: Path, pool: Pool
) -> None:
    """TRL 1.16: `add_fused_lm_head` in `SFTTrainer`, `ModelConfig.dtype`."""
    (tmp_path / "sft.yaml").write_text(ADAPTERS.format(model=TINY) + line)
    made, documents = gather([tmp_path / "sft.yaml"], {})
    done = check(made, documents, {"gpus": 1, "mem": "6G"}, with_plan=False, pool=pool)
    assert ("fp32 weights beside a base in 4 bits" in "; ".join(each.text for each in made.refusals)) is not is_checked
    if is_checked:
        weights = json.loads(Path(TINY).read_text())["vocab_size"] * 64 * (2 if line else 4)
        assert done.verdict is not None and done.verdict.memory.parameters >= weights
    assert made.tiled_loss and (done.verdict is not None) is is_checked


def test_an_auto_of_precision_that_nobody_fills_in_is_asked_for(tmp_path: Path) -> None:
    from frugal.tools.check.checked import resolved

    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}}')
    for precision, wanted in ((None, "fp32"), ("bf16", "bf16"), ("fp16", "fp32")):
        settings, _ = gather([file], {"precision": precision})
        deepspeed, _ = resolved(settings, 1)
        assert deepspeed is not None and deepspeed.precision == wanted
        asks = any("`bf16.enabled` is auto" in each.text for each in settings.refusals)
        assert asks is (precision is None)


def test_a_model_that_a_scripts_caller_names_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.sh").write_text("python x.py --model_name_or_path $MODEL --output_dir o --max_steps 9\n")
    code, out, _ = frugal(capsys, "check", str(tmp_path / "a.sh"), "--gpus", "1", "--mem", "6G")
    assert code == 2 and "the model is $MODEL, known when the script runs" in out and "add --model" in out


def test_both_names_of_a_size_of_zero_3_count(tmp_path: Path) -> None:
    """DeepSpeed's fields have names without `stage3_`, which it takes as well (`populate_by_name`)."""
    from frugal.tools.check.checked import resolved

    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3, "max_live_parameters": 5}}')
    settings, _ = gather([file], {})
    deepspeed, _ = resolved(settings, 2)
    assert deepspeed is not None and deepspeed.zero["stage3_max_live_parameters"] == 5 and not settings.unknown


@pytest.mark.parametrize("is_launchers", [False, True])
def test_a_deepspeed_json_that_is_not_there_leaves_batch_and_fields(
    is_launchers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.yaml").write_text(
        "learning_rate: 1e-4\nbf16: true\nper_device_train_batch_size: 3\n"
        + "deepspeed: ds.json\n" * (not is_launchers)
    )
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    files = [str(tmp_path / name) for name in ("train.yaml", "a.yaml")[: 1 + is_launchers]]
    code, out, _ = frugal(capsys, "check", *files, "--model", TINY, "--gpus", "2", "--mem", "6G", "--json")
    content = json.loads(out)
    assert (code, content["verdict"], content["batch"]["global_batch"]) == (2, "not checked", 6)
    (refusal,) = content["refusals"]
    assert "ds.json` is not there; give it, too" in refusal["text"] and refusal["line"] == 4


def test_a_model_that_is_not_at_hand_leaves_batch_traps_and_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deepspeed = HERE / "configs" / "deepspeed" / "zero3-auto.json"
    file = tmp_path / "train.yaml"
    file.write_text(f"model_name_or_path: ./none.json\nlearning_rate: 1e-4\nbf16: true\ndeepspeed: {deepspeed}\n")
    code, out, _ = frugal(capsys, "check", str(file), "--gpus", "2", "--mem", "6G", "--json")
    content = json.loads(out)
    assert (code, content["verdict"], content["exit_code"]) == (2, "not checked", 2)
    assert content["batch"]["global_batch"] == 16 and "none.json" in content["refusals"][0]["text"]
    values = {each["name"]: each["value"] for each in content["auto"]}
    assert values["zero_optimization.reduce_bucket_size"] == "unknown"
    assert "large-live-parameters" in {each["rule"] for each in content["findings"]}
    assert {"model_name_or_path", "bf16", "zero_optimization.stage"} <= {each["key"] for each in content["read"]}


def test_without_a_model_the_report_says_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("learning_rate: 1e-4\nper_device_train_batch_size: 2\nrun_name: x\n")
    code, out, _ = frugal(capsys, "check", str(file), "--gpus", "2", "--mem", "6G")
    assert code == 2 and out.startswith(
        "not checked: no file names the model: memory depends on the model; add --model"
    )
    assert "4 samples = 2 GPUs x micro-batch 2 x 1 accumulation step" in out
    assert f"read\n  {file}: learning_rate, per_device_train_batch_size\n" in out


@pytest.mark.parametrize("flags", [[], ["--gpus", "8"], ["--mem", "80G"]])
def test_without_a_driver_missing_hardware_is_asked_for_before_torch_is_loaded(flags: list[str]) -> None:
    words = ["check", str(HERE / "configs" / "deepspeed" / "zero2-auto.json"), *flags]
    program = (
        "import sys; from frugal.cli import options, run; options.has_cuda_driver = lambda: False; "
        f"code = run({words!r}); assert not {{'torch', 'transformers'}} & sys.modules.keys(); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and " is not known\n" in done.stderr, done.stderr


def test_a_driver_is_found_where_torch_finds_gpus() -> None:
    assert has_cuda_driver() or not torch.cuda.is_available()


def test_what_the_fields_refuse_needs_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checked, "DryRunSource", None)
    (tmp_path / "train.yaml").write_text(ADAPTERS + "use_vllm: true")
    settings, documents = gather([tmp_path / "train.yaml"], {"model": TINY})
    done = check(settings, documents, {"gpus": 2, "mem": "6G"}, with_plan=False)
    assert done.verdict is None and done.arithmetic.global_batch == 16 and len(settings.refusals) == 1


def test_uris_are_percent_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("my train.yaml", str(tmp_path / "my train.yaml")):
        _, out, _ = frugal(capsys, "check", file, "--sarif")
        (result,) = json.loads(out)["runs"][0]["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("my%20train.yaml")


@pytest.mark.parametrize(
    ("script", "micro_batch"),
    [
        ("MICRO=${MICRO:-3}\npython train.py --per_device_train_batch_size $MICRO --learning_rate 1e-4\n", 3),
        ("python train.py --learning_rate 1e-4 --per_device_train_batch_size 5 \\", 5),
        ("function usage() {\n  echo '\nUsage: train.sh\n'\n}\npython train.py --learning_rate 1 "
         "--per_device_train_batch_size 7\n", 7),
    ],
)  # fmt: skip
def test_scripts_as_projects_have_them_are_read(script: str, micro_batch: int, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(script)
    settings, _ = gather([tmp_path / "train.sh"], {})
    assert settings.micro_batch == micro_batch
