"""Single calls of torch, forward and backward, on a card or in a dry run: the blocks that each takes and gives back.

    python -m tests.dryrun.single_calls

makes them on an emulated card and writes `single_calls.json` beside this file.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RECORD = Path(__file__).with_suffix(".json")
SHAPE = 64, 50, 64
TYPES = torch.float32, torch.bfloat16

Events = list[int]
"""Bytes of a block that is taken, or those of one that is given back, negative."""

Requests = dict[str, tuple[Events, Events] | str]
"""Of forward and backward, by name and type; or the error."""


def on(x: Tensor) -> dict[str, Any]:
    """Return type and place of a tensor."""
    return {"device": "cuda", "dtype": x.dtype}


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y),
    "smooth_l1_sum": lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"),
    "smooth_l1_none": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber": lambda x, y: F.huber_loss(x, y),
    "huber_none": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "mse": lambda x, y: F.mse_loss(x, y),
    "mse_sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "l1": lambda x, y: F.l1_loss(x, y),
    "bcel": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "bcelw": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.ones(64, **on(x))),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "kllog": lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="sum", log_target=True),
    "poisson": lambda x, y: F.poisson_nll_loss(x, y.abs()),
    "gauss": lambda x, y: F.gaussian_nll_loss(x, y, x.square() + 1),
    "softm": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "cosem": lambda x, y: F.cosine_embedding_loss(
        x.flatten(0, 1), y.flatten(0, 1), torch.ones(x.shape[0] * x.shape[1], device="cuda")
    ),
    "cossim": lambda x, y: F.cosine_similarity(x, y, dim=-1).sum(),
    "trip": lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)),
    "pdist": lambda x, y: F.pairwise_distance(x, y).sum(),
    "rank": lambda x, y: F.margin_ranking_loss(x, y, y.sign()),
    "mlsm": lambda x, y: F.multilabel_soft_margin_loss(x.flatten(0, 1), (y > 0).to(x.dtype).flatten(0, 1)),
    "ce": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64, device="cuda")
    ),
    "cew": lambda x, y: F.cross_entropy(
        x.flatten(0, 1),
        torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64, device="cuda"),
        weight=torch.ones(64, **on(x)),
        label_smoothing=0.1,
    ),
    "cep": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1).softmax(-1)),
    "nll": lambda x, y: F.nll_loss(
        x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64, device="cuda")
    ),
    "cdist": lambda x, y: torch.cdist(x, y).sum() if x.dtype == torch.float32 else x.sum(),
    "logsumexp": lambda x, y: torch.logsumexp(x, -1).sum(),
    "norm2": lambda x, y: x.norm(dim=-1).sum(),
    "normalize": lambda x, y: F.normalize(x, dim=-1).sum(),
    "std": lambda x, y: x.std(-1).sum(),
    "var": lambda x, y: x.var(-1, keepdim=True).sum(),
    "varmean": lambda x, y: torch.var_mean(x, 1)[0].sum(),
    "prod": lambda x, y: x.prod(-1).sum(),
    "amax": lambda x, y: x.amax(1).sum(),
    "maxd": lambda x, y: x.max(1).values.sum(),
    "median": lambda x, y: x.median(-1).values.sum(),
    "cumprod": lambda x, y: x.cumprod(1).sum(),
    "kthv": lambda x, y: x.kthvalue(3, -1).values.sum(),
    "avg1": lambda x, y: F.avg_pool1d(x.transpose(1, 2), 2).sum(),
    "mx1": lambda x, y: F.max_pool1d(x.transpose(1, 2), 2).sum(),
    "ada1": lambda x, y: F.adaptive_avg_pool1d(x.transpose(1, 2), 7).sum(),
    "adam1": lambda x, y: F.adaptive_max_pool1d(x.transpose(1, 2), 7).sum(),
    "intl": lambda x, y: F.interpolate(x.transpose(1, 2), size=77, mode="linear").sum(),
    "intn": lambda x, y: F.interpolate(x.transpose(1, 2), size=77).sum(),
    "int2": lambda x, y: F.interpolate(x[:, None], scale_factor=2.0, mode="bilinear").sum(),
    "intc": lambda x, y: F.interpolate(x[:, None], size=(60, 70), mode="bicubic").sum(),
    "unfold": lambda x, y: x.unfold(1, 3, 1).sum(),
    "unf2": lambda x, y: F.unfold(x[:, None], 3).sum(),
    "fold": lambda x, y: F.fold(F.unfold(x[:, None], 2, stride=2), (50, 64), 2, stride=2).sum(),
    "pads": lambda x, y: F.pad(x, (1, 1), mode="reflect").sum(),
    "padr": lambda x, y: F.pad(x, (1, 1), mode="replicate").sum(),
    "padc": lambda x, y: F.pad(x, (1, 1), mode="circular").sum(),
    "gridd": lambda x, y: F.grid_sample(x[:, None], torch.zeros(64, 8, 8, 2, **on(x))).sum(),
    "pixsh": lambda x, y: F.pixel_shuffle(x.reshape(64, 4, 20, 40), 2).sum(),
    "embag": lambda x, y: F.embedding_bag(
        torch.zeros(9, 5, dtype=torch.int64, device="cuda"), x.flatten(0, 1), mode="sum"
    ).sum(),
    "gumb": lambda x, y: F.gumbel_softmax(x, hard=True).sum(),
    "softsh": lambda x, y: F.softshrink(x).sum(),
    "rrelu": lambda x, y: F.rrelu(x, training=True).sum(),
    "glu": lambda x, y: F.glu(x).sum(),
    "prelu": lambda x, y: F.prelu(x, torch.full((50,), 0.1, **on(x)).requires_grad_()).sum(),
    "tril": lambda x, y: x.tril().sum(),
    "trl": lambda x, y: torch.einsum("bij,bkj->bik", x, y).sum(),
    "gather": lambda x, y: x.gather(1, torch.zeros(64, 3, 64, dtype=torch.int64, device="cuda")).sum(),
    "idxsel": lambda x, y: x.index_select(1, torch.arange(9, device="cuda")).sum(),
    "idx": lambda x, y: x[torch.arange(9, device="cuda")].sum(),
    "idx2": lambda x, y: x[:, torch.arange(9, device="cuda")].sum(),
    "scatr": lambda x, y: (
        torch.zeros(64, 99, 64, **on(x))
        .scatter_reduce(1, torch.zeros(x.shape, dtype=torch.int64, device="cuda"), x, "sum")
        .sum()
    ),
    "take": lambda x, y: x.take_along_dim(torch.zeros(64, 3, 64, dtype=torch.int64, device="cuda"), 1).sum(),
    "topk": lambda x, y: x.topk(5, -1).values.sum(),
    "sort": lambda x, y: x.sort(-1).values.sum(),
    "sort1": lambda x, y: x.sort(1).values.sum(),
    "flip": lambda x, y: x.flip(1).sum(),
    "roll": lambda x, y: x.roll(3, 1).sum(),
    "rot": lambda x, y: torch.rot90(x, 1, (1, 2)).sum(),
    "diff": lambda x, y: x.diff(dim=1).sum(),
    "repi": lambda x, y: x.repeat_interleave(2, 1).sum(),
    "tile": lambda x, y: x.tile(1, 2, 1).sum(),
    "diag": lambda x, y: torch.diag_embed(x[:, :4]).sum(),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3).sum(),
    "clampm": lambda x, y: torch.maximum(x, y).sum(),
    "atan2": lambda x, y: torch.atan2(x, y).sum(),
    "pow": lambda x, y: x.abs().pow(1.5).sum(),
    "powt": lambda x, y: (x.abs() + 1).pow(y).sum(),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 1).sum(),
    "addmv": lambda x, y: (x @ torch.ones(64, **on(x))).sum(),
    "matm": lambda x, y: torch.matmul(x, y.transpose(1, 2)).sum(),
    "addb": lambda x, y: torch.addbmm(torch.ones(50, 50, **on(x)), x, y.transpose(1, 2)).sum(),
    "inst": lambda x, y: F.instance_norm(x.transpose(1, 2)).sum(),
    "gn": lambda x, y: F.group_norm(
        x.transpose(1, 2), 8, torch.ones(64, **on(x)).requires_grad_(), torch.ones(64, **on(x)).requires_grad_()
    ).sum(),
    "ln": lambda x, y: F.layer_norm(
        x, (64,), torch.ones(64, **on(x)).requires_grad_(), torch.ones(64, **on(x)).requires_grad_()
    ).sum(),
    "bn": lambda x, y: F.batch_norm(
        x.transpose(1, 2),
        None,
        None,
        torch.ones(64, device="cuda").requires_grad_(),
        torch.ones(64, device="cuda").requires_grad_(),
        training=True,
    ).sum(),
    "lrn": lambda x, y: F.local_response_norm(x.transpose(1, 2), 3).sum(),
    "rms": lambda x, y: F.rms_norm(x, (64,), torch.ones(64, **on(x)).requires_grad_()).sum(),
    "rmsnc": lambda x, y: F.rms_norm(x.transpose(1, 2), (50,)).sum(),
    "mish": lambda x, y: F.mish(x).sum(),
    "celu": lambda x, y: F.celu(x).sum(),
    "hardsig": lambda x, y: F.hardsigmoid(x).sum(),
    "logs": lambda x, y: F.logsigmoid(x).sum(),
    "softp": lambda x, y: F.softplus(x).sum(),
    "thr": lambda x, y: F.threshold(x, 0.1, 0.0).sum(),
    "nanm": lambda x, y: x.nanmean().sum(),
    "cumsum": lambda x, y: x.cumsum(1).sum(),
    "logcum": lambda x, y: x.logcumsumexp(1).sum(),
    "trapz": lambda x, y: torch.trapezoid(x, dim=1).sum(),
    "kron": lambda x, y: torch.kron(x[0, :4, :4], y[0]).sum(),
    "cross": lambda x, y: torch.linalg.cross(x[..., :3], y[..., :3]).sum(),
    "outer": lambda x, y: torch.outer(x[0, 0], y[0, 0]).sum(),
    "where": lambda x, y: torch.where(x > 0, x, y).sum(),
    "mfill": lambda x, y: x.masked_fill(y > 0, 0.0).sum(),
    "stack": lambda x, y: torch.stack([x, y]).sum(),
    "chunkc": lambda x, y: torch.cat(x.chunk(3, 1), 1).sum(),
    "glob": lambda x, y: (x.mean((0, 1)) * x.std()).sum(),
    "drop": lambda x, y: F.dropout(x, 0.3).sum(),
    "drop1": lambda x, y: F.dropout1d(x, 0.3).sum(),
    "fdrop": lambda x, y: F.feature_alpha_dropout(x, 0.3).sum(),
    "adrop": lambda x, y: F.alpha_dropout(x, 0.3).sum(),
}
"""Functions of a tensor that requires gradients, and one that does not."""

DIFFER = {
    "backward writes into tensors of its own, but not under a mode": "bcel bcelw gauss idxsel mlsm softm",
    "products copy a gradient that is one number": "addb matm trl",
    "no rule for the kernel": "adam1 atan2 bn cdist cumprod embag fold gn idx idx2 logcum prod rmsnc unf2",
    "log-sigmoid keeps a buffer on a CPU alone": "logs",
    "counters of some bytes": "cew glob nanm sort sort1 unfold",
}
"""Calls of which a dry run records other blocks, by the reason."""


def requests(start: Callable[[], None], events: Callable[[], Events]) -> Requests:
    """Return the blocks of all calls. `events`: those since `start`."""
    weight = torch.ones(8, 8, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()  # takes cuBLAS's workspaces
    found: Requests = {}
    for name, call in CALLS.items():
        for dtype in TYPES:
            x, y = (torch.randn(SHAPE, device="cuda", dtype=dtype) for _ in range(2))
            x.requires_grad_()
            start()
            try:
                loss = call(x, y)
                if loss.dim():
                    loss = loss.sum()
                forward = events()
                start()
                loss.backward()
                found[f"{name} {str(dtype).removeprefix('torch.')}"] = forward, events()
                del loss
            except (RuntimeError, NotImplementedError) as error:
                found[f"{name} {str(dtype).removeprefix('torch.')}"] = f"{type(error).__name__}"
    return found


def rounded(size: int) -> int:
    """Return a block's bytes."""
    return -(-size // 512) * 512


def on_card() -> Requests:
    """Return the blocks of all calls on a card."""
    memory = torch.cuda.memory

    def start() -> None:
        memory._record_memory_history(max_entries=100_000, context=None)

    def events() -> Events:
        (trace,) = memory._snapshot()["device_traces"]
        memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_completed": -1}
        return [signs[each["action"]] * rounded(each["size"]) for each in trace if each["action"] in signs]

    return requests(start, events)


def main() -> None:
    """Write the record, from a process on an emulated card."""
    from bench.emulated_gpu.environment import environment, python

    code = "import json; from tests.dryrun.single_calls import on_card; print(json.dumps(on_card()))"
    env = environment("rtx3060", num_gpus=1)
    done = subprocess.run([python(), "-c", code], env=env, stdout=subprocess.PIPE, check=True)
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in json.loads(done.stdout).items()]
    RECORD.write_text("{" + ",\n".join(lines) + "}\n")
    print(f"wrote {RECORD}", file=sys.stderr)


if __name__ == "__main__":
    main()
