"""Users' own training steps on a pretended card: against torch's own counters, and what is said when one cannot run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import frugal as package
from bench.loops import drawn
from frugal.errors import RequestError
from frugal.models import transformers_internals
from frugal.tools.own_loop import autocast
from frugal.tools.own_loop.card import COMPILED, OTHER_CARDS
from frugal.tools.own_loop.reference import names_a_step
from frugal.tools.own_loop.tracker import LoopTracker
from tests.commands import Capture, frugal
from tests.dryrun import counters, single_calls

BENCH = Path(__file__).parents[2] / "bench"
LOOPS = BENCH / "loops"
MEASURED = json.loads((BENCH / "results" / "loops-emulated.json").read_text())
QUICK = ("autocast_fp16", "bert_masked", "deepspeed_zero2")
DRAWN = json.loads(drawn.RESULTS.read_text())
MOST_ALLOCATED, MOST_RESERVED = 0.0005, 0.001
KNOWN = {"vit_autocast": 0.013}  # reserved: more is asked for than a dry run knows, why is not known


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.exhaustive) for each in MEASURED["loops"]]
)
def test_a_loop_takes_what_torch_counts_on_the_emulated_card(name: str, capsys: Capture) -> None:
    transformers_internals.always_use()  # as where an engine ran in this process before
    code, out, err = frugal(
        capsys, "dryrun", f"{LOOPS / name}.py:step", "--gpus", "1", "--gpu", "rtx3060-12g", "--json"
    )
    assert code == 0, err
    figures, measured = json.loads(out), MEASURED["loops"][name]
    assert figures["peak_allocated_bytes"] == pytest.approx(measured["peak_allocated_bytes"], rel=MOST_ALLOCATED)
    bound = KNOWN.get(name, MOST_RESERVED)
    assert figures["peak_reserved_bytes"] == pytest.approx(measured["peak_reserved_bytes"], rel=bound)
    assert sum(figures["categories"].values()) == figures["peak_allocated_bytes"] == max(figures["phases"].values())
    assert figures["notes"] == []


def test_autocasts_lists_are_those_of_the_installed_torch() -> None:
    """Of `TORCH_LIBRARY_IMPL(aten, AutocastCUDA)`; a build without CUDA has them, too."""
    ours = [
        *autocast.LOWER_PRECISION, *autocast.FLOAT, *autocast.FLOAT_RESULT, *autocast.FLOAT_NORMS, *autocast.WIDEST,
        *autocast.REFUSED,
    ]  # fmt: skip
    theirs = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert sorted(ours) == sorted(name.removeprefix("aten::") for name in theirs)


def parts(step: Any, **more: Any) -> dict[str, Any]:
    """Return what `frugal.dry_run` is told of a small step."""
    return {"step": step, "mem": "4G", "steps": 1} | more


def test_autocast_gives_the_types_that_a_cpus_gives() -> None:
    """torch's own autocast of a CPU and ours cast alike, also what they give back to fp32 weights."""
    seen: dict[str, list[torch.dtype]] = {"cpu": [], "cuda": []}

    def types(device: str) -> None:
        layer = nn.Linear(8, 8, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            product = layer(torch.ones(4, 8, device=device))
            sums = product @ layer.weight + product
        sums.sum().backward()
        with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
            outside = layer(torch.ones(4, 8, device=device))
        assert layer.weight.grad is not None
        seen[device] = [each.dtype for each in (product, sums, outside, layer.weight.grad)]

    types("cpu")
    package.dry_run(**parts(lambda kind: types(kind), kind="cuda"))
    assert seen["cuda"] == seen["cpu"] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_a_weights_cast_is_kept_until_autocast_ends_and_made_once() -> None:
    weight_bytes = 2 * 1024 * 1024
    inside: list[int] = []
    after: list[int] = []

    def step(layer: nn.Linear) -> None:
        x = torch.ones(16, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            layer(x)
            inside.append(torch.cuda.memory_allocated() - before)
            layer(x)
            inside.append(torch.cuda.memory_allocated() - before)
        after.append(torch.cuda.memory_allocated() - before)

    # with cuBLAS's workspace, which stays
    package.dry_run(**parts(step, layer=lambda: nn.Linear(1024, 1024, bias=False, device="cuda")))
    workspace = after[0]
    assert [size - workspace for size in inside] == [weight_bytes, weight_bytes]


@pytest.mark.parametrize(("torch_version", "kept_mib"), [("2.13", [0, 0, 0]), ("2.11", [1, 0, 1]), ("2.4", [0, 0, 0])])
def test_products_with_a_bias_keep_a_workspace_of_cublaslt_for_each_thread(
    torch_version: str, kept_mib: list[int]
) -> None:
    kept: list[int] = []

    def step(weight: torch.Tensor, bias: torch.Tensor) -> None:
        def plain(x: torch.Tensor) -> int:
            before = torch.cuda.memory_allocated()
            F.linear(x, weight)
            return torch.cuda.memory_allocated() - before

        def biased(x: torch.Tensor) -> int:
            before = torch.cuda.memory_allocated()
            F.linear(x, weight, bias)
            return torch.cuda.memory_allocated() - before

        class InBackward(torch.autograd.Function):
            @staticmethod
            def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
                plain(gradient)
                kept.append(biased(gradient))
                return gradient

        x = torch.ones(16, 64, device="cuda", requires_grad=True)
        with torch.no_grad():
            plain(x)
            kept.extend((biased(x), biased(x)))
        InBackward.apply(x).sum().backward()

    made = parts(step, weight=lambda: torch.ones(64, 64, device="cuda"), bias=lambda: torch.ones(64, device="cuda"))
    package.dry_run(**made, torch_version=torch_version)
    assert kept[:3] == [each << 20 for each in kept_mib]


def test_a_model_moved_to_the_card_keeps_its_ties_and_its_optimizer() -> None:
    def model() -> nn.Module:
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, second)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters())
        model.cuda()
        return made

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 64, device="cuda")).sum().backward()
        optimizer.step()

    figures = package.dry_run(**parts(step, model=model, optimizer=optimizer, steps=2))
    assert figures.categories["parameters"] == 64 * 64 * 4
    assert figures.categories["optimizer"] == 2 * 64 * 64 * 4


def test_nothing_of_a_dry_run_is_left_in_torch() -> None:
    before = torch.cuda.is_available, torch.compile, torch.autograd.backward, F.scaled_dot_product_attention
    package.dry_run(**parts(lambda x: (x * 2).sum().item(), x=lambda: torch.ones(4, device="cuda")))
    assert (torch.cuda.is_available, torch.compile, torch.autograd.backward, F.scaled_dot_product_attention) == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.ones(2, device="meta").device.type == "meta"


REFUSED: dict[str, tuple[str, str, str]] = {
    "missing": (
        "def step(model, scaler): ...\ndef model(): return 1\n",
        "loop.py has no `scaler`", "hint: define `def scaler(): ...`, which returns it",
    ),
    "circle": (
        "def model(optimizer): ...\ndef optimizer(model): ...\ndef step(model): ...\n",
        "the parts of loop.py need each other in a circle", "because model -> optimizer -> model",
    ),
    "values": (
        "import torch\ndef batch(): return torch.ones(3, device='cuda')\ndef step(batch):\n    return batch.tolist()\n",
        "`step` of loop.py fails in a dry run",
        "because ValuesNeededError: Tensor.tolist() reads the values of a tensor on the card\n"
        "  because loop.py, line 4, runs `return batch.tolist()`\n\nhint: a dry run knows shapes, not values",
    ),
    "two devices": (
        "import torch\ndef model(): return torch.nn.Linear(4, 4).cuda()\ndef batch(): return torch.ones(2, 4)\n"
        "def step(model, batch):\n    model(batch)\n",
        "`step` of loop.py fails in a dry run",
        "found at least two devices, cuda:0 and cpu! (aten.addmm)\n  because loop.py, line 5, runs `model(batch)`",
    ),
    "nothing there": (
        "import torch\ndef model(): return torch.nn.Linear(4, 4)\ndef step(model): model(torch.ones(2, 4))\n",
        "loop.py puts nothing on the card",
        "hint: move the model and the batch to it: model.cuda(), batch.cuda()",
    ),
    "two types": (
        "import torch\ndef model(): return torch.nn.Linear(4, 4).cuda().half()\n"
        "def step(model): model(torch.ones(2, 4, device='cuda'))\n",
        "`step` of loop.py fails in a dry run",
        "matrices of a product must have the same dtype, not torch.float16 and torch.float32",
    ),
    "arguments": (
        "import sys\nwidth = int(sys.argv[1])\ndef step(model): ...\n",
        "cannot import loop.py", "hint: the script's own arguments follow `--`",
    ),
    "ends": (
        "import sys\ndef model(): sys.exit('no data at /data')\ndef step(model): ...\n",
        "`model` of loop.py fails in a dry run",
        "hint: the script ended itself; its own arguments follow `--`\n",
    ),
    "raises": (
        "def helper(): return {}['n_layers']\ndef model():\n    return helper()\ndef step(model): ...\n",
        "`model` of loop.py fails in a dry run",
        "because KeyError: 'n_layers'\n  because loop.py, line 3, runs `return helper()`\n  because loop.py, line 1,",
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_script_lacks_or_raises_is_one_message(case: str, here: Path, capsys: Capture) -> None:
    text, what, why = REFUSED[case]
    (here / "loop.py").write_text(text)
    code, out, err = frugal(capsys, "dryrun", "loop.py:step", "--gpus", "1", "--mem", "4G")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {what}\n") and why in err


@pytest.mark.parametrize(
    ("step", "flags", "said"),
    [
        ("step", ["--zero-stage", "2"], "loop.py:step was given together with --zero-stage"),
        ("step", ["--set", "optimizer.beta2=0.9"], "loop.py:step was given together with --optimizer"),
        ("factory", ["--steps", "2"], "--steps is for a training step of yours, and loop.py:factory is none"),
        ("factory", ["--torch", "2.6"], "--torch is for a training step of yours, and loop.py:factory is none"),
        ("step", ["--torch", "newest"], "newest is no version of torch"),
    ],
)
def test_flags_that_a_script_decides_are_refused(
    step: str, flags: list[str], said: str, here: Path, capsys: Capture
) -> None:
    (here / "loop.py").write_text("def step(x): ...\ndef x(): ...\ndef factory(): return 0\n")
    code, _, err = frugal(capsys, "dryrun", f"loop.py:{step}", *flags, "--gpus", "1", "--mem", "4G")
    assert code == 2 and err.startswith(f"error: {said}\n")


def test_the_command_takes_the_version_of_torch_that_a_script_will_run_with(here: Path, capsys: Capture) -> None:
    (here / "loop.py").write_text(
        "import torch\ndef step(): torch.empty(1024, 1024, device='cuda') @ torch.empty(1024, 1024, device='cuda')\n"
    )
    peaks = []
    for flags in ([], ["--torch", "2.11"]):
        code, out, _ = frugal(capsys, "dryrun", "loop.py:step", "--gpu", "b200-180g", "--json", *flags)
        assert code == 0
        peaks.append(json.loads(out)["peak_allocated_bytes"])
    assert peaks[0] - peaks[1] == (32 << 20) - 8_519_680


LOOP = """
import sys, torch
width = int(sys.argv[1]) if sys.argv[1:] else 64
def train():
    model = torch.nn.Linear(width, width, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, width).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def evaluated():
    train.best = 1.0
    def score(): return 0.5
    torch.zeros(4).cuda().requires_grad_().sum().backward()
    return score()
def made(): return torch.nn.Linear(4, 4)
if __name__ == "__main__":
    train()
"""


@pytest.mark.parametrize(
    ("what", "is_a_step"), [("", True), (":train", True), (":evaluated", True), (":made", False), (":missing", False)]
)
def test_a_whole_script_or_a_function_that_trains_is_a_step(what: str, is_a_step: bool, here: Path) -> None:
    (here / "loop.py").write_text(LOOP)
    assert names_a_step(f"loop.py{what}") == is_a_step


def test_a_whole_script_is_dry_run_as_its_main_program_with_its_arguments(here: Path, capsys: Capture) -> None:
    (here / "loop.py").write_text(LOOP)
    asked = ["--gpus", "1", "--mem", "4G", "--json"]
    found = {}
    for what, arguments in (("loop.py", ["--", "2048"]), ("loop.py:train", ["--", "2048"]), ("loop.py", [])):
        code, out, err = frugal(capsys, "dryrun", what, *asked, *arguments)
        assert code == 0, err
        found[what, bool(arguments)] = json.loads(out)
    whole, small = found["loop.py", True], found["loop.py", False]
    assert whole["peak_allocated_bytes"] == found["loop.py:train", True]["peak_allocated_bytes"]
    assert whole["categories"]["parameters"] == whole["categories"]["gradients"] == 4 * 2048**2
    assert small["categories"]["parameters"] == 4 * 64**2


def test_before_torch_2_9_an_rms_norm_keeps_what_it_is_made_of() -> None:
    def peak(version: str | None) -> int:
        def step() -> None:
            x, weight = (torch.ones(size, device="cuda", requires_grad=True) for size in ((1024, 1024), (1024,)))
            F.rms_norm(x, (1024,), weight).square().mean().backward()

        return package.dry_run(step, gpu="t4-16g", steps=1, torch_version=version).peak_allocated_bytes

    assert peak("2.8") > peak("2.9") == peak(None)


ENDLESS = """
import itertools, torch
model, critic = torch.nn.Linear(256, 256).cuda(), torch.nn.Linear(256, 1).cuda()
optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, critic)]
kept = []
for step in itertools.count():
    if step == 40: raise SystemExit("was not ended")
    try:
        critic(model(torch.ones(8, 256).cuda())).sum().backward()
        kept.append(torch.zeros(2**20, device="cuda"))
        for each in optimizers:
            each.step()
            each.zero_grad()
    except Exception: pass
"""


def test_a_script_is_ended_once_an_optimizer_begins_one_step_more_than_asked_for(here: Path, capsys: Capture) -> None:
    (here / "loop.py").write_text(ENDLESS)
    allocated = {}
    for steps in (1, 2, 5):
        code, out, err = frugal(capsys, "dryrun", "loop.py", "--gpu", "t4", "--json", "--steps", str(steps))
        assert code == 0, err
        allocated[steps] = json.loads(out)["peak_allocated_bytes"]
    assert allocated[2] - allocated[1] == 4 * 2**20 and allocated[5] - allocated[2] == 3 * 4 * 2**20
    code, _, err = frugal(capsys, "dryrun", "loop.py", "--gpu", "t4")
    assert code == 2 and "was not ended" in err


def test_a_script_that_fails_is_named_with_its_line(here: Path, capsys: Capture) -> None:
    (here / "loop.py").write_text("import torch\nrows = {}\ntorch.zeros(2).cuda()\nrows['missing']\n")
    code, _, err = frugal(capsys, "dryrun", "loop.py", "--gpus", "1", "--mem", "4G")
    assert code == 2
    assert err.startswith(
        "error: loop.py fails in a dry run\n  because KeyError: 'missing'\n  because loop.py, line 4,"
    )


def test_what_a_script_compiles_is_said_to_be_counted_as_eager_and_not_what_a_library_does_when_imported(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = here / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)
    (packages / "compiled_when_imported.py").write_text(
        "import torch\n@torch.compile\ndef function(): ...\ndef compiles(model): torch.compile(model)\n"
    )

    def notes(*lines: str) -> tuple[str, ...]:
        def step(x: Tensor) -> None:
            exec("\n".join(lines))

        return package.dry_run(**parts(step, x=lambda: torch.ones(4, device="cuda"))).notes

    assert notes("import compiled_when_imported") == ()
    assert notes("import compiled_when_imported as library", "library.compiles(lambda: 0)") == (COMPILED,)


def test_values_come_to_the_host_as_zeros_and_that_is_said() -> None:
    seen: list[Tensor] = []

    def step(x: Tensor) -> None:
        seen.append(x.cpu())

    figures = package.dry_run(**parts(step, x=lambda: torch.ones(4, device="cuda")))
    assert seen[0].tolist() == [0.0] * 4
    assert figures.notes == ("values are copied from the card to the host: counted as if they were zero",)


def test_torchs_own_meta_device_is_not_the_card() -> None:
    def step(model: nn.Linear) -> None:
        assert model.weight.device.type == "meta" and model.weight.is_meta
        assert torch.cuda.memory_allocated() == 0
        model.to("cuda")
        assert model.weight.device == torch.device("cuda", 0) and model.weight.is_cuda
        assert torch.cuda.memory_allocated() == 1024 * 4

    def model() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(32, 32, bias=False)

    package.dry_run(**parts(step, model=model))


def test_peaks_count_from_where_a_loop_resets_them_and_segments_until_the_cache_is_emptied() -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20))

    def step() -> None:
        small = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
        large = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del large
        look()
        torch.cuda.reset_peak_memory_stats()
        look()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        another = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        look()
        del small, another

    package.dry_run(step, mem="8G", steps=1)
    assert seen == [(80, 80), (16, 80), (48, 48)]


@pytest.mark.parametrize("seed", range(counters.SEEDS))
def test_the_counters_of_the_card_are_torchs_own_after_each_step(seed: int) -> None:
    counted: list[list[list[int]]] = []
    package.dry_run(lambda: counted.append(counters.walk(seed)), gpu="rtx3060-12g", steps=1)
    assert counted[0] == json.loads(counters.RECORD.read_text())[seed]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.exhaustive if number > 3 else ()) for number, row in enumerate(DRAWN["rows"])],
    ids=lambda row: row["loop"],
)
def test_a_drawn_loop_takes_what_torch_counts_on_the_emulated_card(row: dict[str, Any]) -> None:
    what, counted = drawn.dry_run(row["seed"])
    assert (what, str(counted)) == (row["loop"], row["counted"])


def test_single_calls_take_and_give_back_the_blocks_that_they_do_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[LoopTracker] = []
    monkeypatch.setattr(LoopTracker, "reset_peaks", lambda self, *_: begun.append(self))
    found: single_calls.Requests = {}

    def run() -> None:
        torch.cuda.reset_peak_memory_stats()  # which says which tracker records this
        timeline, first = begun[0]._timeline, 0

        def start() -> None:
            nonlocal first
            first = len(timeline.events)

        def events() -> single_calls.Events:
            signs: dict[int, int] = {}
            changes = []
            for storage in timeline.events:
                signs[storage] = -signs.get(storage, -1)
                changes.append(signs[storage] * single_calls.rounded(timeline.fixed[storage]))
            return [change for change in changes[first:] if change]

        found.update(single_calls.requests(start, events))

    package.dry_run(run, gpu="rtx3060-12g", steps=1)
    on_card = json.loads(single_calls.RECORD.read_text())
    differ = {
        name.partition(" ")[0] for name, events in json.loads(json.dumps(found)).items() if events != on_card[name]
    }
    assert differ == set(" ".join(single_calls.DIFFER.values()).split())
    assert found.keys() == on_card.keys() and len(found) > 230


def test_operators_of_inference_mode_are_seen_in_their_parts() -> None:
    seen: list[int] = []

    def step() -> None:
        one, other = (torch.empty(64, 256, 512, device="cuda") for _ in range(2))
        with torch.inference_mode():
            product = torch.einsum("bij,bkj->bik", one, other)
        seen.append(torch.cuda.max_memory_allocated())
        del product

    package.dry_run(step, mem="8G", steps=1)
    workspace = 8_519_680
    assert seen == [2 * 4 * 64 * 256 * 512 + 4 * 64 * 256 * 256 + workspace]


def test_the_backward_of_a_gather_fills_one_tensor() -> None:
    seen: list[int] = []

    def step() -> None:
        rows = torch.ones(1 << 20, 8, device="cuda", requires_grad=True)
        torch.gather(rows, 1, torch.zeros(1 << 20, 1, dtype=torch.int64, device="cuda")).sum().backward()
        seen.append(torch.cuda.max_memory_allocated() >> 20)

    package.dry_run(step, mem="8G", steps=1)
    assert seen == [32 + 32 + 8]  # itself, its gradient, and the indices


@pytest.mark.parametrize("card", ["t4-16g", "v100-16g", "rtx2080ti-11g"])
def test_a_loop_is_dry_run_for_cards_without_bf16(card: str) -> None:
    figures = package.dry_run(lambda: torch.empty(4 << 20, dtype=torch.uint8, device="cuda"), gpu=card, steps=1)
    assert figures.peak_allocated_bytes == 4 << 20


def test_a_loop_may_end_its_group_of_processes_and_agree_with_others_on_objects() -> None:
    """As Accelerate's `end_training` and Lightning's strategies do."""

    def step() -> None:
        agreed, _ = [{"step": 3}], torch.empty(1 << 20, device="cuda")
        torch.distributed.broadcast_object_list(agreed, src=0)
        assert agreed == [{"step": 3}]
        torch.distributed.destroy_process_group()

    assert package.dry_run(step, gpu="t4-16g", gpus=2, steps=1).peak_allocated_bytes == 4 << 20


def test_of_an_older_torch_blackwell_has_the_smaller_workspace() -> None:
    def product() -> None:
        one = torch.empty(1024, 1024, device="cuda")
        one @ one

    newer, older = (
        package.dry_run(product, gpu="b200-180g", steps=1, torch_version=version).peak_allocated_bytes
        for version in (None, "2.11.0+cu128")
    )
    assert newer - older == (32 << 20) - 8_519_680
    for wrong in ("newest", "2", "2.11111111", ""):
        with pytest.raises(RequestError, match="is no version of torch"):
            package.dry_run(product, gpu="b200-180g", steps=1, torch_version=wrong)


def test_cublas_workspaces_count_as_allocated_and_a_t4_has_bf16_by_emulation() -> None:
    seen: list[int] = []

    def step() -> None:
        layer = nn.Linear(64, 64, device="cuda")
        layer(torch.ones(8, 64, device="cuda")).sum().backward()
        seen.append(torch.cuda.memory_allocated() >> 20)
        assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)

    package.dry_run(**parts(step, gpu="t4-16g"))
    assert seen == [16]  # two of 8.1 MiB, of forward's thread and backward's


def test_layers_checkpointed_under_zero_3_are_recomputed_alike() -> None:
    """DeepSpeed's linear layers show hooks torch's own device, in backward, which must not count as another one."""
    deepspeed = pytest.importorskip("deepspeed")
    peaks: list[int] = []

    def step() -> None:
        layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2))
        config = {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        }  # fmt: skip

        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                return x

        model = Stack()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        inputs = torch.ones(1, 8, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        engine.backward(engine(inputs).float().sum())
        engine.step()
        peaks.append(torch.cuda.max_memory_allocated())

    package.dry_run(**parts(step, gpu="rtx3060-12g"))
    assert peaks


def test_autocast_of_deepspeeds_device_is_the_cards() -> None:
    """ZeRO-3's linear layers run backward under forward's autocast, and cast fp32 inputs; nothing else may be seen."""
    deepspeed = pytest.importorskip("deepspeed")
    seen: list[tuple[bool, torch.dtype]] = []

    def step() -> None:
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
        config = {
            "train_micro_batch_size_per_gpu": 1, "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        with torch.autocast("cuda", torch.bfloat16):
            seen.append((torch.is_autocast_enabled("meta"), torch.get_autocast_dtype("meta")))
            loss = engine(torch.ones(1, 8, 64, device="cuda", requires_grad=True)).sum()
        loss.backward()
        engine.step()

    package.dry_run(**parts(step, gpu="rtx3060-12g"))
    assert seen == [(True, torch.bfloat16)]


BESIDE = """
import os
import torch
from beside import make

assert "RANK" not in os.environ, "scripts take this for torchrun's"
model = make().to(torch.cuda.current_device())
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step(model, optimizer):
    from later import batch
    model(batch()).sum().backward()
    optimizer.step()

if __name__ == "__main__":
    step(model, optimizer)
    model.cuda(1)
"""


def test_a_script_runs_as_python_runs_it_alone_with_the_modules_beside_it(here: Path, capsys: Capture) -> None:
    folder = here / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(BESIDE)
    (folder / "beside.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(512, 512)\n")
    (folder / "later.py").write_text("import torch\n\ndef batch():\n    return torch.ones(2, 512).cuda(0)\n")
    notes = {}
    for what in ("scripts/train.py:step", "scripts/train.py"):
        code, out, err = frugal(capsys, "dryrun", what, "--gpu", "t4", "--json")
        assert code == 0, err
        made = json.loads(out)
        assert made["categories"]["parameters"] == 4 * (512 * 512 + 512)
        notes[what] = made["notes"]
        for name in ("beside", "later"):
            del sys.modules[name]
    assert notes == {"scripts/train.py:step": [], "scripts/train.py": [OTHER_CARDS]}
    code, _, err = frugal(capsys, "dryrun", "train.ipynb", "--gpu", "t4")
    assert code == 2 and "hint: write it as one: jupyter nbconvert --to script train.ipynb" in err
