"""Memory that no configuration changes on a GPU: context, libraries' workspaces, and kernels' own."""

from typing import Any

import torch

from frugal.dryrun.trace.kernel_memory import Steps, steps


def peak_inside(taken: Steps) -> int:
    """Return the most bytes that are taken besides the outputs."""
    sizes = [step for step in taken if step > 0]
    live = most = 0
    for step in taken:
        live += step if step >= 0 else -sizes[-step - 1]
        most = max(most, live)
    return most


def constants() -> dict[str, Any]:
    """Context, library workspaces, and what two kernels take inside: measured, beside what dry runs assume."""
    torch.zeros(1, device="cuda")
    total = torch.cuda.mem_get_info()[1]
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "device": properties.name,
        "device_bytes": total,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "resident_threads": properties.multi_processor_count * properties.max_threads_per_multi_processor,
        "context_bytes": {"empty": _outside()},
        "workspace_bytes": {},
    }
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        layer, x = (
            torch.nn.Linear(1024, 1024, device="cuda", dtype=dtype),
            torch.ones(64, 1024, device="cuda").to(dtype),
        )
        before = torch.cuda.memory_allocated()
        layer(x).sum().backward()
        layer.zero_grad()
        torch.cuda.synchronize()
        found["workspace_bytes"][f"linear {name}"] = torch.cuda.memory_allocated() - before
        del layer, x
    found["kernels"] = {}
    for name, measure in (("flash backward", _flash_backward), ("embedding backward", _embedding_backward)):
        try:
            found["kernels"][name] = measure()
        except RuntimeError as error:  # a device without this kernel
            found["kernels"][name] = {"failure": str(error).splitlines()[0]}
    found["context_bytes"]["after products, attention and embedding"] = _outside()
    return found


def _outside() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _flash_backward() -> dict[str, int]:
    """Run it for 4 samples, 16 heads (4 of keys) beside each other as models have them, 1000 tokens, head size 96."""
    aten = torch.ops.aten
    query = torch.randn(4, 1000, 16, 96, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(4, 1000, 4, 96, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    out = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False)
    result, log_sum, first, second, most_q, most_k, seed, offset, _ = out
    gradient = torch.ones_like(result)
    arguments = (
        gradient, query, key, value, result, log_sum, first, second, most_q, most_k, 0.0, True, seed, offset,
    )  # fmt: skip
    return _inside(aten._scaled_dot_product_flash_attention_backward.default, arguments)


def _embedding_backward() -> dict[str, int]:
    """Run it for 8192 tokens in a vocabulary of 50,000."""
    gradient = torch.ones(8, 1024, 768, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(0, 50_000, (8, 1024), device="cuda")
    return _inside(torch.ops.aten.embedding_dense_backward.default, (gradient, indices, 50_000, -1, False))


def _inside(operator: Any, arguments: tuple[Any, ...]) -> dict[str, int]:
    """Bytes that a kernel takes beyond what it returns: measured and predicted."""
    operator(*arguments)  # the first call may set up more
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = operator(*arguments)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    measured = torch.cuda.max_memory_allocated() - before - kept
    del out
    inside = steps(operator, arguments, torch.cuda.get_device_capability())
    return {"measured_bytes": measured, "predicted_bytes": peak_inside(inside)}
