"""A user's own state comes back from a checkpoint on all ranks, and nothing that could run code goes in."""

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.ranks import Ranks
from frugal.checkpoint.progress import check_plain
from frugal.errors import RequestError
from tests.engine.checkpoints import plan_for, started

STATE = {"epoch": 3, "words": ["a", b"\xff"], "seen": {7: (1.5, None, True)}, "ema": torch.arange(4.0)}


def saved_and_loaded(folder: Path, *, is_saving: bool = False) -> Any:
    """Save, or load on other ranks and another stage; what came back. Runs on ranks."""
    with started(plan_for(2 if is_saving else 3)) as engine:
        if is_saving:
            engine.save(folder, extra=STATE if engine.rank == 0 else None)
        return engine.load(folder).extra


def test_it_comes_back_on_all_ranks_also_on_another_layout(
    tmp_path: Path, two_ranks: Ranks, three_ranks: Ranks
) -> None:
    loaded = two_ranks.run(saved_and_loaded, tmp_path, is_saving=True) + three_ranks.run(saved_and_loaded, tmp_path)
    for extra in loaded:
        assert torch.equal(extra.pop("ema"), STATE["ema"])
        assert extra == {name: value for name, value in STATE.items() if name != "ema"}


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"seen": [np.arange(3)]}, "extra['seen'][0] is of type ndarray"),
        (OrderedDict(a=1), "extra is of type OrderedDict"),
        ({"f": print}, "extra['f'] is of type builtin_function_or_method"),
        ({(Path("a"),): 1}, "a key of extra[0] is of type PosixPath"),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_place(extra: Any, what: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"{what}, which no checkpoint holds")):
        check_plain(extra)
