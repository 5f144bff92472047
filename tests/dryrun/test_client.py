"""Profiles come from worker processes or from the cache, never with torch in the asking process."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from frugal.config.hardware.cluster import Cluster, Device, Node
from frugal.config.request import Request
from frugal.deepspeed_adapter.simulate.engine import equal_steps
from frugal.dryrun import client, pool
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.messages import AskFacts
from frugal.dryrun.pool import WorkerError
from frugal.dryrun.trace.drafts import TRACES
from frugal.errors import RequestError
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.strategy import Strategy
from frugal.units import GIB, MIB

FACTORY = """
import torch
from torch import nn
from tests.engine.small_models import tiny_gpt2

def tiny():
    return tiny_gpt2()

def broken():
    raise ValueError("no such layer" + 1000 * ".")

def sees_all():
    from tests.engine.small_models import tiny
    return tiny("causal-lm", "bert")

def picky():
    model = tiny_gpt2()
    model.forward = lambda pictures: pictures
    return model

def dies():
    import os
    print("last words", flush=True)
    os._exit(9)
"""


def device(kind: str = "cuda", memory_bytes: int = GIB) -> Device:
    return Device(
        name="test", kind=kind, memory_bytes=memory_bytes, context_bytes=50 * MIB if kind == "cuda" else 0,  # type: ignore[arg-type]  # one of two
        margin_bytes=10 * MIB, matrix_flops=1e13, memory_bandwidth=1e11,
    )  # fmt: skip


def cluster(world_size: int = 4, per_node: int = 2, kind: str = "cuda") -> Cluster:
    node = Node(devices=(device(kind),) * per_node)
    return Cluster(nodes=(node,) * (world_size // per_node), intra_bandwidth=1e10, inter_bandwidth=1e9)


CONFIG = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
STRATEGY = Strategy(zero_stage=2, reduce_bucket_elements=100_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    (made / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    (made / "factories.py").write_text(FACTORY)
    plans_itself = (
        f"import frugal\n\ndef model(): ...\n\nfrugal.plan(model='{made}/plans.py:model', gpus=1, mem='1G')\n"
    )
    (made / "plans.py").write_text(plans_itself)
    return made


@pytest.fixture(scope="module")
def request_(folder: Path) -> Request:
    return Request(model=str(folder / "config.json"), seq_len=64)


@pytest.fixture(scope="module")
def dry_runs(request_: Request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DryRunSource]:
    with DryRunSource(request_, cluster(), cache=tmp_path_factory.mktemp("cache")) as made:
        yield made


@pytest.fixture(scope="module")
def profile(dry_runs: DryRunSource) -> MemoryProfile:
    return dry_runs.profile(STRATEGY, True)


SCALARS = 1e-4  # arithmetic leaves out norms and counters of a few bytes


@pytest.mark.parametrize("micro_batch", [1, 7])
def test_a_profile_by_arithmetic_is_a_direct_dry_run(
    dry_runs: DryRunSource, profile: MemoryProfile, micro_batch: int
) -> None:
    direct = dry_runs.dry_run(STRATEGY, micro_batch, accumulation_steps=8)
    fitted = profile.memory(micro_batch, device())
    assert fitted.live_bytes == pytest.approx(direct.live_bytes, rel=SCALARS)
    assert fitted.phase == direct.phase
    assert fitted.total_bytes == pytest.approx(direct.total_bytes, rel=0.005)  # the allocator's capacity is bisected
    assert fitted.host_bytes_per_node == pytest.approx(direct.host_bytes_per_node, rel=SCALARS)


def test_a_draft_is_the_profile_without_the_allocator_and_is_kept_without_traces(
    dry_runs: DryRunSource, request_: Request
) -> None:
    for strategy in (STRATEGY, replace(STRATEGY, zero_stage=3, activation_checkpointing="full")):
        with DryRunSource(request_, cluster(), dry_runs._cache.folder, pool=dry_runs._pool) as made:  # type: ignore[arg-type]  # it has one
            drafts = [made.draft(strategy, accumulates) for accumulates in (False, True)]
        TRACES.clear()  # as in another process
        with DryRunSource(request_, cluster(), cache=dry_runs._cache.folder) as again:  # type: ignore[arg-type]  # a folder
            assert [again.draft(strategy, accumulates) for accumulates in (False, True)] == drafts
            assert again._drafts._traces == {} and again._pool._processes == []
        for accumulates, draft in zip((False, True), drafts, strict=True):
            assert draft is not None
            profile = dry_runs.profile(strategy, accumulates)
            assert (draft.costs, draft.kernels) == (profile.costs, profile.kernels)
            for micro_batch in (1, 2, 7, 100):
                assert draft.memory(micro_batch, device()) == profile.draft.memory(micro_batch, device())


def test_the_layers_are_counted_whatever_their_mode(dry_runs: DryRunSource) -> None:
    for mode in ("off", "full"):
        assert dry_runs.num_layers(replace(STRATEGY, activation_checkpointing=mode)) == 2


def test_the_ranks_dry_run_are_the_fullest_in_live_bytes_and_in_the_allocator(
    dry_runs: DryRunSource, tmp_path: Path
) -> None:
    """In fp32 the norm of a gradient is of a whole copy in fp64, when little else is alive, but in large segments."""
    config = tmp_path / "config.json"
    sizes = {"n_layer": 12, "n_embd": 256, "n_head": 4, "vocab_size": 32_000, "n_positions": 1024}
    config.write_bytes(msgspec.json.encode(CONFIG | sizes))
    request = Request(model=str(config), seq_len=128, precision="fp32")
    strategy = replace(STRATEGY, activation_checkpointing="full", expandable_segments=True)
    made = DryRunSource(request, dry_runs.cluster, cache=False, pool=dry_runs._pool)
    drafted = made._simulated(strategy, equal_steps(False), range(4))
    assert drafted is not None
    live = [each.timeline.peak_bytes(1) for each in drafted.ranks]
    needed = [each.replays(1, expandable_segments=True).smallest_capacity() for each in drafted.ranks]
    fullest = [each.index(max(each)) for each in (needed, live)]
    assert len(set(fullest)) == 2, "ranks of which one needs more and another has more alive"
    assert [each.rank for each in client.fullest_drafted(drafted, 1)] == fullest


@pytest.mark.parametrize("is_off", [False, True])
def test_one_rank_is_dry_run_where_arithmetic_finds_none_fuller_and_it_is_confirmed(
    dry_runs: DryRunSource, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    """Where it is off by more than a block, another rank is dry-run as well."""
    fullness = client.fullness

    def with_error(rank: client.RankMemory, drafted: MemoryProfile, micro_batch: int) -> tuple[int, int, int]:
        needed, *others = fullness(rank, drafted, micro_batch)
        is_of_the_dry_run = not any(rank is each for each in drafted.ranks)
        return needed + (1024 if is_off and is_of_the_dry_run else 0), *others

    monkeypatch.setattr(client, "fullness", with_error)
    assert len(dry_runs.dry_runs(STRATEGY, 2, 1)) == 1 + is_off


def test_a_profile_knows_its_model(profile: MemoryProfile) -> None:
    facts = profile.costs.facts
    assert facts.parameters == facts.trainable_parameters == 12 * 2 * 64**2 + 13 * 2 * 64 + 2 * 64 + 384 * 64
    assert facts.largest_parameter == 256 * 64
    assert facts.task == "causal-lm"
    assert facts.max_positions == 128
    assert profile.costs.work.num_operators > 100


def test_flops_are_six_for_each_weight_and_token_and_attention(profile: MemoryProfile) -> None:
    matrices = 12 * 2 * 64**2 + 256 * 64  # layers and the head
    attention = 2 * 64 * 64 * 64 * 12  # two layers, QK and PV, forward once and backward twice, and once again in flash
    assert profile.costs.work.flops_per_sample == pytest.approx(6 * matrices * 64 + attention, rel=0.05)
    assert profile.costs.work.recompute_flops_per_sample == 0


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_recomputation_is_counted_apart(dry_runs: DryRunSource, profile: MemoryProfile, zero_stage: int) -> None:
    strategy = Strategy(zero_stage=zero_stage, activation_checkpointing="full", reduce_bucket_elements=100_000)
    recomputing = dry_runs.profile(strategy, False)
    assert recomputing.costs.work.flops_per_sample == profile.costs.work.flops_per_sample
    assert 0.2 < recomputing.costs.work.recompute_flops_per_sample / profile.costs.work.flops_per_sample < 0.34


def test_a_cpu_has_no_allocator_slack(dry_runs: DryRunSource, request_: Request) -> None:
    made = DryRunSource(request_, cluster(2, 2, kind="cpu"), cache=False, pool=dry_runs._pool)
    memory = made.profile(STRATEGY, False).memory(3, device("cpu"))
    assert memory.slack == memory.host_bytes_per_node == 0
    assert memory.total_bytes == memory.live_bytes


def test_what_is_known_needs_no_worker(dry_runs: DryRunSource, profile: MemoryProfile, request_: Request) -> None:
    made = dry_runs.dry_run(STRATEGY, 5, 4)
    again = DryRunSource(request_, cluster(), cache=dry_runs._cache.folder)  # type: ignore[arg-type]  # a folder
    assert (again.profile(STRATEGY, True), again.dry_run(STRATEGY, 5, 4)) == (profile, made)
    longer = replace(request_, seq_len=2 * request_.seq_len)
    other = DryRunSource(longer, cluster(), cache=dry_runs._cache.folder)  # type: ignore[arg-type]  # a folder
    assert other.facts() == dry_runs.facts()
    assert again._pool._processes == other._pool._processes == []


def test_the_model_file_is_part_of_the_key(tmp_path: Path, request_: Request) -> None:
    config = tmp_path / "config.json"
    keys = set()
    for num_layers in (2, 3):
        config.write_bytes(msgspec.json.encode({**CONFIG, "n_layer": num_layers}))
        keys.add(client.digest(client.model_key(replace(request_, model=str(config)))))
    assert len(keys) == 2


def test_a_mistake_in_the_request_comes_back_as_it_was_raised(dry_runs: DryRunSource, folder: Path) -> None:
    for model, words in (
        ("gpt3", "gpt3"),
        (f"{folder}/factories.py:broken", "no such layer"),
        (f"{folder}/factories.py:sees_all", "it sees the tokens that it is to predict"),
        (f"{folder}/plans.py:model", "the model's file makes a plan while it is imported"),
        (f"{folder}/factories.py:picky", "unexpected keyword argument 'input_ids'"),
    ):
        made = DryRunSource(Request(model=model, seq_len=64), cluster(), cache=False, pool=dry_runs._pool)
        with pytest.raises(RequestError) as error:
            made.profile(STRATEGY, True)
        assert error.value.exit_code == 2
        assert words in str(error.value) == error.value.render()


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes seconds to start."""
    monkeypatch.setattr(pool, "MAX_WORKERS", 1)


@pytest.mark.usefixtures("one_worker")
def test_a_worker_that_dies_tells_its_last_words_and_is_replaced(folder: Path) -> None:
    with DryRunSource(Request(model=f"{folder}/factories.py:dies", seq_len=64), cluster(), cache=False) as made:
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"ended with exit code 9\n(.*\n)*.*last words"):
                made.profile(STRATEGY, True)


@pytest.mark.usefixtures("one_worker")
def test_a_killed_process_that_forks_workers_is_replaced_with_them(request_: Request) -> None:
    with DryRunSource(request_, cluster(), cache=False) as made:
        (facts,) = made._pool.ask([AskFacts(request_)])
        server = made._pool._processes[0].process
        server.kill()
        server.wait()
        with pytest.raises(WorkerError, match="ended with exit code -9"):
            made._pool.ask([AskFacts(request_)])
        assert made._pool.ask([AskFacts(request_)]) == [facts]


@pytest.mark.usefixtures("one_worker")
def test_closing_ends_the_processes(request_: Request) -> None:
    made = DryRunSource(request_, cluster(), cache=False)
    made.facts()
    server, worker = made._pool._processes
    made.close()
    for process in (server.process, worker):
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
