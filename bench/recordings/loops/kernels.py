"""Plain modules that Liger-Kernel compares its kernels with, forward and backward (`benchmark/` of its repository).

Ten repetitions with the peak reset before each, of which the median counts: here the third. Gradients stay from one to
the next. The modules of the other kernels of a comparison are there, too, where the script makes them first.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from bench.recordings.loops.course import Peaks, peaks

VOCABULARY, WIDTH = 128_256, 4096
BF16 = torch.bfloat16


def repeated(run: Callable[[], None]) -> Peaks:
    """Run repetitions and return the peaks of the last."""
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        run()
    return peaks()


def on_card(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=requires_grad)


def given(forward: Callable[[], Tensor], gradient: Tensor) -> Peaks:
    """Run forward, and backward from a gradient that is there."""

    def run() -> None:
        out = forward()
        out.backward(gradient, retain_graph=True)

    return repeated(run)


def of_loss(forward: Callable[[], Tensor], *, keeps_graph: bool) -> Peaks:
    """Run a loss and its backward."""

    def run() -> None:
        out = forward()
        out.backward(retain_graph=keeps_graph)

    return repeated(run)


class Norm(nn.Module):
    """RMSNorm, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype)


class AddedNorm(Norm):
    """A sum and its RMSNorm."""

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # of two
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        residual = residual.to(torch.float32)
        hidden = hidden + residual
        residual = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype), residual.to(dtype)


def rms_norm(width: int) -> Peaks:
    """Norm 2048 rows in bf16, by a weight in fp32."""
    norms = Norm(width).to("cuda"), Norm(width).to("cuda")
    x = on_card(2048, width, dtype=BF16)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return given(lambda: norms[0](x), gradient)


def fused_add_rms_norm(width: int) -> Peaks:
    """Add and norm 2048 rows in fp32."""
    norms = AddedNorm(width).to("cuda"), AddedNorm(width).to("cuda"), AddedNorm(width).to("cuda")
    more = Norm(width).to("cuda")  # within the third
    x, residual = on_card(2048, width), on_card(2048, width)
    gradients = torch.randn_like(x), torch.randn_like(residual)
    x.requires_grad_(True)
    residual.requires_grad_(True)

    def run() -> None:
        out, added = norms[0](x, residual)
        torch.autograd.backward((out, added), gradients)

    found = repeated(run)
    del more
    return found


def layer_norm(width: int) -> Peaks:
    """Norm 4096 rows in fp32."""
    norms = nn.LayerNorm(width).to("cuda"), nn.LayerNorm(width).to("cuda")
    x = on_card(4096, width)
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return given(lambda: norms[0](x), gradient)


def swiglu(length: int) -> Peaks:
    """Run a gated feed-forward of 4 samples."""
    x = on_card(4, length, WIDTH, dtype=BF16, requires_grad=True)
    layer = LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=11_008)).to("cuda").to(BF16)

    def run() -> None:
        out = layer(x)
        out.backward(torch.randn_like(out), retain_graph=True)

    return repeated(run)


def embedding(vocabulary: int) -> Peaks:
    """Look up 32 samples of 512 tokens in fp32, width 768."""
    tables = nn.Embedding(vocabulary, 768).to("cuda"), nn.Embedding(vocabulary, 768).to("cuda")
    tokens = torch.randint(0, vocabulary, (32, 512), device="cuda")

    def run() -> None:
        out = tables[0](tokens)
        out.backward(torch.randn_like(out))

    return repeated(run)


def kl_div(vocabulary: int) -> Peaks:
    """Compare 16,384 rows."""
    loss = nn.KLDivLoss(reduction="batchmean")
    x = on_card(8 * 2048, vocabulary, requires_grad=True).log_softmax(dim=-1)
    target = on_card(8 * 2048, vocabulary).softmax(dim=-1)
    return of_loss(lambda: loss(x, target), keeps_graph=True)


def tvd(vocabulary: int) -> Peaks:
    """Compare 16,384 rows by the total variation."""
    x = on_card(8 * 2048, vocabulary, requires_grad=True).softmax(dim=-1)
    target = on_card(8 * 2048, vocabulary).softmax(dim=-1)

    def loss(p: Tensor, q: Tensor) -> Tensor:
        variation = torch.abs(p - q) / 2.0
        return torch.sum(variation) / p.size(0)

    return of_loss(lambda: loss(x, target), keeps_graph=True)


def divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence, as a sum of two."""
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_p, log_q = log_p.view(-1, log_p.size(-1)), log_q.view(-1, log_q.size(-1))
    mean = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    return 0.5 * kl(torch.log(mean), log_p) + 0.5 * kl(torch.log(mean), log_q)


def jsd(vocabulary: int) -> Peaks:
    """Compare 8,192 rows."""
    x = on_card(4 * 2048, vocabulary, requires_grad=True).log_softmax(dim=-1)
    target = on_card(4 * 2048, vocabulary).log_softmax(dim=-1)
    return of_loss(lambda: divergence(x, target), keeps_graph=True)


def heads(number: int) -> list[nn.Linear]:
    """Return heads in bf16."""
    return [nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=BF16).to("cuda") for _ in range(number)]


def fused_linear_jsd(rows: int) -> Peaks:
    """Compare what two heads make of two inputs."""
    student, teacher = heads(2)
    x, of_teacher = on_card(rows, WIDTH, dtype=BF16, requires_grad=True), on_card(rows, WIDTH, dtype=BF16)

    def loss() -> Tensor:
        student_logits = student(x)
        teacher_logits = teacher(of_teacher)
        of_student = torch.log_softmax(student_logits / 1.0, dim=-1)
        given_teacher = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return divergence(of_student, given_teacher).to(BF16)

    return of_loss(loss, keeps_graph=False)


def fused_linear_cross_entropy(rows: int) -> Peaks:
    """Run a head and torch's cross-entropy."""
    head, _other = heads(2)
    x = on_card(rows, WIDTH, dtype=BF16, requires_grad=True)
    target = torch.randint(VOCABULARY, (rows, 1), device="cuda").squeeze(1)

    def loss() -> Tensor:
        logits = head(x)
        return F.cross_entropy(logits, target)

    return of_loss(loss, keeps_graph=False)


def preference(samples: int, length: int, *, by_odds: bool) -> Peaks:
    """Run a head and the loss of ORPO, or of CPO, as trl had them."""
    head, _other = heads(2)
    x = on_card(samples, length, WIDTH, dtype=BF16, requires_grad=True)
    target = torch.randint(VOCABULARY, (samples, length), device="cuda")
    half = samples // 2

    def chances(logits: Tensor) -> Tensor:
        mask = target != -100
        labels = torch.where(target == -100, 0, target)
        of_tokens = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (of_tokens * mask).sum(-1) / mask.sum(-1)

    def loss() -> Tensor:
        outputs = x @ head.weight.t()
        logits = outputs.float()
        likelihood = F.cross_entropy(logits[:half].view(-1, VOCABULARY), target[:half].view(-1))
        of_all = chances(logits)
        chosen, rejected = of_all[:half], of_all[half:]
        if by_odds:
            odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
            losses = 0.1 * F.logsigmoid(odds)
        else:
            losses = F.logsigmoid(0.1 * (chosen - rejected)) + F.logsigmoid(-0.1 * (chosen - rejected)) * 0.0
        return likelihood - losses.mean()

    return of_loss(loss, keeps_graph=False)


def multi_token_attention(length: int) -> Peaks:
    """Convolve probabilities of 2 samples and 4 heads under a causal mask."""
    weight = nn.Parameter(torch.empty(4, 4, 3, 3, dtype=BF16, device="cuda"))
    bias = nn.Parameter(torch.empty(4, dtype=BF16, device="cuda"))
    other = nn.Conv2d(4, 4, 3).to("cuda").to(BF16)
    scores = on_card(2, 4, length, length, dtype=BF16)
    gradient = torch.randn_like(scores)
    scores.requires_grad_(True)

    def forward() -> Tensor:
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device="cuda")).view(1, 1, length, length)
        least = torch.tensor(-1e9, device="cuda", dtype=BF16)
        zero = torch.tensor(0.0, device="cuda", dtype=BF16)
        masked = scores.masked_fill(~mask, least)
        probabilities = F.softmax(masked, dim=-1)
        out = F.conv2d(probabilities, weight, bias, padding=1)
        return out.masked_fill(~mask, zero)

    found = given(forward, gradient)
    del other
    return found
