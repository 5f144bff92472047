"""What torch's variable for its allocator says is planned with; ranks are told what was planned, and keep the rest."""

import pytest

from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.config.schema import understand

ON, OFF = "expandable_segments:True", "expandable_segments:False"


def cluster(**settings: object) -> Cluster:
    return understand({"gpus": 2, "mem": "12G"} | settings)[1]


GPUS, CPU = cluster(), cluster(device="cpu")


def planned(environment: dict[str, str], asked: bool | None = None, on: Cluster = GPUS) -> bool | None:
    return cuda_allocator.planned(Request(expandable_segments=asked), on, environment).expandable_segments


def test_what_the_environment_says_is_planned_with_unless_a_flag_says_otherwise() -> None:
    assert planned({}) is None
    assert planned({"PYTORCH_ALLOC_CONF": f"max_split_size_mb:512, {OFF}"}) is False
    assert planned({"PYTORCH_CUDA_ALLOC_CONF": ON}) is True
    assert planned({"PYTORCH_ALLOC_CONF": OFF}, asked=True) is True
    assert planned({"PYTORCH_ALLOC_CONF": OFF}, on=CPU) is None, "nothing there reads it"


def test_the_older_name_wins_as_it_does_in_torch() -> None:
    both = {"PYTORCH_ALLOC_CONF": ON, "PYTORCH_CUDA_ALLOC_CONF": OFF}
    assert planned(both) is False
    assert cuda_allocator.settings(GPUS, both, True) == {"PYTORCH_CUDA_ALLOC_CONF": ON}


@pytest.mark.parametrize("release", ["5.15.167.4-microsoft-standard-WSL2", "6.8.0-45-generic"])
def test_wsl_has_none_unless_they_are_asked_for(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    is_wsl = "WSL2" in release
    assert planned({}) is (False if is_wsl else None)
    assert planned({}, asked=True) is True
    assert planned({"PYTORCH_ALLOC_CONF": ON}) is True


def test_the_allocator_of_the_driver_has_none() -> None:
    assert planned({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}) is False


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", ON),
        (OFF, ON),
        ("max_split_size_mb:512", f"max_split_size_mb:512,{ON}"),
        (f" {OFF} , roundup_power2_divisions:[256:1,512:2,>:4]", f"{ON},roundup_power2_divisions:[256:1,512:2,>:4]"),
    ],
)
def test_ranks_are_told_what_was_planned_and_the_users_other_options(said: str, told: str) -> None:
    assert cuda_allocator.settings(GPUS, {"PYTORCH_ALLOC_CONF": said}, True) == {"PYTORCH_ALLOC_CONF": told}


def test_ranks_are_told_nothing_where_it_is_so_already_or_there_is_no_gpu() -> None:
    assert cuda_allocator.settings(GPUS, {"PYTORCH_ALLOC_CONF": f"max_split_size_mb:64,{ON}"}, True) == {}
    assert cuda_allocator.settings(GPUS, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False) == {}
    assert cuda_allocator.settings(GPUS, {"PYTORCH_ALLOC_CONF": ON}, False) == {"PYTORCH_ALLOC_CONF": OFF}
    assert cuda_allocator.settings(CPU, {"PYTORCH_ALLOC_CONF": ON}, False) == {}


def test_other_segments_than_planned_and_options_that_no_plan_knows_are_said() -> None:
    assert cuda_allocator.notes(True, GPUS, {}) == ()
    assert (
        cuda_allocator.notes(True, GPUS, {"PYTORCH_ALLOC_CONF": f"backend:native,pinned_num_register_threads:2,{ON}"})
        == ()
    )
    value = {"PYTORCH_ALLOC_CONF": f"max_split_size_mb:512,{OFF},garbage_collection_threshold:0.8"}
    assert cuda_allocator.notes(True, GPUS, value | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}) == (
        "PYTORCH_ALLOC_CONF says expandable_segments:False, and the plan was made for True: ranks run with what was "
        "planned; a new plan follows it",
        "PYTORCH_ALLOC_CONF has max_split_size_mb:512,garbage_collection_threshold:0.8, which plans do not "
        "model: the allocator may add more",
        "PYTORCH_NO_CUDA_MEMORY_CACHING is set: tensors are allocated one by one, which plans do not model, and which "
        "is far slower",
    )
    assert cuda_allocator.notes(True, CPU, value) == ()
