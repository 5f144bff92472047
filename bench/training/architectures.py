"""Compare the trained loss with the one that a model's authors gave it, for every text model of transformers.

Each kind of model with a head for a task is built small from its own defaults (`small_configs`), resolved as `frugal
plan --model config.json` does, and asked for the loss of the same samples twice:

- the model's own: `model(input_ids=..., labels=...).loss`, each sample by itself, times its targets;
- ours: all samples in one micro-batch as frugal collates them, padded on the right, with the plain and the tiled loss.

Loss and gradient of both are compared in fp64 (fp32 where a model's kernels know no other), without dropout. A kind is
`exact` if the loss is within 1e-6 and the gradient within 1e-5; `refused` if frugal says so, with its reason; `exact
alone` if it is exact, but padding matters to the model itself, which `frugal plan` says; `not built` where
transformers builds no small one here. Mixtures of experts are asked once more with `output_router_logits`; their
own loss is then that of the same micro-batch, because it is no sum over samples.

With `--ranks`, each is trained a step on two ranks under ZeRO-2 and ZeRO-3 besides, see `architectures_on_ranks`.

    python -m bench.training.architectures [--ranks] [MODEL_TYPE ...]
"""

import json
import logging
import math
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from bench.environment import environment
from bench.goals import report_goals
from bench.ranks import Ranks
from bench.training import architectures_on_ranks
from bench.training.small_configs import small_config
from frugal.errors import FrugalError
from frugal.models import resolve, tiled_loss, transformers_internals
from frugal.models.losses.decoder_inputs import decoder_inputs
from frugal.models.objectives import Objective, Sample
from frugal.models.spec import _AUTO, TASKS, ModelSpec
from frugal.models.trials.model_check import check_model

RESULTS = Path(__file__).parents[1] / "results" / "architectures-cpu.json"
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
LENGTHS = (5, 17, 11, 24)
MOST_LOSS, MOST_GRADIENT = 1e-6, 1e-5
MOST_PARAMETERS = 12_000_000
LEAST_EXACT = 120

Record = dict[str, Any]
Sums = tuple[float, int, dict[str, Tensor]]
"""A summed loss, its targets, and its gradient."""


def pairs(model_types: Sequence[str] = ()) -> Iterator[tuple[str, str, bool]]:
    """Every task and kind of model with a head for it, and whether its routers add to the loss."""
    for task in TASKS:
        for model_type in getattr(modeling_auto, f"{_AUTO[task][1]}_NAMES"):
            if not model_types or model_type in model_types:
                yield task, model_type, False
                if task in ("causal-lm", "seq2seq") and _has_routers(model_type):
                    yield task, model_type, True


def _has_routers(model_type: str) -> bool:
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # its defaults contradict each other, which will be said
        return False
    parts = (config, *(getattr(config, name, None) for name in config.sub_configs or {}))
    return any(hasattr(part, "output_router_logits") for part in parts)


def samples_of(task: str) -> list[Sample]:
    """Ragged samples, with targets in a part of each; token 2 is the end, which encoder-decoders look for."""
    generator, made = random.Random(0), []
    for length in LENGTHS:
        tokens = [generator.randrange(20, 200) for _ in range(length)]
        sample: dict[str, Any] = {"input_ids": tokens}
        match task:
            case "causal-lm":
                sample["labels"] = [-100] * (length // 3) + tokens[length // 3 :]
            case "masked-lm":
                sample["labels"] = [token if i % 3 == 1 else -100 for i, token in enumerate(tokens)]
                sample["input_ids"] = [3 if i % 6 == 1 else token for i, token in enumerate(tokens)]
            case "seq2seq":
                sample = {"input_ids": [*tokens, 2], "labels": [*tokens[::-2], 2, 7]}
            case _:
                sample = {"input_ids": [*tokens, 2], "label": generator.randrange(2)}
        made.append(sample)
    return made


def measure(task: str, model_type: str, *, routers: bool = False) -> Record:
    """Return what was asked, and what came out."""
    begin = time.perf_counter()
    record = _measured(task, model_type, routers)
    return record | {"seconds": round(time.perf_counter() - begin, 2)}


def _measured(task: str, model_type: str, routers: bool) -> Record:
    record: Record = {"task": task, "model_type": model_type, "routers": routers}
    try:
        spec = _spec(task, model_type, routers)
        on_meta = spec.build(dtype=torch.float32, device="meta")
        num_parameters = sum(parameter.numel() for parameter in on_meta.parameters())
        record |= {"class": type(on_meta).__name__, "parameters": num_parameters}
        if num_parameters > MOST_PARAMETERS:
            return record | {"verdict": "not built", "reason": f"{num_parameters / 1e6:.0f} million parameters"}
    except FrugalError as error:
        is_its_own = not any(words in str(error) for words in ("makes no model", "is not a model's configuration"))
        reason = str(error).splitlines()[0 if is_its_own else 1].removeprefix("  because ")
        reason = re.sub(r"\S*/config.json", "config.json", reason)
        return record | {"verdict": "refused" if is_its_own else "not built", "reason": reason}
    except Exception as error:  # transformers, which contradicts its own defaults or lacks a library
        return record | {"verdict": "not built", "reason": _first_line(error)}
    samples = samples_of(task)
    try:
        record["notes"] = check_model(spec)
    except FrugalError as error:
        return record | {"verdict": "refused", "reason": _because(error)}
    except Exception as error:  # whatever a model trips over
        return record | {"verdict": "failed", "reason": _first_line(error)}
    failure = ""
    for dtype in (torch.float64, torch.float32):
        try:
            compared = _compared(spec, samples, dtype) | {"dtype": str(dtype).removeprefix("torch.")}
        except Exception as error:  # kernels that know no fp64, and losses that text alone does not have
            failure = _first_line(error)
            continue
        if dtype is torch.float32 or not math.isnan(compared["gradient_error"]):  # masks for fp32 are NaN in fp64
            return record | compared
    return record | {"verdict": "not run", "reason": f"its own loss fails: {failure}"}


def _spec(task: str, model_type: str, routers: bool) -> ModelSpec:
    """As `frugal plan --model config.json --task TASK` has it."""
    config = small_config(CONFIG_MAPPING[model_type])
    if task == "masked-lm" and model_type == "reformer":
        config.is_decoder = False
    if routers:
        for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
            part.output_router_logits = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config.to_json_string())
        return resolve.resolve(str(path), task=task)


def _compared(spec: ModelSpec, samples: Sequence[Sample], dtype: torch.dtype) -> Record:
    model, objective = spec.build(dtype=dtype), spec.objective()
    model.train(spec.config.model_type == "reformer")  # which has no gradient otherwise
    batches = [samples] if getattr(objective, "own_loss", False) else [[sample] for sample in samples]
    together = ours(model, objective, [samples])
    tried = []
    for moved, in_method in _ways(spec.task, model):
        theirs = own_loss(spec.task, model, batches, moved=moved, in_method=in_method)
        tried.append((_apart("", together, theirs), theirs))
        if _is_exact(tried[-1][0]):
            break
    record, theirs = min(tried, key=lambda pair: pair[0]["gradient_error"])
    record |= {"targets": theirs[1], "verdict": "exact" if _is_exact(record) else "wrong", "tiled": None}
    if record["verdict"] == "wrong":
        alone = ours(model, objective, [[sample] for sample in samples])
        if any(_is_exact(_apart("", alone, theirs)) for _, theirs in tried):
            record |= {"verdict": "exact alone"}
        return record
    if spec.task == "sequence-classification" or not tiled_loss.is_supported(model):
        return record
    try:
        tiled_loss.apply(model)
        record |= {"tiled": "exact", **_apart("tiled_", ours(model, objective, [samples]), theirs)}
    except FrugalError as error:
        return record | {"tiled": f"refused: {_because(error)}"}
    return record if _is_exact(record, "tiled_") else record | {"tiled": "wrong", "verdict": "wrong"}


def own_loss(task: str, model: nn.Module, batches: Sequence[Sequence[Sample]], *, moved: bool, in_method: bool) -> Sums:
    """The model's own loss of each batch, times its targets; see `_ways`."""
    model.zero_grad()
    total, count = 0.0, 0
    for batch in batches:
        inputs, targets = _inputs(task, batch, moved=moved)
        if in_method:
            inputs["decoder_input_ids"] = decoder_inputs(model, inputs["labels"])
        loss = model(**inputs).loss * targets
        loss.backward()
        total, count = total + loss.item(), count + targets
    return total, count, _gradient(model)


def _ways(task: str, model: Any) -> list[tuple[bool, bool]]:
    """Return the possible meanings of labels: decoders taken from encoder-decoders do not shift them, and FSMT makes
    decoder inputs in the method for collators only."""
    if task == "causal-lm":
        return [(False, False), (True, False)]
    return [(False, model.config.model_type == "fsmt")]


def _inputs(task: str, samples: Sequence[Sample], *, moved: bool) -> tuple[dict[str, Any], int]:
    """Return what is given to transformers, padded where there are several samples, and the number of targets."""

    def padded(name: str, fill: int) -> Tensor:
        rows = [torch.tensor(sample[name]) for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    inputs = {"input_ids": padded("input_ids", 0)}
    if len(samples) > 1:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        inputs["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    if task == "sequence-classification":
        return inputs | {"labels": torch.tensor([sample["label"] for sample in samples])}, len(samples)
    labels = padded("labels", -100)
    if moved or task != "causal-lm":
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if moved else labels
        return inputs | {"labels": labels}, int((labels != -100).sum())
    return inputs | {"labels": labels}, int((labels[:, 1:] != -100).sum())


def ours(model: nn.Module, objective: Objective, micro_batches: Sequence[Sequence[Sample]]) -> Sums:
    """Return what frugal trains."""
    model.zero_grad()
    total, count = 0.0, 0
    for samples in micro_batches:
        batch = objective.collate(samples)
        loss = objective.loss_sum(model, batch)
        loss.backward()
        total, count = total + loss.item(), count + objective.count(batch)
    return total, count, _gradient(model)


def _gradient(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}


def _apart(prefix: str, one: Sums, other: Sums) -> Record:
    """Return the distance between them, relative to the other."""
    zero = torch.zeros(())
    names = one[2].keys() | other[2].keys()
    square = sum(float((one[2].get(name, zero) - other[2].get(name, zero)).square().sum()) for name in names)
    norm = sum(float(tensor.square().sum()) for tensor in other[2].values())
    loss = abs(one[0] - other[0]) / abs(other[0]) if one[1] == other[1] else float("inf")
    return {f"{prefix}loss_error": loss, f"{prefix}gradient_error": (square / norm) ** 0.5 if norm else float("inf")}


def _is_exact(record: Record, prefix: str = "") -> bool:
    return record[f"{prefix}loss_error"] <= MOST_LOSS and record[f"{prefix}gradient_error"] <= MOST_GRADIENT


def _because(error: FrugalError) -> str:
    lines = str(error).splitlines()
    return next((line.removeprefix("  because ") for line in lines if line.startswith("  because")), lines[0])


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def main() -> None:
    """Measure every pair, or those of the models that are named; keep what came out, and write the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers_internals.always_use()
    torch.set_num_threads(1)
    model_types = [word for word in sys.argv[1:] if word != "--ranks"]
    ranks = Ranks(architectures_on_ranks.WORLD_SIZE) if "--ranks" in sys.argv else None
    kept = json.loads(RESULTS.read_text())["pairs"] if model_types else []
    records = {(record["task"], record["model_type"], record["routers"]): record for record in kept}
    for pair in pairs(model_types):
        record = measure(pair[0], pair[1], routers=pair[2])
        if ranks is not None and "loss_error" in record and not pair[2]:
            of_task = samples_of(pair[0])
            record["ranks"] = architectures_on_ranks.measure(ranks, _spec(*pair), of_task, ours)
        records[pair] = record
        print(told(record), flush=True)
        keep(list(records.values()))
    goals = reached(list(records.values()))
    sys.exit(report_goals({"goals": goals}))


def keep(records: list[Record]) -> None:
    """Write what was measured, and the table of it."""
    result = environment("python -m bench.training.architectures") | {"goals": reached(records), "pairs": records}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    TABLE.write_text(table(records))


def reached(records: list[Record]) -> dict[str, bool]:
    """The goals, and whether they are reached."""
    verdicts = Counter(record["verdict"] for record in records)
    return {
        f"at least {LEAST_EXACT} pairs are exact": verdicts["exact"] + verdicts["exact alone"] >= LEAST_EXACT,
        "none is wrong, and none fails": verdicts["wrong"] + verdicts["failed"] == 0,
    }


_PAGE = """# Architectures

<!-- generated: python -m bench.training.architectures -->

The text models of transformers {version}, built small from its defaults, are compared with their authors' own loss:
`model(input_ids=..., labels=...).loss` of each sample alone, times its targets, against frugal's sum over one
micro-batch of samples of different lengths, in fp64 where the model's kernels support it. Mixtures of experts are
compared a second time with `output_router_logits`. `bench/results/architectures-cpu.json` has each pair of model and
task, its errors, and the reason of a refusal.

{summary}

- **exact**: loss within 1e-6, gradient within 1e-5; the worst of them: loss {loss:.0e}, gradient {gradient:.0e}.
- **exact alone**: exact without padding. Padding changes the model's own output, and the plan has a note.
- **refused**: `frugal plan` refuses it with the reason, mostly because a model for `causal-lm` sees later tokens.
- **not run**: the model's own loss of text fails. **not built**: no small model could be built.

With the tiled loss {tiled} pairs are exact; where it is refused, the plain loss is planned. On two ranks, under ZeRO-2
and ZeRO-3, {ranks} pairs were measured: {exact_on_ranks} are exact; {dry_runs} of {all_dry_runs} dry runs run.
"""


def table(records: list[Record]) -> str:
    """Return the page of the documentation: counts by task, and the worst errors."""
    verdicts = ("exact", "exact alone", "refused", "not run", "not built")
    counts = Counter((record["task"], record["verdict"]) for record in records)
    rows = [[task, *(str(counts[task, verdict]) for verdict in verdicts)] for task in TASKS]
    exact = [record for record in records if record["verdict"] == "exact"]
    on_ranks = [record["ranks"] for record in records if "ranks" in record]
    dry_runs = [stage.get("dry_run", "runs") for stages in on_ranks for stage in stages.values()]
    return _PAGE.format(
        version=environment("")["versions"]["transformers"],
        summary="\n".join(f"| {' | '.join(row)} |" for row in (("task", *verdicts), ["---"] * 6, *rows)),
        loss=max(record["loss_error"] for record in exact),
        gradient=max(record["gradient_error"] for record in exact),
        tiled=sum(record["tiled"] == "exact" for record in exact),
        ranks=len(on_ranks),
        exact_on_ranks=sum(all(stage["verdict"] == "exact" for stage in stages.values()) for stages in on_ranks),
        dry_runs=dry_runs.count("runs"),
        all_dry_runs=len(dry_runs),
    )


def _on_ranks(record: Record) -> str:
    """In few words: `exact` where both stages are, and both dry runs run."""
    said = {}
    for stage, each in record.get("ranks", {}).items():
        dry = "" if each.get("dry_run", "runs") == "runs" else f", dry run: {each['dry_run']}"
        said[stage.replace("zero", "ZeRO-")] = f"{each['verdict']}{dry}".replace("|", "/")
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{stage} {verdict}" for stage, verdict in said.items())


def told(record: Record) -> str:
    """A line for people."""
    routers = "+ routers" if record["routers"] else ""
    name = f"{record['seconds']:6.1f} s  {record['task']:24}{record['model_type']:26}{routers:10}"
    if "loss_error" not in record:
        return f"{name}{record['verdict']}: {record['reason']}"
    errors = f"loss {record['loss_error']:.1e}  gradient {record['gradient_error']:.1e}"
    ranks = f"  2 ranks: {_on_ranks(record)}" if "ranks" in record else ""
    return f"{name}{record['verdict']:12} {errors}  tiled: {record['tiled']}{ranks}"


if __name__ == "__main__":
    main()
