"""The traces of one request's model: from the cache, shipped, or made by worker processes. No torch here.

A profile by arithmetic begins with one. Those of mixtures of modes of activation checkpointing are put together from
those of single modes.
"""

from collections.abc import Sequence

from frugal.config.hardware.cluster import Capability, DeviceKind
from frugal.config.request import Request
from frugal.deepspeed_adapter.simulate.engine import covers
from frugal.dryrun import shipped
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.dryrun.messages import AskTrace, Traced
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.planning.memory.layer_mixture import LayerMixtures
from frugal.planning.memory.timeline import ModelTrace
from frugal.planning.strategy import LayerMode, Strategy


class Drafts:
    """The traces of one request's model."""

    def __init__(self, request: Request, kind: DeviceKind, capability: Capability, cache: Cache, pool: Pool) -> None:
        self._request = request
        self._kind = kind
        self._capability = capability
        self._cache = cache
        self._pool = pool
        self._model = model_key(request)
        self._traces: dict[AskTrace, ModelTrace | FrugalError | None] = {}
        self._of_modes: dict[tuple[str, str, bool, frozenset[LayerMode]], LayerMixtures | None] = {}

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Trace the model for all these strategies, in parallel.

        Raises:
            WorkerError: a trace crashed.
        """
        if self._kind == "cpu":
            strategies = [strategy.where_the_host_is_the_device for strategy in strategies]
        covered = [strategy for strategy in strategies if covers(self._request, strategy)]
        wanted = {question: None for strategy in covered for question in self._questions(strategy).values()}
        missing = []
        for question in wanted:
            if question not in self._traces:
                traced = self._cache.read(self._key(question), Traced) or shipped.trace(question)
                if traced is None:
                    missing.append(question)
                else:
                    self._traces[question] = traced.trace
        if not missing:
            return
        for question, answer in zip(missing, self._pool.attempt(missing), strict=True):
            if isinstance(answer, FrugalError):
                self._traces[question] = answer
                continue
            assert answer.traced is not None
            self._cache.write(self._key(question), answer.traced)
            self._traces[question] = answer.traced.trace

    def trace(self, strategy: Strategy) -> ModelTrace | None:
        """The model's step under `strategy`; None where it has no trace, or the simulation does not cover it.

        Raises:
            FrugalError: the model cannot be built, or not be trained like that.
        """
        if not covers(self._request, strategy):
            return None
        if self._kind == "cpu":
            strategy = strategy.where_the_host_is_the_device
        if strategy.activation_checkpointing == "budget":
            mixtures = self._mixtures(strategy)
            trace = None if mixtures is None else mixtures.mixed(strategy.layer_modes)
        else:
            trace = self._traced(strategy)[strategy.activation_checkpointing]
        return trace if trace is not None and covers(self._request, strategy, trace) else None

    def num_layers(self, strategy: Strategy) -> int:
        """The layers that can have modes of their own, mixed of those of `strategy`; 0 where they cannot be mixed.

        Raises as `trace`.
        """
        if self._kind == "cpu":
            strategy = strategy.where_the_host_is_the_device
        mixtures = self._mixtures(strategy) if covers(self._request, strategy) else None
        return 0 if mixtures is None else mixtures.num_layers

    def _mixtures(self, strategy: Strategy) -> LayerMixtures | None:
        """Those of the modes of `strategy`; None where their traces do not go together."""
        key = strategy.loss, strategy.mlp, strategy.zero_stage == 3, frozenset(strategy.modes)
        if key not in self._of_modes:
            self._of_modes[key] = LayerMixtures.of(self._traced(strategy))
        return self._of_modes[key]

    def _traced(self, strategy: Strategy) -> dict[LayerMode, ModelTrace | None]:
        """The traces that `strategy` needs."""
        self.prepare([strategy])
        traces: dict[LayerMode, ModelTrace | None] = {}
        for mode, question in self._questions(strategy).items():
            trace = self._traces[question]
            if isinstance(trace, FrugalError):
                raise trace
            traces[mode] = trace
        return traces

    def _questions(self, strategy: Strategy) -> dict[LayerMode, AskTrace]:
        """What to trace: a mixture is put together from its modes and `off`."""
        modes = strategy.modes if strategy.activation_checkpointing != "budget" else ("off", *strategy.modes)
        return {
            mode: AskTrace(
                request=self._request,
                activation_checkpointing=mode,
                loss=strategy.loss,
                mlp=strategy.mlp,
                zero_stage=3 if strategy.zero_stage == 3 else 2,
                kind=self._kind,
                capability=self._capability,
            )
            for mode in modes
        }

    def _key(self, question: AskTrace) -> str:
        mode = (
            question.activation_checkpointing,
            question.loss,
            question.zero_stage,
            question.kind,
            question.capability,
        )
        tiled = ("tiled MLP",) if question.mlp == "tiled" else ()
        return digest("trace", self._model, self._request.precision, (*mode, *tiled))
