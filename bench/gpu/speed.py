"""`python -m bench.gpu.speed`: tokens per second on one GPU, of frugal's ways beside others that train the same model.

Each contender trains from random weights, with random tokens of full length, in a process of its own: `WARM_UP` steps,
then `STEPS` that are timed, each until the GPU has done all of it. The micro-batch is the same for all, and is the
whole global batch; nothing is recomputed. Tokens per second are those of the median step. Then the kernels of one more
step are recorded: how long the card is busy, and idle of the median step, and with which kernels.

- frugal, plain and frugal, liger: `frugal.initialize` and `train_step` of a plan with `--kernels plain` and `liger`;
- trainer and trainer, liger: HF Trainer with `bf16=True`, and with `use_liger_kernel=True`, which is also the loop of
  TRL's SFTTrainer;
- by hand: a loop of PyTorch's documentation: autocast to bf16, the model's own loss, fused AdamW, clipping.

frugal keeps bf16 weights with fp32 copies, the others fp32 weights; under LoRA the frozen weights are bf16 for all.

    python -m bench.gpu.speed --plan FOLDER          (makes the plans; needs no GPU)
    python -m bench.gpu.speed --plans FOLDER         (on the GPU)
    python -m bench.gpu.speed --table FILE           (where the steps of a kept file spend their time)

Needs liger-kernel and triton; kept in `bench/results/gpu-speed-DEVICE.json`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment
from frugal.planning.plan import Plan

RESULTS = Path(__file__).parents[1] / "results"
WARM_UP, STEPS, RECORDED = 4, 12, 1
CARD = "h100-80g"
PAUSE = 10.0
"""Microseconds between kernels from which a pause counts: the card begins a kernel that waits for it sooner."""

MOST, NAMED = 40, 100
"""Kernels that are kept of a step, and characters of their names."""

CASES: dict[str, tuple[str, ...]] = {
    "gpt2": ("--model", "gpt2", "--seq-len", "1024", "--global-batch", "16"),
    "qwen3-0.6b": ("--model", "qwen3-0.6b", "--seq-len", "2048", "--global-batch", "8"),
    "llama-3.1-8b LoRA": ("--model", "llama-3.1-8b", "--lora", "r=16", "--seq-len", "2048", "--global-batch", "2"),
}
"""Flags of the plan, by what is trained. The micro-batch is the global batch."""

CONTENDERS = ("frugal, liger", "trainer, liger", "frugal, plain", "trainer", "by hand")


def flags(case: str, kernels: str) -> list[str]:
    """Flags of `frugal plan` for a case."""
    batch = CASES[case][-1]
    fixed = ["--gpus", "1", "--gpu", CARD, "--activation-checkpointing", "off", "--offload", "none"]
    return [*CASES[case], *fixed, "--micro-batch", batch, "--kernels", kernels]


def make_plans(folder: Path, python: str = sys.executable, cases: Iterable[str] = CASES) -> None:
    """Write the plans of `cases` into `folder`."""
    for case in cases:
        for kernels in ("plain", "liger"):
            out = folder / f"{case} {kernels}"
            command = [python, "-m", "frugal", "plan", *flags(case, kernels), "-o", str(out)]
            subprocess.run(command, check=True)


class Timing:
    """Seconds of steps, each until the GPU has done all of it; and what the GPU ran in the step after these."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ran: list[tuple[str, float, float]] = []  # name, and the microseconds of its begin and end
        self._start = 0.0
        self._recorder: torch.profiler.profile | None = None

    def begin(self) -> None:
        """Start a step."""
        torch.cuda.synchronize()
        if len(self.seconds) == WARM_UP + STEPS:
            self._recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._recorder.start()
        self._start = time.perf_counter()

    def end(self) -> None:
        """End it; after the warm-up peaks of memory begin anew."""
        torch.cuda.synchronize()
        if self._recorder is not None:
            self._recorder.stop()
            on_card = [each for each in self._recorder.events() if each.device_type == torch.autograd.DeviceType.CUDA]
            self.ran = [(each.name, each.time_range.start, each.time_range.end) for each in on_card]
            return
        self.seconds.append(time.perf_counter() - self._start)
        if len(self.seconds) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()


def account(ran: Iterable[tuple[str, float, float]], seconds: float) -> dict[str, Any]:
    """Return milliseconds of a step of `seconds`: the card busy and idle, by kernel, and idle before each kernel.

    Recording slows down the host, not the kernels: so idle is the rest of a step that was not recorded. The pauses are
    those of the recorded one, of `PAUSE` microseconds and more; they show where the host lets the card wait.
    """
    kernels: dict[str, list[float]] = {}
    pauses: Counter[str] = Counter()
    busy, free = 0.0, None
    for name, begin, end in sorted(ran, key=lambda each: each[1:]):
        of_name = kernels.setdefault(name[:NAMED], [0, 0.0])
        of_name[0] += 1
        of_name[1] += end - begin
        if free is not None and begin - free >= PAUSE:
            pauses[name[:NAMED]] += begin - free  # type: ignore[assignment]  # a Counter of floats
        busy += max(0.0, end - max(begin, free if free is not None else begin))
        free = end if free is None else max(free, end)
    most = sorted(kernels.items(), key=lambda item: -item[1][1])[:MOST]
    return {
        "busy": round(busy / 1e3, 3),
        "idle": round(1e3 * seconds - busy / 1e3, 3),
        "kernels": {name: [count, round(spent / 1e3, 3)] for name, (count, spent) in most},
        "pauses": {name: round(spent / 1e3, 3) for name, spent in pauses.most_common(MOST)},
    }


def table(rows: dict[str, Any]) -> str:
    """Return where a case's contenders spend a step, a column each: the step, busy, idle, and their kernels, in ms."""
    who = {name: row["milliseconds"] for name, row in rows.items() if "milliseconds" in row}
    names = dict.fromkeys(name for each in who.values() for name in each["kernels"])
    lines = [("ms of a step", *who)]
    lines += [(key, *(f"{each[key]:.1f}" for each in who.values())) for key in ("busy", "idle")]
    for name in sorted(names, key=lambda name: -max(each["kernels"].get(name, (0, 0))[1] for each in who.values())):
        counts = (each["kernels"].get(name, (0, 0)) for each in who.values())
        lines.append((name, *(f"{spent:.2f} in {count}" for count, spent in counts)))
    for name in dict.fromkeys(name for each in who.values() for name in each["pauses"]):
        lines.append((f"idle before {name}", *(f"{each['pauses'].get(name, 0):.2f}" for each in who.values())))
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def model_of(plan: Plan, dtype: torch.dtype) -> Any:
    """The case's model with random weights, on the GPU, with the plan's adapters."""
    from frugal.models.resolve import resolve_request

    return resolve_request(plan.request).build(dtype=dtype, device="cuda")


def weights_of_peers(plan: Plan) -> torch.dtype:
    """Autocast wants fp32 weights; frozen ones would not be kept in fp32."""
    return torch.float32 if plan.request.lora is None else torch.bfloat16


def batches(plan: Plan, model: Any) -> Callable[[], list[dict[str, torch.Tensor]]]:
    """A function that draws a global batch of samples of full length."""
    vocabulary, draw = model.config.vocab_size, torch.Generator().manual_seed(0)

    def drawn() -> list[dict[str, torch.Tensor]]:
        shape = plan.request.global_batch, plan.request.seq_len
        return [{"input_ids": row} for row in torch.randint(vocabulary, shape, generator=draw)]

    return drawn


def frugals(plan: Plan, timing: Timing) -> list[float]:
    """Train with frugal's engine; return the losses."""
    import frugal

    model = model_of(plan, torch.bfloat16)
    draw = batches(plan, model)
    engine, losses = frugal.initialize(model, plan, frugal.CausalLM()), []
    for _ in range(WARM_UP + STEPS + RECORDED):
        samples = draw()
        timing.begin()
        losses.append(engine.train_step(samples).loss)
        timing.end()
    return losses


def trainers(plan: Plan, timing: Timing, *, liger: bool) -> list[float]:
    """Train with HF Trainer; return the losses."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Timed(TrainerCallback):
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            timing.begin()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            timing.end()

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids}

    model, request = model_of(plan, weights_of_peers(plan)), plan.request
    draw = batches(plan, model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=WARM_UP + STEPS + RECORDED, per_device_train_batch_size=request.global_batch, bf16=True,
            use_liger_kernel=liger, learning_rate=request.scaled_learning_rate, lr_scheduler_type="constant",
            max_grad_norm=request.gradient_clipping, weight_decay=request.weight_decay, logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, remove_unused_columns=False, use_cache=False,
        )  # fmt: skip
        samples = [sample for _ in range(WARM_UP + STEPS + RECORDED) for sample in draw()]
        trainer = Trainer(
            model=model, args=arguments, data_collator=collate, train_dataset=samples,  # type: ignore[arg-type]
            callbacks=[Timed()],
        )  # fmt: skip
        trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def by_hand(plan: Plan, timing: Timing) -> list[float]:
    """Train with a loop of PyTorch's documentation; return the losses."""
    model, request = model_of(plan, weights_of_peers(plan)), plan.request
    draw, losses = batches(plan, model), []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=request.scaled_learning_rate, weight_decay=request.weight_decay, fused=True
    )
    for _ in range(WARM_UP + STEPS + RECORDED):
        samples = draw()
        timing.begin()
        ids = torch.stack([sample["input_ids"] for sample in samples]).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, request.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        timing.end()
        losses.append(loss.item())
    return losses


def train(case: str, contender: str, plans: Path) -> dict[str, Any]:
    """Train in this process; return tokens per second, peaks of memory and losses."""
    who, _, kernels = contender.partition(", ")
    plan, timing = Plan.read(plans / f"{case} {kernels or 'plain'}" / "plan.json"), Timing()
    if who == "frugal":
        losses = frugals(plan, timing)
    elif who == "trainer":
        losses = trainers(plan, timing, liger=bool(kernels))
    else:
        losses = by_hand(plan, timing)
    seconds = statistics.median(timing.seconds[WARM_UP:])
    result: dict[str, Any] = {
        "tokens_per_second": round(plan.batch.global_batch * plan.request.seq_len / seconds),
        "seconds": [round(each, 5) for each in timing.seconds],
        "milliseconds": account(timing.ran, seconds),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [round(loss, 5) for loss in losses],
    }
    if who == "frugal":
        result["planned"] = {"seconds": plan.time.total_seconds, "live_bytes": plan.memory.live_bytes}
        result["planned"] |= {"total_bytes": plan.memory.total_bytes, "strategy": str(plan.strategy)}
    return result


def main() -> int:
    """Plan, train all contenders in turn, or one; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, metavar="FOLDER", help="only make the plans")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="with the plans")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print where the steps of a kept file spend time")
    parser.add_argument("--only", nargs=2, metavar=("CASE", "CONTENDER"), help="one contender, in this process")
    parser.add_argument("--out", type=Path, help="[default: bench/results/gpu-speed-DEVICE.json]")
    asked = parser.parse_args()
    if asked.plan is not None:
        make_plans(asked.plan)
        return 0
    if asked.table is not None:
        for case, rows in json.loads(asked.table.read_text())["cases"].items():
            print(f"{case}\n\n{table(rows)}\n")
        return 0
    if asked.only is not None:
        print(json.dumps(train(*asked.only, asked.plans)))
        return 0
    name = torch.cuda.get_device_properties(0).name
    kept: dict[str, Any] = environment("python -m bench.gpu.speed --plans FOLDER") | {"device": name, "cases": {}}
    kept["versions"] |= {each: version(each) for each in ("liger-kernel", "triton", "peft")}
    out = asked.out or RESULTS / f"gpu-speed-{name.lower().replace(' ', '-')}.json"
    for case in CASES:
        kept["cases"][case] = {}
        for contender in CONTENDERS:
            kept["cases"][case][contender] = row = _in_a_process(case, contender, asked.plans)
            print(f"{case:20} {contender:16} {row.get('tokens_per_second', row.get('failure'))}", flush=True)
            out.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"\n{table(kept['cases'][case])}\n", flush=True)
    return int(any("failure" in row for rows in kept["cases"].values() for row in rows.values()))


def _in_a_process(case: str, contender: str, plans: Path) -> dict[str, Any]:
    return answered([sys.executable, "-m", "bench.gpu.speed", "--only", case, contender, "--plans", str(plans)])


def answered(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON of a command's last line, or its `failure`."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failure": done.stderr.strip()[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
