"""The traces of one request's model: from the cache, shipped, or made by worker processes. No torch here.

A profile by arithmetic begins with one. Traces of mixtures of activation checkpointing modes are assembled from those
of single modes.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from frugal.deepspeed_adapter.simulate.engine import covers
from frugal.dryrun import shipped
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.dryrun.messages import AskTrace, Traced
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.planning.memory.layer_mixture import LayerMixtures, NotMixableError
from frugal.planning.memory.timeline import MarkKind, ModelTrace
from frugal.planning.strategy import LayerMode, Strategy

MOST_MIXED = 8
"""The most traces of mixtures, and models with mixable modes, that are kept in memory."""

MOST_TRACED = 2
"""The most models whose traces are kept in memory."""

TRACES: dict[tuple[Path | None, str], dict[AskTrace, ModelTrace | FrugalError | None]] = {}
"""Traces by cache and model, shared by a plan and the search for improvements: to read them takes a second."""

MIXTURES: dict[str, LayerMixtures] = {}
"""Mixtures by the key of their first trace, shared by a plan and the search for improvements."""


class Drafts:
    """The traces of one request's model, on the device of `question`."""

    def __init__(self, question: AskTrace, cache: Cache, pool: Pool) -> None:
        self._question, self._cache, self._pool = question, cache, pool
        self._request = question.request
        self._model = model_key(question.request)
        place = cache.folder, digest(self._model, self._request.precision)
        self._traces = TRACES[place] = {
            asked: trace
            for asked, trace in TRACES.pop(place, {}).items()
            if cache.folder is not None and isinstance(trace, ModelTrace)
        }
        if len(TRACES) > MOST_TRACED:
            TRACES.pop(next(iter(TRACES)))
        self._mixed_traces: dict[tuple[object, ...], ModelTrace | None] = {}

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Trace the model for all these strategies, in parallel.

        Raises:
            WorkerError: a trace crashed.
        """
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
        for question, answer in zip(missing, self._pool.attempt(missing), strict=True):
            if isinstance(answer, Traced):
                self._cache.write(self._key(question), answer)
            self._traces[question] = answer.trace if isinstance(answer, Traced) else answer

    def trace(self, strategy: Strategy) -> ModelTrace | None:
        """Return the model's step under `strategy`; None if it has no trace, or the simulation does not cover it.

        Raises:
            FrugalError: the model cannot be built, or not be trained like that.
        """
        if not covers(self._request, strategy):
            return None
        strategy = self._as_run(strategy)
        if strategy.activation_checkpointing == "budget":
            trace = self._mixed(strategy)
        else:
            trace = self._traced(strategy)[strategy.activation_checkpointing]
        return trace if trace is not None and covers(self._request, strategy, trace) else None

    def num_layers(self, strategy: Strategy) -> int:
        """Return the model's layers as known from a trace that `strategy` needs. Raises as `trace`."""
        traced = self._traced(strategy) if covers(self._request, strategy) else {}
        trace = next(iter(traced.values()), None)  # each has all layers
        if trace is None:
            return 0
        return len({mark.number for marks in trace.marks for mark in marks if mark.kind is MarkKind.LAYER})

    def why_not_mixed(self, strategy: Strategy) -> str:
        """Return why layers cannot mix the modes of `strategy`; empty if they can.

        Raises as `trace`.
        """
        if not covers(self._request, strategy):
            return "only dry runs can profile it"
        try:
            self._mixtures(strategy)
        except NotMixableError as error:
            return str(error)
        return ""

    def _as_run(self, strategy: Strategy) -> Strategy:
        return strategy.where_the_host_is_the_device if self._question.kind == "cpu" else strategy

    def _mixed(self, strategy: Strategy) -> ModelTrace | None:
        """Return the trace of a mixture. The last few are kept: each is needed several times, and takes megabytes."""
        how = strategy.loss, strategy.mlp, strategy.kernels
        key = *how, strategy.zero_stage == 3, strategy.sequence_parallel, strategy.layer_modes
        if key not in self._mixed_traces:
            try:
                trace = self._mixtures(strategy).trace(strategy.layer_modes)
            except NotMixableError:
                trace = None
            self._mixed_traces = dict([*self._mixed_traces.items(), (key, trace)][-MOST_MIXED:])
        return self._mixed_traces[key]

    def _mixtures(self, strategy: Strategy) -> LayerMixtures:
        """Return the mixtures for a loss and a kind of ZeRO.

        Raises:
            NotMixableError: the traces of the strategy's modes do not go together.
        """
        traced = self._traced(strategy)
        traces = {mode: trace for mode, trace in traced.items() if trace is not None}
        if len(traces) < len(traced):
            raise NotMixableError("only dry runs can profile it")
        key = self._key(self._questions(strategy)["off"])
        if key not in MIXTURES:
            while len(MIXTURES) >= MOST_MIXED:
                MIXTURES.pop(next(iter(MIXTURES)))
            MIXTURES[key] = LayerMixtures(traces["off"])
        for mode, trace in traces.items():
            MIXTURES[key].add(mode, trace)
        return MIXTURES[key]

    def _traced(self, strategy: Strategy) -> dict[LayerMode, ModelTrace | None]:
        """Return the traces that `strategy` needs."""
        self.prepare([strategy])
        traces: dict[LayerMode, ModelTrace | None] = {}
        for mode, question in self._questions(strategy).items():
            trace = self._traces[question]
            if isinstance(trace, FrugalError):
                raise trace
            traces[mode] = trace
        return traces

    def _questions(self, strategy: Strategy) -> dict[LayerMode, AskTrace]:
        """Return the questions to trace: those of the modes, and of `off` for a mixture."""
        strategy = self._as_run(strategy)
        modes = strategy.modes if strategy.activation_checkpointing != "budget" else ("off", *strategy.modes)
        return {
            mode: structs.replace(
                self._question,
                activation_checkpointing=mode,
                loss=strategy.loss,
                mlp=strategy.mlp,
                zero_stage=3 if strategy.zero_stage == 3 else 2,
                sequence_parallel=strategy.sequence_parallel,
                kernels=strategy.kernels,
                multiprocessors=self._question.multiprocessors if strategy.kernels == "liger" else 1,
            )
            for mode in modes
        }

    def _key(self, question: AskTrace) -> str:
        way = structs.asdict(question) | {"request": self._model}
        return digest("trace", self._request.precision, way)
