"""Attention masks of bidirectional models, made the same way for every batch.

transformers leaves the mask out when it finds no padding in a batch, so that attention takes another kernel: more or
less memory from one micro-batch to the next, a look at the device's data in every forward, and nothing a dry run
without data could foresee. Here a mask that is passed is used.
"""

from typing import Any


def always_use() -> None:
    """Make transformers use every padding mask it is given; for all models of this process.

    Through its documented interface for mask functions
    (https://huggingface.co/docs/transformers/attention_interface), as of 5.23. Causal masks are not touched.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    for name, make_mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):

        def with_padding(*args: Any, make_mask: Any = make_mask, attention_mask: Any = None, **options: Any) -> Any:
            if attention_mask is not None:
                options["allow_is_bidirectional_skip"] = False
            return make_mask(*args, attention_mask=attention_mask, **options)

        ALL_MASK_ATTENTION_FUNCTIONS.register(name, with_padding)
