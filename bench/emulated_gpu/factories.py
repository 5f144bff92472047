"""Models of the table that no transformers configuration for text names: those of images.

Sizes are those of published models, so that tensors are as large as in practice and two steps take seconds.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.models.objectives import Batch, SummedLoss

IMAGE_SIZE = 224


def _transformers(auto: str, model_type: str, **config: Any) -> nn.Module:
    import transformers

    made = transformers.AutoConfig.for_model(model_type, **config)
    return getattr(transformers, auto).from_config(made)  # type: ignore[no-any-return]  # transformers has no types


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["image"].to(next(model.parameters()).dtype)
    return F.cross_entropy(model(images).logits.float(), batch["label"], reduction="sum")


def _images() -> SummedLoss:
    image = torch.zeros(3, IMAGE_SIZE, IMAGE_SIZE, device="cpu")
    return SummedLoss(_classified, example={"image": image, "label": torch.tensor(0, device="cpu")})


def vit_base() -> tuple[nn.Module, SummedLoss]:
    """ViT-B/16 (https://huggingface.co/google/vit-base-patch16-224): transformers' defaults."""
    return _transformers("AutoModelForImageClassification", "vit", num_labels=1000), _images()


def resnet50() -> tuple[nn.Module, SummedLoss]:
    """ResNet-50 (https://huggingface.co/microsoft/resnet-50): transformers' defaults."""
    return _transformers("AutoModelForImageClassification", "resnet", num_labels=1000), _images()
