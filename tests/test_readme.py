"""README.md keeps its word: it is short, what it shows is what is printed, its figures are those that were measured."""

import html
import importlib.util
import json
import re
import statistics
from typing import Any

import pytest

from tests import readme, screenshots
from tests.dryrun import single_calls

README, BENCHMARKS = readme.text(), " ".join(readme.text("benchmarks").split())
QUICK = ("frugal plan --gpus 4 --mem 12G", "frugal explain --gpus 4 --mem 12G")
COMMANDS = dict.fromkeys(each.command for each in readme.shown())


def row(begin: str) -> str:
    """The one row of a README table that begins so."""
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {begin}"))
    return line


def measured(name: str) -> Any:
    """Return what a benchmark kept."""
    return json.loads((readme.ROOT / "bench" / "results" / f"{name}.json").read_text())


def test_it_is_short() -> None:
    assert README.count("\n") <= 200


@pytest.mark.parametrize("columns", screenshots.WIDTHS)
def test_a_picture_of_a_terminal_shows_what_is_printed_and_fetches_nothing(columns: int) -> None:
    """`make renew` brings it up to date."""
    picture = (screenshots.IMAGES / f"plan-{columns}-columns.svg").read_text()
    shown = html.unescape(re.sub(r"<[^>]*>", " ", picture)).split()
    printed = next(each.output for each in readme.shown() if each.command == screenshots.COMMAND)
    assert set(printed.split()) <= set(shown)
    assert len(picture) < 20_000 and "url(http" not in picture


@pytest.mark.parametrize(
    "command", [*QUICK, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in COMMANDS if each not in QUICK)]
)
def test_what_is_shown_of_planning_is_what_is_printed(command: str) -> None:
    """`make renew` brings it up to date."""
    output = readme.printed(command)
    for each in readme.shown():
        if each.command == command:
            assert readme.shortened(output, each.output) == each.output, each.page.name


def test_figures_of_the_real_card() -> None:
    found = measured("gpu-truth-nvidia-h200")
    rows = found["rows"]
    exact = [are_exact(each) for each in rows]
    capped = [each["runs"]["capped"]["answer"]["survived"] for each in rows if "capped" in each["runs"]]
    worst = found["summary"]["reserved_error"]["lowest"]
    shown = (
        f"{len(rows)} configurations of {found['summary']['families']} families",
        f"allocated: {sum(each for each, _ in exact)} of {len(rows)} to the byte",
        f"reserved: {sum(each for _, each in exact)} of {len(rows)}, worst {worst:+.2%}".replace("%", " %"),
        f"promised size: {capped.count(False)} of {len(capped)}",
    )
    for each in shown:
        assert each in row("memory on a real card")


def are_exact(content: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether allocated and reserved bytes of a run on a GPU are the predicted ones."""
    figures, answer = content["prediction"]["figures"], content["runs"]["free"]["answer"]
    return (
        max(answer["phases"].values()) == figures["peak_allocated_bytes"],
        answer["of_gpu"]["reserved_bytes"] == figures["peak_reserved_bytes"],
    )


def test_speeds_of_the_real_card() -> None:
    cases = measured("gpu-speed-nvidia-h200")["cases"]
    pairs = [(cases[each]["frugal, liger"], cases[each]["trainer, liger"]) for each in cases]
    speeds = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs]
    sizes = [ours["allocated_bytes"] / theirs["allocated_bytes"] for ours, theirs in pairs]
    order = [list(cases).index(each) for each in ("qwen3-0.6b", "gpt2", "llama-3.1-8b LoRA")]
    line = row("one H200")
    assert "per second " + ", ".join(f"{speeds[i]:.2f}" for i in order) in line
    assert "memory " + ", ".join(f"{sizes[i]:.2f}" for i in order) in line
    with_kernels, without = (cases["qwen3-0.6b"][f"frugal, {kernels}"] for kernels in ("liger", "plain"))
    brought = with_kernels["tokens_per_second"] / without["tokens_per_second"]
    less = (without["allocated_bytes"] - with_kernels["allocated_bytes"]) / 1e9
    page = " ".join(readme.text("fused-kernels").split())
    assert f"at {brought:.2f} of the tokens per second without them, in {less:.1f} GB less" in page
    for name, case in cases.items():
        shown = [f"{each['tokens_per_second']:,}" for each in case.values()]
        assert all(speed in readme.text("kernels") for speed in shown), name


def test_the_cases_that_readers_rely_on_are_shown() -> None:
    assert "$ frugal plan --gpus 4 --mem 12G\n" in README
    assert sum(command.startswith("frugal explain ") for command in COMMANDS) >= 2
    assert any(each.output.startswith("error: ") for each in readme.shown())


def test_a_shortened_output_keeps_its_ends() -> None:
    assert readme.shortened("a\nb\nc\nd\n", "x\n...\ny\n") == "a\n...\nd\n"
    assert readme.shortened("a\nb\n", "x\n...\n") == "a\n...\n"
    assert readme.shortened("a\nb\n", "all of it\n") == "a\nb\n"


def test_the_commands_that_measured_something_still_exist() -> None:
    for path in (readme.ROOT / "bench" / "results").iterdir():
        modules = re.findall(r'"command": "python -m (bench\.[\w.]+)', path.read_text())
        assert modules and all(importlib.util.find_spec(module) for module in modules), path.name


def test_how_true_memory_is() -> None:
    kept = measured("accuracy-cpu")
    assert kept["median_error"] == kept["failures"] == kept["lowest_error"] == 0
    assert (
        f"{kept['configurations']} configurations of {kept['families']} model families, ZeRO 0-3, 1-3 ranks | "
        f"median error 0, worst +{100 * kept['worst_error']:.3f} %, none low"
    ) in row("peak of live tensor bytes")
    kept = measured("host-memory-cpu")
    assert (
        f"{kept['configurations']} configurations | median error {100 * kept['median_error']:.1f} %, "
        f"worst {-100 * kept['lowest_error']:.1f} % low"
    ) in row("host memory")
    assert kept["worst_error"] == -kept["lowest_error"]


def test_how_true_memory_is_on_emulated_cards() -> None:
    kept = measured("emulated-gpu")["summary"]
    allocated, reserved = kept["allocated_error"], kept["reserved_error"]
    out_of_memory = round(kept["unusable_share"] * kept["capped"])
    expandable = round(kept["expandable_unusable_share"] * kept["expandable_capped"])
    said = row("memory on emulated CUDA cards")
    assert f"{kept['measured']} configurations of {kept['families']} families" in said
    assert f"allocated: median {100 * allocated['median']:.3f} %, worst {100 * allocated['worst']:.2f} %" in said
    assert f"reserved: median {100 * reserved['median']:.2f} %, worst {100 * reserved['worst']:.1f} %" in said
    assert (
        f"promised size: {out_of_memory} of {kept['capped']}, "
        f"with expandable segments {expandable} of {kept['expandable_capped']}"
    ) in said


def test_how_true_the_allocator_is_to_recordings_of_real_cards() -> None:
    kept = measured("recordings")["summary"]
    number, strangers = kept["recordings"], kept["repository"]
    said = row("the allocator of real cards")
    assert f"{number} recordings of {strangers} strangers" in said and f"{number} of {number} to the byte" in said
    assert kept["reserved_error"]["exact"] == kept["allocated_error"]["exact"] == number
    rows = measured("recordings")["rows"]
    cards = {each["card"] for each in rows} - {"not stated"}
    assert cards == {"a10-24g", "h100-80g", "b200-180g", "rtx-pro-6000-96g"}
    assert all(card in said for card in ("A10", "H100", "B200", "RTX PRO 6000"))
    versions = [tuple(map(int, each["torch"].split(".")[:2])) for each in rows if each["torch"] != "not stated"]
    assert "torch {}.{} to {}.{}".format(*min(versions), *max(versions)) in said
    assert f"replays {number} public snapshots" in BENCHMARKS and f"from {strangers} repositories" in BENCHMARKS
    assert f"in {kept['printed_peaks']['same']} of {kept['printed_peaks']['printed']}" in BENCHMARKS
    assert f"In {kept['with_new_segments']} a segment was made" in BENCHMARKS


def test_how_true_first_predictions_of_strangers_loops_were() -> None:
    """Published bytes are printed beside them."""
    rows = measured("blind")["rows"]
    allocated, reserved = (
        [each[f"first_{what}_error"] for each in rows if f"{what}_bytes" in each] for what in ("allocated", "reserved")
    )
    assert (
        f"{len(rows)} loops of six more strangers, predicted before they were compared | allocated: "
        f"{allocated.count(0)} of {len(allocated)} exact, worst {100 * min(allocated):.1f} %; reserved: "
        f"{reserved.count(0)} of {len(reserved)} exact, median {100 * statistics.median(map(abs, reserved)):.2f} %, "
        f"ViT-L in 16 bits {100 * min(reserved):.0f} %, VGG-16 {100 * max(reserved):+.0f} %"
    ) in row("37 loops of six more strangers")


def test_how_true_dry_runs_of_strangers_loops_are() -> None:
    made = measured("predictions")
    kept = made["summary"]
    reserved_errors = [abs(each["reserved_error"]) for each in made["rows"] if each["reserved_error"] is not None]
    allocated, reserved = kept["allocated_error"], kept["reserved_error"]
    said = row("measured on real cards, by others")
    assert f"dry runs of {kept['rows']} loops of {kept['repository']} strangers" in said and kept["card"] == 8
    for each, what in ((allocated, "allocated"), (reserved, "reserved")):
        digits = 2 if what == "allocated" else 1
        figures = f"{what}: median {100 * each['median']:.3f} %, worst {100 * each['worst']:.{digits}f} %"
        assert f"{figures}, {each['exact']} of {each['rows']} exact" in said
    recordings = " ".join(readme.text("recordings").split())
    off = sum(error > 0.015 for error in reserved_errors)
    assert f"above 1.5 % in {off}" in recordings
    assert f"| allocated | {allocated['rows']} | {allocated['exact']} |" in recordings
    assert f"| reserved | {reserved['rows']} | {reserved['exact']} |" in recordings
    assert f"stated in {kept['with_stated_card']} of {kept['rows']} rows" in recordings
    peers = measured("peers")["peers"]
    names = {"torch-preflight": "torch-preflight", "fitcheck-llm": "fitcheck", "accelerate": "accelerate"}
    beside = row("the same rows, as far as others")
    assert ", ".join(f"{short} ({peers[name]['rows']})" for name, short in names.items()) in beside
    assert ", ".join(f"{100 * peers[name]['error']['median']:.1f} %" for name in names) in beside
    assert ", ".join(f"{100 * peers[name]['frugal_error']['median']:.2f} %" for name in names) in beside


def test_how_true_dry_runs_of_drawn_loops_and_of_single_calls_are() -> None:
    kept = measured("loops-drawn")["summary"]
    said = " ".join(readme.text("tutorials/own-loop").split())
    assert kept["exact"] == kept["loops"] and f"in {kept['loops']} loops drawn at random" in said
    differ = " ".join(single_calls.DIFFER.values()).split()
    assert f"Of {len(single_calls.CALLS)} functions of torch {len(single_calls.CALLS) - len(differ)} request" in said


def test_how_true_choices_and_losses_are() -> None:
    kept = measured("choice-cpu")
    assert (
        f"all {kept['strategies_timed']} that fit, {kept['cases']} cases | fastest in {kept['fastest']}, "
        f"within 5 % in {kept['within_5_percent']}, at worst {100 * (kept['worst_ratio'] - 1):.0f} % slower"
    ) in row("the chosen strategy")
    ranks = measured("translation-cpu")["ranks"]
    largest = max(each["largest_difference_of_losses"] for each in ranks.values())
    assert f"on {len(ranks) - 2}, {len(ranks) - 1} and {len(ranks)} ranks | differ by at most {largest:.0e}" in row(
        "losses of"
    )
    largest = measured("scaling-cpu")["largest_difference_of_perplexities"]
    assert f"at most {largest:.0e} of itself" in row("validation perplexity")
    outcomes = measured("faults-cpu")["outcomes"]
    exact = sum(outcome["is_exact"] for outcome in outcomes)
    assert f"{exact} of {len(outcomes)} bit for bit" in row(f"{len(outcomes)} kinds of faults")


def test_how_fine_tuning_compares() -> None:
    kept, said = measured("fine-tuning-cpu"), BENCHMARKS
    differences = {name: kind["largest_relative_difference"] for name, kind in kept["losses"].items()}
    for name, run in kept["losses"].items():
        assert len(run["frugal"]) == 20
        largest = max(abs(a / b - 1) for a, b in zip(run["frugal"], run["sft_trainer"], strict=True))
        assert largest == pytest.approx(differences[name])
    assert f"at most {differences['full']:.1e} (all parameters) and {differences['lora']:.1e} (LoRA" in said
    assert f"differ by at most {max(differences.values()):.0e} |" in row("fine-tuning on chats")
    rates = kept["speed"]["target_tokens_per_second"]
    defaults, without = (
        statistics.median(a / b for a, b in zip(rates["frugal"], rates[name], strict=True))
        for name in ("sft_trainer", "sft_trainer_without_checkpointing")
    )
    assert f"frugal trains {defaults:.2f} times the target tokens per second of SFTTrainer with its defaults" in said
    assert f"and {without:.2f} times those of SFTTrainer without activation checkpointing" in said
    assert f"| {defaults:.2f} of TRL's SFTTrainer with its defaults |" in row("target tokens per second of fine-tuning")


def test_how_fast_training_is() -> None:
    kept = measured("throughput-cpu")

    def faster(room: int, peer: str) -> str:
        ratios = [kept[f"{ranks} ranks, room for {room}"]["frugal_is_faster"][peer]["median"] for ranks in (1, 2)]
        return " and ".join(f"{ratio:.2f}" for ratio in ratios)

    assert (
        f"{faster(8, 'by hand')} of a loop by hand on DeepSpeed; {faster(8, 'trainer')} of HF Trainer in random order; "
        f"{faster(8, 'trainer, grouped')} of HF Trainer with `group_by_length`"
    ) in row("real tokens per second")
    assert f"{faster(1, 'trainer, grouped')} of HF Trainer with `group_by_length`" in row("the same, memory for 1")
    stages = measured("scaling-cpu")["stages"]
    assert ", ".join(f"{stages[stage]['speed_up']['median']:.2f}" for stage in stages) in row("speed-up of 2 ranks")
    assert list(stages) == ["0", "1", "2", "3"]


def test_how_fast_planning_and_votes_are() -> None:
    results = {each["what"]: each for each in measured("latency")["results"]}
    asked = ("gpt2 on 4 x 12G, nothing kept", UNSEEN, "that model, another global batch")
    seconds = ", ".join(f"{results[what]['verdict_seconds']:.1f} s" for what in asked)
    assert f"| {seconds} |" in row("a plan's verdict")
    cases = measured("guard-cpu")["cases"]
    shares = [100 * cases[f"ZeRO-{stage}, 2 layers of 128"]["share"]["median"] for stage in (2, 3)]
    assert f"{shares[0]:.2f} and {shares[1]:.2f} % of the step" in row("votes of a training step")


def test_the_figures_between_the_tables_of_the_benchmarks_are_those_that_were_measured() -> None:
    said = BENCHMARKS
    true, chosen = measured("accuracy-cpu"), measured("choice-cpu")
    latency = {each["what"]: each for each in measured("latency")["results"]}
    (llama, tracker), again = (latency[what]["seconds"] for what in (UNSEEN, TRACKER)), latency["the same once more"]
    assert f"{true['exact']} exact, worst +{100 * true['worst_error']:.3f} % (bf16" in said
    assert f"{llama:.0f} s for all strategies" in said
    assert f"{llama / tracker:.2f} x MemTracker" in said and f"{tracker:.0f} s in that run" in said
    adapters = [latency[f"{kind} of llama-3.1-8b on 4 x {mem}G, nothing kept"] for kind, mem in ADAPTERS]
    figures = [
        f"on 4 x {mem}G {each['verdict_cpu_seconds']:.1f} and {each['cpu_seconds']:.1f}"
        for each, (_, mem) in zip(adapters, ADAPTERS, strict=True)
    ]
    assert all(each in said for each in figures), figures
    assert f"its verdict after {latency[UNSEEN]['verdict_seconds']:.1f} s" in said
    assert f"{again['seconds']:.1f} s when asked again" in said
    assert f"trains every strategy that fits, {chosen['strategies_timed']} in all" in said
    assert f"fastest in {chosen['fastest']} cases, at most 5 % slower in {chosen['within_5_percent']}" in said
    ranked = [each["seconds"]["search"]["cpu_seconds"] for each in measured("search")["results"]]
    assert f"{ranked[0]:.1f} s for GPT-2 and {ranked[1]:.1f} s for an 8B Llama" in said


def test_what_the_benchmarks_say_of_shared_samples_and_mixtures_is_what_was_measured() -> None:
    said = BENCHMARKS
    kept, true = measured("emulated-strategies")["summary"], measured("accuracy-strategies-cpu")
    allocated = kept["allocated_error"]
    assert allocated["worst"] == -allocated["lowest"] < 0.001 and kept["measured"] == kept["capped"]
    assert kept["unusable_share"] == kept["expandable_unusable_share"] == true["failures"] == true["lowest_error"] == 0
    assert f"Of {kept['measured']} rows, among them" in said
    assert f"allocated: median {100 * allocated['median']:.3f} %" in said
    assert f"worst {100 * allocated['worst']:.2f} %, which is also the lowest; capped" in said
    lowest = f"{100 * kept['reserved_error']['lowest']:.0f} %"
    assert f"(llama-3b, 65,536 tokens, offloaded, tiled MLP, shared by 4: {lowest}" in said
    assert f"expandable {100 * kept['expandable_error']['lowest']:.0f} %" in said
    assert f"holds {true['configurations']} such configurations" in said
    assert f"{true['exact']} exact, worst +{100 * true['worst_error']:.3f} %, none low" in said


def test_what_is_said_of_fused_kernels_on_emulated_cards_was_measured() -> None:
    kept, said = measured("emulated-kernels")["summary"], " ".join(readme.text("fused-kernels").split())
    allocated, reserved = kept["allocated_error"], kept["reserved_error"]
    assert kept["unusable_share"] == 0 == allocated["median"] and kept["capped"] == kept["configurations"]
    assert f"In {kept['measured']} runs on [emulated cards](emulated-gpu.md)" in said
    exact = sum(row["error"] == 0 for row in measured("emulated-kernels")["rows"])
    assert kept["measured"] - exact == 2 and allocated["worst"] == -allocated["lowest"]
    assert f"to the byte, in {exact}, and {100 * allocated['worst']:.3f} % more in two" in said
    assert f"reserved memory within {100 * max(reserved['worst'], -reserved['lowest']):.2f} %" in said


def test_how_close_training_is_to_trl_with_ligers_kernels() -> None:
    kept = measured("liger-trl-cpu")
    ours, theirs = kept["frugal, liger"], kept["sft_trainer"]
    assert len(ours["losses"]) == len(theirs["norms"]) == 20
    largest = {what: max(abs(a / b - 1) for a, b in zip(ours[what], theirs[what], strict=True)) for what in ours}
    assert f"at most {largest['losses']:.1e}, gradient norms by {largest['norms']:.1e}" in BENCHMARKS


TRACKER = "memtracker, one configuration of llama-3.1-8b"
ADAPTERS = (("LoRA", 24), ("QLoRA", 12))
UNSEEN = "an 8B model never seen on 8 x 24G, nothing kept"
