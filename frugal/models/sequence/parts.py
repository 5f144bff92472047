"""One rank's part of each sample, where ranks share samples: what it reads, and what it adds to the loss.

All ranks of a group collate the same samples. Labels are shifted, and positions counted, before the cut, so that the
borders of parts are no different from other places, and the sums over all parts are those over the samples.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.errors import RequestError
from frugal.models import packs, transformers_internals
from frugal.models.objectives import Batch, CausalLM, Objective, Sample, token_loss_sum
from frugal.units import IGNORED


def parts_of(objective: Objective, size: int, rank: int) -> Objective:
    """Return `objective` for `rank`, one of each `size` consecutive ones that share samples; itself for `size` 1.

    Raises:
        RequestError: it is none whose samples can be split.
    """
    if size == 1:
        return objective
    if type(objective) is CausalLM and not objective.own_loss:
        return SequenceParts(objective, size, rank % size)
    raise RequestError(
        "--sequence-parallel cannot split the samples of this objective",
        because="its loss is the model's own, of whole sequences"
        if isinstance(objective, CausalLM)
        else f"it is known for the next token (causal-lm) alone, and this is {type(objective).__name__}",
        hint="leave --sequence-parallel out",
    )


class SequenceParts:
    """Part `part` of `size` of what `CausalLM` trains. `labels` of its batches are the targets of each position.

    Samples are padded to a multiple of `size`; what is added has no target, and is behind all that could see it.
    """

    def __init__(self, whole: CausalLM, size: int, part: int) -> None:
        self.whole = whole
        self.size = size
        self.part = part
        self.pads_tokens = whole.pads_tokens

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the part's `input_ids`, `labels`, `position_ids`; packed `whole_position_ids (samples, positions)`."""
        batch = self.whole.collate(samples)
        num_samples, length = batch["input_ids"].shape
        more = -length % self.size
        targets = F.pad(batch["labels"][:, 1:], (0, 1 + more), value=IGNORED)
        positions = batch.get("position_ids", torch.arange(length).expand(num_samples, -1))
        positions = F.pad(positions, (0, more))
        tokens = F.pad(batch["input_ids"], (0, more), value=self.whole.pad_id)
        cut = {
            name: tensor.chunk(self.size, dim=1)[self.part].clone(memory_format=torch.contiguous_format)
            for name, tensor in (("input_ids", tokens), ("labels", targets), ("position_ids", positions))
        }
        return cut | {"whole_position_ids": positions} if self.whole.packed else cut

    def dummy(self) -> Sample:
        """Return the dummy of the whole objective."""
        return self.whole.dummy()

    def example(self, num_samples: int, seq_len: int) -> Batch:
        """Return a part of `num_samples` rows of `seq_len` tokens."""
        return self.collate([{"input_ids": [self.whole.pad_id] * seq_len}] * num_samples)

    def count(self, batch: Batch) -> int:
        """Count the targets in this part."""
        return int((batch["labels"] != IGNORED).sum())

    def num_tokens(self, samples: Sequence[Sample], batch: Batch) -> int:
        """Count the tokens of `samples` that are in this part of them, which `batch` is."""
        length = batch["input_ids"].shape[1]
        return sum(min(max(len(sample["input_ids"]) - self.part * length, 0), length) for sample in samples)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross entropy of this part's positions; masks are those of the whole sequence."""
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        whole = batch.get("whole_position_ids")
        documents = None if whole is None else packs.numbers_of_documents(whole)
        with transformers_internals.masks_of_whole_sequences(self.size, whole, documents):
            return token_loss_sum(model, inputs, batch["labels"])
