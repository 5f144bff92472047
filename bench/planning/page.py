"""`python -m bench.planning.page`: what the page of a plan weighs, how soon it is made, opens and answers.

In Chromium, as `tests/browser.py` starts it; each page is opened `--runs` times, and medians are kept.

- made: seconds and seconds of processor time of `frugal plan` with an empty cache, with `-o`, and with `--html` after
  that, whose first half is the other lengths' traces and the tables of what other machines would come to;
- bytes of the page;
- opened: from the start of the navigation to the load event, and to the first answer, whose chart is drawn then;
- answered: from another micro-batch to its answer.

Goals: an 8B model's page weighs less than 1.5 MB and opens below a second.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "page.json"
PLANS = {
    "gpt2 on 4 x 12G": ["--model", "gpt2", "--gpus", "4", "--mem", "12G"],
    "llama-3.1-8b on 8 x 80G": ["--model", "llama-3.1-8b", "--gpus", "8", "--mem", "80G"],
}
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking")

OPENED = """
const done = arguments[arguments.length - 1], [navigation] = performance.getEntriesByType("navigation");
const wait = () => document.getElementById("answer").textContent
  ? done([navigation.loadEventEnd, performance.now()]) : setTimeout(wait, 1);
wait();
"""
ANSWERED = """
const [value, done] = arguments, answer = document.getElementById("answer"), slider = document.getElementById("micro");
const ask = () => {
  // Until then it is still saying what would fit.
  if (!/at most|not even|Not computed/.test(answer.textContent)) return setTimeout(ask, 20);
  const before = answer.textContent, start = performance.now();
  slider.value = value;
  slider.dispatchEvent(new Event("input"));
  const wait = () => answer.textContent !== before ? done(performance.now() - start) : setTimeout(wait, 1);
  wait();
};
ask();
"""
"""Milliseconds."""


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = {name: _measured(flags, arguments.runs) for name, flags in PLANS.items()}
    print(json.dumps(results, indent=2))
    environment = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "chromium": subprocess.run(["chromium", "--version"], capture_output=True, text=True).stdout.split()[1],
        "selenium": version("selenium"),
    }
    arguments.output.write_text(
        json.dumps({**environment, "runs": arguments.runs, "results": results}, indent=2) + "\n"
    )


def _measured(flags: list[str], runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / "full.html"
        made = {
            "plan": _command(flags, folder, "first"),
            "plan with -o": _command([*flags, "-o", folder], folder, "second"),
            "page of --html": _command([*flags, "--html", str(full)], folder, "second"),
            "the same, kept": _command([*flags, "--html", str(full)], folder, "second"),
        }
        pages = {"beside plan.json": Path(folder) / "plan.html", "--html": full}
        return {"made": made, "pages": {name: _page(path, runs) for name, path in pages.items()}}


def _command(flags: list[str], folder: str, cache: str) -> dict[str, float]:
    """`frugal plan`: seconds, and seconds of processor time of its processes."""
    environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/{cache}", "XDG_CONFIG_HOME": os.devnull}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "frugal", "plan", *flags], env=environment, check=True, cwd=ROOT, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.perf_counter() - start, 2), "cpu_seconds": round(cpu, 2)}


def _page(path: Path, runs: int) -> dict[str, Any]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for argument in ARGUMENTS:
        options.add_argument(argument)
    driver = Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    opened, answered = [], []
    for _ in range(runs):
        driver.get(path.as_uri())
        opened.append(driver.execute_async_script(OPENED))
        answered += [driver.execute_async_script(ANSWERED, value) for value in ("1", "3")]
    driver.quit()
    loaded, said = zip(*opened, strict=True)
    return {
        "bytes": path.stat().st_size,
        "load_seconds": round(statistics.median(loaded) / 1000, 3),
        "first_answer_seconds": round(statistics.median(said) / 1000, 3),
        "next_answer_seconds": round(statistics.median(answered) / 1000, 3),
    }


if __name__ == "__main__":
    main()
