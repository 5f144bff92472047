"""Profiles by arithmetic: the model's step traced once for each way to run it, and DeepSpeed simulated over it.

No torch here: traces come from the cache or from worker processes. What the simulation does not cover, and models
that give no trace, have no draft; they are rehearsed.
"""

from collections.abc import Sequence

from frugal.dryrun import shipped
from frugal.dryrun.cache import Cache, digest, model_key
from frugal.dryrun.messages import Trace, Traced
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.planning.profile import DeviceKind
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy
from frugal.planning.zero.simulation import covers
from frugal.planning.zero.trace import ModelTrace


class Drafts:
    """The traces of one request's model."""

    def __init__(self, request: Request, kind: DeviceKind, cache: Cache, pool: Pool) -> None:
        self._request = request
        self._kind = kind
        self._cache = cache
        self._pool = pool
        self._traces: dict[Trace, ModelTrace | FrugalError | None] = {}

    def prepare(self, strategies: Sequence[Strategy]) -> None:
        """Trace the model for all these strategies, in parallel.

        Raises:
            WorkerError: a trace crashed.
        """
        wanted = {self._question(strategy): None for strategy in strategies if covers(self._request, strategy)}
        missing = []
        for question in wanted:
            if question not in self._traces:
                found = self._cache.read(self._key(question), Traced) or shipped.trace(question)
                if found is None:
                    missing.append(question)
                else:
                    self._traces[question] = found.trace
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
        self.prepare([strategy])
        trace = self._traces[self._question(strategy)]
        if isinstance(trace, FrugalError):
            raise trace
        return trace if trace is not None and covers(self._request, strategy, trace) else None

    def _question(self, strategy: Strategy) -> Trace:
        mode = strategy.activation_checkpointing
        return Trace(
            request=self._request,
            activation_checkpointing="full" if mode == "offloaded" and self._kind == "cpu" else mode,
            loss=strategy.loss,
            zero_stage=3 if strategy.zero_stage == 3 else 2,
            kind=self._kind,
        )

    def _key(self, question: Trace) -> str:
        mode = (question.activation_checkpointing, question.loss, question.zero_stage, question.kind)
        return digest("trace", model_key(self._request), self._request.precision, mode)
