"""`python -m bench.emulated_gpu`: predicted memory against torch's own allocator on emulated cards.

It needs the environment that `bench/emulated_gpu` sets up: torch's CUDA build over a driver that allocates address
space and runs no kernel. Requests, kernels' choice and workspaces, segments are torch's; values and times are not.

    python -m bench.emulated_gpu
    python -m bench.emulated_gpu --predictions predictions.json --predict       (any machine)
    python -m bench.emulated_gpu --predictions predictions.json                 (then with the emulated driver)
    python -m bench.emulated_gpu --strategies    (shared samples, mixtures of modes, tiled MLP, partial offload)
    python -m bench.emulated_gpu --kernels    (both tables' rows of models with Liger's kernels, which have to be there)
    python -m bench.emulated_gpu --only falcon --only t4             (rows whose names have one of these words)

Each configuration runs two optimizer steps of frugal's engine, free, capped at the predicted capacity, and with
expandable segments. Of several ranks each runs by itself (`bench.emulated_gpu.twins`). Runs that the output file has
already are not repeated unless `--again` is given, so that a run that was ended goes on. After a change to predictions
`--repredict` repeats only what was capped at another promise.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from bench.emulated_gpu.cards import CARDS
from bench.emulated_gpu.table import OF_CARD, configurations
from bench.gpu.configurations import Configuration, device
from bench.gpu.predictions import Prediction, predict
from bench.gpu.records import records
from bench.gpu.report import Row, table
from bench.gpu.truth import Bench, environment, told
from frugal.config.hardware.cluster import find_card

OUT = Path(__file__).parents[1] / "results" / "emulated-gpu.json"
STRATEGIES_OUT = OUT.with_name("emulated-strategies.json")
KERNELS_OUT = OUT.with_name("emulated-kernels.json")
PROCESSES = 2


def main() -> int:
    """Predict, run and compare; 1 if nothing was measured."""
    asked = _arguments()
    rows_of = list(_fused() if asked.kernels else configurations(strategies=asked.strategies))
    chosen = [each for each in rows_of if not asked.only or any(word in each.name for word in asked.only)]
    chosen = chosen[: asked.first]
    asked.out = asked.out or (KERNELS_OUT if asked.kernels else STRATEGIES_OUT if asked.strategies else OUT)
    old = [] if asked.again else _finished(asked.out, {each.name for each in rows_of})
    known = {row.prediction.configuration.name: row.prediction for row in old if not asked.repredict}
    with TemporaryDirectory(prefix="emulated-gpu-") as name:
        folder = Path(name)
        predictions = _predictions(chosen, known, asked.predictions, folder)
        if asked.predict:
            return int(any(each.failure for each in predictions))
        rows = _measured(predictions, asked, folder, old)
    print("\n" + "\n".join(table(rows)))
    print(f"\nwrote {asked.out}")
    return int(not any(row.measured for row in rows))


FUSED = ("llama", "qwen3", "mistral", "gemma", "mixtral")


def _fused() -> Iterator[Configuration]:
    """Rows whose models have modules that Liger's kernels run, on cards that they run on."""
    for each in (*configurations(strategies=False), *configurations(strategies=True)):
        if any(name in each.model for name in FUSED) and each.card != "t4":
            yield replace(each, kernels="liger")
    for each in configurations(fused=True):
        yield replace(each, kernels="liger")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.emulated_gpu", description="Predictions, on emulated GPUs.")
    parser.add_argument("--strategies", action="store_true", help="the table of strategies that came later")
    parser.add_argument("--kernels", action="store_true", help="rows of both tables with Liger's kernels")
    parser.add_argument("--only", action="append", metavar="WORD", help="rows whose name has it; more than one: any")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N of these rows")
    parser.add_argument("--again", action="store_true", help="also rows that the output has already")
    parser.add_argument("--repredict", action="store_true", help="predict rows of the output anew, keep their runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to be done  [default: 60]")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"at once  [default: {PROCESSES}]")
    parser.add_argument("--expandable", type=int, metavar="N", help="so many of a card's rows  [default: all]")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="of before, which gets those that it lacks")
    parser.add_argument("--predict", action="store_true", help="only predict; any machine can")
    parser.add_argument("--streams", type=Path, metavar="FOLDER", help="keep what was asked of the allocator")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep small models as records: tests/measured")
    parser.add_argument(
        "--out", type=Path, help="[default: emulated-gpu.json in bench/results, or ...-strategies.json]"
    )
    return parser.parse_args()


def _finished(path: Path, today: set[str]) -> list[Row]:
    """The rows of an earlier run that were measured and are still in the table, `today`."""
    if not path.exists():
        return []
    content = msgspec.json.decode(path.read_bytes())
    return [row for each in content["rows"] if (row := Row.read(each)).measured and each["name"] in today]


def _predictions(
    chosen: list[Configuration], known: dict[str, Prediction], given: Path | None, folder: Path
) -> list[Prediction]:
    """Return those that are known or in a file, and what is missing then, which the file gets as it is made."""
    by_name = dict(known)
    if given is not None and given.exists():
        kept = msgspec.json.decode(given.read_bytes(), type=list[Prediction])
        by_name |= {each.configuration.name: each for each in kept}
    found = []
    for card in OF_CARD:
        of_card = [each for each in chosen if each.card == card]
        missing = [each for each in of_card if each.name not in by_name]
        memory = int(find_card(CARDS[card].frugal_name).memory_bytes)
        for each in told(predict(missing, device("cuda", memory), folder)):
            by_name[each.configuration.name] = each
            if given is not None:
                given.write_bytes(msgspec.json.encode(list(by_name.values())))
        found += [by_name[each.name] for each in of_card]
    return found


def _measured(predictions: Sequence[Prediction], asked: Any, folder: Path, old: list[Row]) -> list[Row]:
    """The rows of all cards, those of `old` among them."""
    rows = list(old)
    old_rows = {row.prediction.configuration.name: row for row in old}
    deadline = time.monotonic() + 60 * asked.minutes
    for card in OF_CARD:
        of_card = [each for each in predictions if each.configuration.card == card]
        if not of_card:
            continue
        bench = Bench(
            kind="cuda",
            folder=folder,
            device_bytes=int(find_card(CARDS[card].frugal_name).memory_bytes),
            deadline=deadline,
            limit=deadline,
            rows=rows,
            out=asked.out,
            head=environment("emulated", "cuda", "bench.emulated_gpu") | {"cards": list(OF_CARD)},
            expandable_runs=len(of_card) if asked.expandable is None else asked.expandable,
            streams=asked.streams,
        )
        for each in of_card:
            bench.add(each, old_rows.get(each.configuration.name))
        bench.work(asked.processes)
        if asked.record is not None:
            head = bench.head | {"device": f"emulated {card}"}
            mine = [row for row in rows if row.prediction in of_card]
            for record in records(mine, device("cuda", bench.device_bytes), head, folder):
                print(f"recorded {record.write(asked.record)}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
