"""Convolutions and vision transformers: rasbt/pytorch-memory-optim, WSShiro/vramexp and pytorch/ao.

The first two take their models from torchvision, the last from timm; all are written anew.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.recordings.loops.calibration import resnet50
from bench.recordings.loops.course import Peaks, peaks

BF16 = torch.bfloat16


class EncoderLayer(nn.Module):
    """A pre-norm layer of torchvision's vision transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, given: Tensor) -> Tensor:
        x = self.first(given)
        x, _ = self.attention(query=x, key=x, value=x, need_weights=False)
        x = x + given
        y = self.second(x)
        y = self.feed_forward(y)
        return x + y


class VisionTransformer(nn.Module):
    """torchvision's vision transformer for images of 224 pixels in patches of 16, with 10 classes."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedded(images)
        samples = x.size(0)
        class_token = self.class_token.expand(samples, -1, -1)
        x = torch.cat([class_token, x], dim=1)
        x = self.encoded(x)
        x = x[:, 0]
        return self.head(x)

    def embedded(self, images: Tensor) -> Tensor:
        """Return the patches' vectors."""
        x = self.patches(images)
        x = x.reshape(images.size(0), -1, 14 * 14)
        return x.permute(0, 2, 1)

    def encoded(self, given: Tensor) -> Tensor:
        """Return what the layers make of all vectors."""
        x = given + self.positions
        return self.norm(self.layers(x))


class Adam(torch.optim.Optimizer):
    """torch's Adam over lists of tensors as it was until July 2023: with two copies of all parameters at once."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        for each in parameters:
            if not self.state[each]:
                self.state[each]["first"] = torch.zeros_like(each)
                self.state[each]["second"] = torch.zeros_like(each)
        gradients = [each.grad for each in parameters]
        first = [self.state[each]["first"] for each in parameters]
        second = [self.state[each]["second"] for each in parameters]
        torch._foreach_mul_(first, 0.9)
        torch._foreach_add_(first, gradients, alpha=0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, 0.5)
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(parameters, first, denominators, -5e-5)


def fine_tuned(precision: str, samples: int, accumulated: int = 1, *, is_sgd: bool = False) -> Peaks:
    """Train ViT-L for three optimizer steps and evaluate. `precision`: `32`, `16-mixed` or `bf16-true`, as Lightning's
    Fabric has them."""
    model = VisionTransformer(1024, 16, 24)
    if precision == "bf16-true":
        model.to(BF16)
    model.to("cuda")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01) if is_sgd else Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")

    def outputs(images: Tensor) -> Tensor:
        if precision == "bf16-true":
            images = images.to(BF16)
        with torch.autocast("cuda", torch.float16) if precision == "16-mixed" else nullcontext():
            out = model(images)
        return out.float()

    def batch(number: int) -> tuple[Tensor, Tensor]:
        images, targets = torch.zeros(number, 3, 224, 224), torch.zeros(number, dtype=torch.int64)
        return images.to("cuda"), targets.to("cuda")

    model.train()
    for number in range(2 * accumulated + 1):
        features, targets = batch(samples)
        logits = outputs(features)
        loss = F.cross_entropy(logits, targets)
        if accumulated > 1:
            loss = loss / accumulated
        else:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if number % accumulated == 0:
            scaler.step(optimizer)
            scaler.update()
            if accumulated > 1:
                optimizer.zero_grad()
        with torch.no_grad():
            predicted = torch.argmax(logits, 1)
    model.eval()
    with torch.no_grad():
        for number in filter(None, (samples, 5000 % samples)):
            features, targets = batch(number)
            out = outputs(features)
            predicted = torch.argmax(out, 1)
    del predicted
    return peaks()


class SmallNet(nn.Module):
    """A convolution, a pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3), nn.AvgPool2d(2, stride=2)
        self.linear = nn.Linear(8 * 111 * 111, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.pool(x)
        x = x.view(x.size(0), -1)
        return self.linear(x)


def vgg16() -> nn.Sequential:
    """Return VGG-16 with batch norm as torchvision has it, with 10 classes."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, number in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(number):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, stride=2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(1), nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 10),
    )  # fmt: skip


def resnet50_of_10() -> nn.Module:
    """Return ResNet-50 with 10 classes."""
    model = resnet50()
    model[-1] = nn.Linear(2048, 10)
    return model


def notebook() -> dict[str, Peaks]:
    """Run the notebook: four models, one after the other, each of which stays on the card with its gradients.

    torchinfo 1.8 moves a model to the card, and runs it there, once for its table and once for an estimate: of the
    first model after its training, of the others before.
    """
    models: dict[str, Callable[[], nn.Module]] = {
        "small-cnn": SmallNet, "vgg16-bn": vgg16, "resnet50": resnet50_of_10,
        "vit-b-16": lambda: VisionTransformer(768, 12, 12),
    }  # fmt: skip
    kept, found = [], {}
    for name, make in models.items():
        kept.append(make())
        if len(kept) > 1:
            _summarized(kept[-1])
        found[name] = trained(kept[-1], (128, 3, 224, 224), (128, 10), 12)
        if len(kept) == 1:
            _summarized(kept[-1])
    return found


def _summarized(model: nn.Module) -> None:
    for _ in range(2):
        images = torch.rand(128, 3, 224, 224).to("cuda")
        model.eval()
        with torch.no_grad():
            model = model.to("cuda")
            model(images)
        model.train()


def trained(model: nn.Module, images: tuple[int, ...], targets: tuple[int, ...], steps: int) -> Peaks:
    """Train with SGD on the cross-entropy of probabilities, after an emptied cache."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.to("cuda")
    data = [(torch.zeros(images), torch.zeros(targets)) for _ in range(steps)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for x, y in data:
        x = x.to("cuda")
        y = y.to("cuda")
        optimizer.zero_grad()
        predicted = model(x)
        loss = F.cross_entropy(predicted, y)
        loss.backward()
        optimizer.step()
    return peaks()


AFTER: dict[str, Callable[[], list[nn.Module]]] = {
    "conv": list, "conv-conv": lambda: [nn.Conv2d(3, 3, 3, padding=1)], "conv-relu": lambda: [nn.ReLU(inplace=True)],
    "conv-bn": lambda: [nn.BatchNorm2d(3)], "conv-dropout": lambda: [nn.Dropout()],
    "conv-softmax": lambda: [nn.Softmax2d()],
}  # fmt: skip
"""What follows the convolution of three channels."""


def layer(name: str) -> Peaks:
    """Train a convolution and what follows on 1000 images, for two batches and two epochs."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), *AFTER[name]())
    return trained(model, (1000, 3, 224, 224), (1000, 3, 224, 224), 4)


class GiantLayer(nn.Module):
    """A layer of DINOv2's giant size: SwiGLU of one product, scaled branches."""

    WIDTH, HEADS, HIDDEN = 1536, 24, 4096

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(self.WIDTH, eps=1e-6), nn.LayerNorm(self.WIDTH, eps=1e-6)
        self.all, self.out = nn.Linear(self.WIDTH, 3 * self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH)
        self.up, self.down = nn.Linear(self.WIDTH, 2 * self.HIDDEN), nn.Linear(self.HIDDEN, self.WIDTH)
        self.scales = nn.ParameterList(torch.zeros(self.WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x)) * self.scales[0]
        return x + self.feed(self.second(x)) * self.scales[1]

    def attend(self, x: Tensor) -> Tensor:
        """Return attention's output."""
        samples, length, width = x.shape
        both = self.all(x).reshape(samples, length, 3, self.HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = both.unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        x = x.transpose(1, 2).reshape(samples, length, width)
        return self.out(x)

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward's output."""
        x = self.up(x)
        gate, x = x.chunk(2, dim=-1)
        x = F.silu(gate) * x
        return self.down(x)


class Giant(nn.Module):
    """DINOv2's giant size for images of 224 pixels in patches of 14, with 45 classes, layers checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        width = GiantLayer.WIDTH
        self.patches = nn.Conv2d(3, width, 14, stride=14)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 257, width))
        self.layers = nn.ModuleList(GiantLayer() for _ in range(40))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 45)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.size(0), -1, -1), x], dim=1)
        x = x + self.positions
        for each in self.layers:
            x = checkpoint(each, x, use_reentrant=True)
        x = self.norm(x)
        return self.head(x[:, 0])


def giant() -> Peaks:
    """Train DINOv2's giant size in bf16 on 32 images a step with torch's fused AdamW, three steps, and evaluate."""
    model = Giant()
    model.bfloat16()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
    model.train()
    for _ in range(3):
        images, labels = torch.zeros(32, 3, 224, 224).bfloat16(), torch.zeros(32, dtype=torch.int64)
        loss = F.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        predicted = model(torch.zeros(32, 3, 224, 224).bfloat16().cuda()).argmax(1)
    del predicted
    return peaks()
