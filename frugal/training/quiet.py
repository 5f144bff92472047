"""Other libraries' talk."""

import logging
import os
import warnings


def quiet() -> None:
    """Silence what DeepSpeed, transformers and datasets say about themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "transformers", "datasets", "accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
