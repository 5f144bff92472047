"""A model whose memory and work are simple formulas, in place of dry runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.config.schema import understand
from frugal.dryrun.planner import make_plan
from frugal.errors import RequestError
from frugal.planning.cost import Line, ModelCosts, Work
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.model_facts import NOT_PACKED, ModelFacts, Packed
from frugal.planning.plan import Plan
from frugal.planning.search.candidate import Infeasible, OpenSource, SearchResult
from frugal.planning.search.search import Search
from frugal.planning.strategy import LayerMode, Strategy, share_on_host

SMALL = {"parameters": 124_000_000, "flops_per_token": 8e8, "num_operators": 2500}
"""A model of gpt2's size."""

KEPT: dict[LayerMode, float] = {"off": 1.0, "selective": 0.8, "full": 0.1, "offloaded": 0.05}
"""Share of the activations."""

AGAIN: dict[LayerMode, float] = {"off": 0.0, "selective": 0.25, "full": 1 / 3, "offloaded": 1 / 3}
"""Share of the work that is repeated."""


def facts(trainable_parameters: int, **more: Any) -> ModelFacts:
    """A model of one matrix, of which only its size matters."""
    known: dict[str, Any] = {
        "task": "causal-lm", "max_positions": None, "parameters": trainable_parameters,
        "trainable_sizes": (trainable_parameters,), "largest_parameter": trainable_parameters,
        "can_recompute": True, "can_tile": False,
    }  # fmt: skip
    return ModelFacts(trainable_parameters=trainable_parameters, **(known | more))


@dataclass
class SyntheticProfile:
    """Mixed-precision Adam with `parameters` elements; bytes of activations for each token of a sample."""

    strategy: Strategy
    world_size: int
    devices_per_node: int
    seq_len: int
    parameters: int = 1_000_000_000
    bytes_per_token: int = 1_000_000
    bytes_per_sample: int = 0
    flops_per_token: float = 6e9
    trainable_parameters: int = 0
    largest_parameter: int = 50_000_000
    num_operators: int = 3_000
    task: str = "causal-lm"
    max_positions: int | None = None
    can_recompute: bool = True
    can_tile: bool = False
    notes: tuple[str, ...] = ()
    packed: Packed = NOT_PACKED
    logits_bytes_per_token: int = 0
    changes_logits: bool = False
    mlp_bytes_per_token: int | None = None  # None: it takes no tiled MLP
    drafts: bool = False
    num_layers: int = 0
    why_not_mixed: str = ""
    error: float = 1.0
    optimizer_bytes: float = 12.0
    num_matrices: int = 1
    can_be_split: bool = False
    mask_bytes_per_token: int | None = None  # None: attention never runs document by document
    by_document: bool = False
    own_kernels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.trainable_parameters = self.trainable_parameters or self.parameters

    @property
    def kernels(self) -> tuple[str, ...]:
        return self.own_kernels + (("varlen",) if self.mask_bytes_per_token is not None and self.by_document else ())

    @property
    def trainable_sizes(self) -> tuple[int, ...]:
        return (self.trainable_parameters // self.num_matrices,) * self.num_matrices

    @property
    def facts(self) -> ModelFacts:
        known = ("task", "max_positions", "parameters", "trainable_parameters", "trainable_sizes", "largest_parameter",
                 "can_recompute", "can_tile", "notes", "packed")  # fmt: skip
        return ModelFacts(**{name: getattr(self, name) for name in known})

    @property
    def costs(self) -> ModelCosts:
        return ModelCosts(facts=self.facts, work=self.work)

    @property
    def work(self) -> Work:
        flops, strategy = self.flops_per_token * self.seq_len, self.strategy
        again = sum(share * strategy.share(mode) for mode, share in AGAIN.items())
        repeated = 1 - strategy.share("off")
        return Work(
            flops_per_sample=flops,
            recompute_flops_per_sample=again * flops,
            traffic=Line(0.0, flops / 500),
            recompute_traffic=Line(0.0, repeated * flops / 1000),
            num_operators=self.num_operators,
            num_forward=self.num_operators // 3,
            num_recomputed=int(repeated * (self.num_operators // 3)),
            moved_per_sample=strategy.share("offloaded") * self.bytes_per_token * self.seq_len,
        )

    @property
    def draft(self) -> "SyntheticProfile":
        return self

    def memory(self, micro_batch: int, device: Device) -> MemoryBreakdown:
        stage, split = self.strategy.zero_stage, self.world_size
        elements = self.parameters
        on_device = 1 - share_on_host(self.trainable_sizes, self.strategy, self.world_size)
        of_token = self.bytes_per_token + (0 if self.by_document else self.mask_bytes_per_token or 0)
        activations = (of_token * self.seq_len + self.bytes_per_sample) * micro_batch
        kept = sum(kept * self.strategy.share(mode) for mode, kept in KEPT.items())
        activations = int(activations * kept) // self.strategy.sequence_parallel
        tiles = 8 if self.strategy.mlp == "tiled" else 1
        activations += (self.mlp_bytes_per_token or 0) * self.seq_len * micro_batch // tiles
        optimizer = int(self.optimizer_bytes * elements) // (split if stage >= 1 else 1)
        gradients = 4 * elements // (split if stage >= 2 else 1)
        logits = self.logits_bytes_per_token * self.seq_len * micro_batch // (8 if self.strategy.loss == "tiled" else 1)
        parameters = 2 * elements // (split if stage == 3 else 1)
        parts = {
            "parameters": 0 if self.strategy.offload_parameters == "cpu" else parameters,
            "gradients": int(on_device * gradients), "optimizer": int(on_device * optimizer),
            "activations": int(activations * self.error), "logits": logits,
            "communication": 2 * self.strategy.reduce_bucket_elements, "temporary": 0, "slack": 0,
            "context": device.context_bytes,
        }  # fmt: skip
        return MemoryBreakdown(
            **parts,  # type: ignore[arg-type]  # `phase_peaks` is not among them
            total_bytes=sum(parts.values()),
            usable_bytes=device.usable_bytes,
            host_bytes_per_node=int((1 - on_device) * (optimizer + gradients)) * self.devices_per_node,
            phase="backward",
            operator="mm",
        )

    def largest_micro_batch(self, device: Device, cap: int) -> int:
        return next((micro for micro in range(cap, 0, -1) if self.memory(micro, device).fits), 0)

    def fits(self, micro_batch: int, device: Device) -> bool:
        return self.memory(micro_batch, device).fits


@dataclass
class SyntheticSource:
    """Profiles by formula; `error` is the factor by which the dry run's activations differ from the profile's."""

    request: Request
    cluster: Cluster
    model: dict[str, int | float] = field(default_factory=dict)
    error: float = 1.0
    profiled: list[Strategy] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def facts(self) -> ModelFacts:
        if self.request.sequence_parallel and not self.model.get("can_be_split"):
            raise RequestError("the model cannot be split", because="it counts positions")
        return self._profile(Strategy(zero_stage=0)).facts

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Formulas need no preparation."""

    def draft(self, strategy: Strategy, accumulates: bool) -> Any:
        """There is no allocator to leave out; the model says whether it `drafts` all the same."""
        return self._checked(strategy) if self.model.get("drafts") else None

    def num_layers(self, strategy: Strategy) -> int:
        """If the model says how many it has."""
        return int(self.model.get("num_layers", 0))

    def why_not_mixed(self, strategy: Strategy) -> str:
        """If the model says why not."""
        return str(self.model.get("why_not_mixed", ""))

    def on(self, cluster: Cluster) -> "SyntheticSource":
        return replace(self, cluster=cluster)

    def of_lengths(self, *_: Any) -> None:
        """Formulas know no order of requests."""

    def profile(self, strategy: Strategy, accumulates: bool) -> Any:
        self.profiled.append(strategy)
        profile = self._checked(strategy)
        if strategy.loss == "tiled" and profile.changes_logits:
            raise RequestError("the model cannot take the tiled loss")
        return profile

    def _checked(self, strategy: Strategy) -> SyntheticProfile:
        profile = self._profile(strategy)
        if strategy.mlp == "tiled" and profile.mlp_bytes_per_token is None:
            raise RequestError("the model cannot take a tiled MLP")
        return profile

    def dry_run(
        self, strategy: Strategy, micro_batch: int, accumulation_steps: int, device: Device | None = None
    ) -> MemoryBreakdown:
        device = device or min(self.cluster.devices, key=lambda device: device.usable_bytes)
        return self._profile(strategy, error=self.error).memory(micro_batch, device)

    def _profile(self, strategy: Strategy, **changes: float) -> SyntheticProfile:
        optimizer = self.request.optimizer
        return SyntheticProfile(
            strategy=strategy,
            world_size=self.cluster.world_size,
            devices_per_node=max(len(node.devices) for node in self.cluster.nodes),
            seq_len=self.request.seq_len,
            by_document=bool(self.request.pack and self.request.document_tokens),
            optimizer_bytes=optimizer.master_bytes_per_element + optimizer.state_bytes_per_element,
            **(self.model | changes),  # type: ignore[arg-type]  # numbers of either kind
        )


def dry_running(error: float = 1.0, **model: int | float) -> OpenSource:
    """Yield what `make_plan` takes as `dry-run`."""

    @contextmanager
    def dry_run(
        request: Request, cluster: Cluster, pool: object = None, will_dry_run: bool = True
    ) -> Iterator[SyntheticSource]:
        yield SyntheticSource(request, cluster, model, error)

    return dry_run


def planned(*, error: float = 1.0, model: dict[str, Any] | None = None, **settings: Any) -> Plan:
    """The plan for these settings and this model; `error`: what dry runs take, by what profiles promise.

    Fields of a request that are no settings may be given, too.
    """
    names = [each.name for each in fields(Request) if not each.metadata and each.name in settings]
    rest = {name: settings.pop(name) for name in names}
    request, cluster, defaults = understand(settings)
    return make_plan(replace(request, **rest), cluster, defaults, dry_run=dry_running(error, **(model or {})))


def last(search: Search) -> SearchResult | Infeasible:
    """The proven result of a search, or the proof that nothing fits."""
    *_, result = search.run()
    return result
