"""`python -m bench.kernels.account`: kernels, bytes and memory of a layer and of a loss, each way, on an emulated card.

It needs the environment of `python -m bench.emulated_gpu.setup --liger`, whose torch allocates and launches as on a
card and computes nothing. For each family one layer runs plain, by Liger's patch, with frugal's kernels, and compiled;
then the loss of its head, each way, those of TRL and torchtune among them. Counted are launches, bytes moved beside
products and attention (operators by `frugal.memory_watch.traffic`, Triton's kernels by their arguments, compiled ones
by Inductor's own count), bytes kept for backward, and the allocator's peak in backward, weight gradients included.
`bench.kernels.roofline` makes times of them.

    python -m bench.kernels.account [--only GPT-2] [--folder .venv-emulated]

Results are kept in `bench/results/kernels.json`; docs/kernels.md shows them.
"""

import argparse
import gc
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import environment as measured_on
from bench.emulated_gpu import environment
from bench.kernels.layers import FAMILIES, Family, Way

RESULTS = Path(__file__).parents[1] / "results" / "kernels.json"
CARD = "a100-80g"
WAYS: tuple[Way, ...] = ("plain", "liger", "frugal", "compile")
PATIENCE_SECONDS = 900


def main() -> None:
    """Measure in processes of their own, or with `--measure` in this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=FAMILIES, help="one family; the others' results are kept")
    parser.add_argument("--folder", type=Path, help="of the emulated environment")
    parser.add_argument("--measure", nargs=2, metavar=("FAMILY", "WAY"), help="used by the command itself")
    asked = parser.parse_args()
    if asked.measure:
        family, way = FAMILIES[asked.measure[0]], asked.measure[1]
        print(json.dumps(of_losses(family) if way == "losses" else of_layer(family, way)), flush=True)
        os._exit(0)  # threads of the emulated driver may still run, which ends a process with an error
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"layers": {}, "losses": {}}
    for name, family in FAMILIES.items():
        if asked.only not in (None, name):
            continue
        ways = [way for way in WAYS if way != "liger" or family.liger]
        kept["layers"][name] = {way: _measured(name, way, asked.folder) for way in ways}
        kept["losses"][name] = _measured(name, "losses", asked.folder)
        head = measured_on.environment("python -m bench.kernels.account") | {"device": f"emulated {CARD}"}
        head["versions"] |= _versions(asked.folder)
        RESULTS.write_text(json.dumps(head | {"layers": kept["layers"], "losses": kept["losses"]}, indent=1) + "\n")
        print(f"{name}: {kept['layers'][name]}\n{kept['losses'][name]}", flush=True)


def _measured(family: str, way: str, folder: Path | None) -> dict[str, Any]:
    """Return what a process on an emulated card found, or why it failed."""
    with TemporaryDirectory() as scratch:
        made = environment.environment(CARD, kernels=Path(scratch) / "kernels")
        made |= {
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # a cached graph's bytes would not be told
            "LIGER_FUSED_MOE_AUTOTUNE": "0",  # nothing is timed
            "OMP_NUM_THREADS": "1",
        }
        command = [environment.python(folder), "-m", __spec__.name, "--measure", family, way]
        try:
            done = subprocess.run(
                command, env=made, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done in {PATIENCE_SECONDS} seconds"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _versions(folder: Path | None) -> dict[str, str]:
    """Versions of what is installed in the emulated environment alone."""
    code = "import json; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in "
    code += "('torch', 'triton', 'liger-kernel', 'trl')}))"
    done = subprocess.run([environment.python(folder), "-c", code], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def of_layer(family: Family, way: Way) -> dict[str, Any]:
    """Kernels and bytes of one layer, forward and backward."""
    import emulated_gpu_answers  # noqa: F401  # new blocks read as zeros
    import torch

    from bench.kernels import layers

    graphs = _inductor_bytes() if way == "compile" else None
    layer, run = layers.layer(family, way)

    def once() -> tuple[Any, Any]:
        layer.zero_grad()
        shape = family.samples, family.positions, family.width
        hidden = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return hidden, run

    found = _counted(once, graphs)
    found["weights_bytes"] = sum(parameter.nbytes for parameter in layer.parameters())
    return found


def of_losses(family: Family) -> dict[str, Any]:
    """Kernels and bytes of the loss of the family's head, each way, forward and backward."""
    import emulated_gpu_answers  # noqa: F401  # new blocks read as zeros
    import torch

    from bench.kernels import losses

    found = {}
    graphs = _inductor_bytes()  # of torchtune's, alone
    targets = torch.zeros((family.samples, family.positions), dtype=torch.int64, device="cuda")
    for way in losses.WAYS:
        head, loss = losses.loss(family, way)

        def once(head: Any = head, loss: Any = loss) -> tuple[Any, Any]:
            head.zero_grad()
            shape = family.samples, family.positions, family.width
            hidden = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            return hidden, lambda given: loss(given, targets)

        found[way] = _counted(once, *((graphs, losses.CHUNKS) if way == losses.TORCHTUNE else ()))
        if way == losses.TORCHTUNE:  # autograd adds up the weight's gradients, outside the graphs
            found[way]["bytes_beside_products"] += 3 * (losses.CHUNKS - 1) * head.weight.nbytes
        del head, loss, once
        gc.collect()
    return found


def _counted(
    once: Callable[[], tuple[Any, Any]], graphs: list[Counter[str]] | None = None, runs: int = 1
) -> dict[str, Any]:
    """Run it to compile, then for launches and memory, then for bytes.

    `graphs`: Inductor's bytes of forward and backward, where it compiles, which take place `runs` times.
    """
    import torch

    from bench.kernels.counting import launches, moved

    hidden, run = once()
    out = run(hidden)
    gradient = torch.empty_like(out)
    out.backward(gradient)
    del hidden, out
    hidden, run = once()
    gc.collect()
    before = torch.cuda.memory_allocated()
    launches()
    torch.cuda.reset_peak_memory_stats()
    out = run(hidden)
    forward = launches()
    saved = torch.cuda.memory_allocated() - before - out.nbytes
    forward_peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    found = {
        "kernels_forward": forward.total(),
        "kernels_backward": launches().total(),
        "saved_bytes": saved,
        "forward_peak_bytes": forward_peak,
        "backward_peak_bytes": torch.cuda.max_memory_allocated() - before,
    }
    del out, hidden
    hidden, run = once()
    if graphs is not None:
        assert len(graphs) == 2, "one graph forward and one backward"
        kinds = graphs[0] + graphs[1]
        return found | {
            "bytes_beside_products": runs * kinds["others"], "bytes_in_products": runs * kinds["products"],
        }  # fmt: skip
    with moved() as counted:
        run(hidden).backward(gradient)
    return found | {
        "bytes_beside_products": counted.beside_products, "bytes_in_products": counted.by_kind["products"],
    }  # fmt: skip


def _inductor_bytes() -> list[Counter[str]]:
    """Have Inductor tell how many bytes the kernels of each graph that it compiles read and write."""
    from torch._inductor.graph import GraphLowering

    graphs: list[Counter[str]] = []
    compiled = GraphLowering._compile_to_module

    def told(self: Any) -> Any:
        out, kinds = compiled(self), Counter[str]()
        for node in self.scheduler.nodes:
            kernel = getattr(node, "node", None)
            name = str(getattr(kernel, "python_kernel_name", None) or type(kernel).__name__)
            is_fused = type(node).__name__ in ("SchedulerNode", "FusedSchedulerNode")
            kind = "products" if "mm" in name else "attention" if "attention" in name else "others"
            kinds["others" if is_fused else kind] += node.get_read_write_buffers_sizes()
        graphs.append(kinds)
        return out

    GraphLowering._compile_to_module = told  # type: ignore[method-assign]
    return graphs


if __name__ == "__main__":
    main()
