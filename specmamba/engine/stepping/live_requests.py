"""The requests of an engine, and what is done when one of them ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from specmamba.core import OutputDelta
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.handoffs import Handoffs
from specmamba.engine.request import Request
from specmamba.engine.runner import Runner
from specmamba.engine.scheduler import Scheduler
from specmamba.engine.stepping.constraints import Constraints
from specmamba.verify.pools import Pools

NOT_FINITE = "the model's numbers are not finite for this request: try --dtype bfloat16 or float32"


class LiveRequests:
    """Requests that have not ended, and how they give back what they hold.

    What a request has computed that ends by itself, or is preempted, goes to the prefix cache.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, cache_manager: CacheManager, constraints: Constraints, pools: Pools
    ) -> None:
        self._runner, self._scheduler, self._cache = runner, scheduler, cache_manager
        self._constraints, self._pools = constraints, pools
        self.by_id: dict[str, Request] = {}
        self.handoffs: Handoffs | None = None  # None: no prompts are handed over

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError: too many are waiting."""
        self._scheduler.add(request)
        self.by_id[request.request_id] = request

    def __contains__(self, request: Request) -> bool:
        """Whether a request has not ended: another one may have its id since."""
        return self.by_id.get(request.request_id) is request

    def drop(self, request_id: str) -> None:
        """Free all that a request holds, which no step in flight uses; unknown ids are ignored."""
        request = self.by_id.pop(request_id, None)
        if request is None:
            return
        self._free(request)
        if request.follower is not None:
            request.follower.close()
        if self.handoffs is not None:
            self.handoffs.was_dropped(request)

    def hold(self, request: Request) -> None:
        """Let a request end whose memory a step in flight still uses: ``free_held`` is to follow."""
        self.by_id.pop(request.request_id)

    def free_held(self, ended: Mapping[Request, bool]) -> None:
        """Free what requests hold that ended one step ago; a state that the step in between has folded away is lost.

        ``ended``: whether each leaves what it has computed in the prefix cache.
        """
        for request in self._cache.leaving([request for request, leaves in ended.items() if leaves]):
            row, position = request.held_row, request.num_run
            if position in self._pools.state_buffers.positions(row):
                self._cache.leave_last(request, self._runner.drafter.kept_features(row, position))
        for request in ended:
            self._free(request)

    def preempt(self, request: Request) -> None:
        """Free all memory of a running request; its state goes to the prefix cache, and it waits again."""
        self.leave([request])
        self._runner.dismiss(request)
        self._scheduler.preempt(request)

    def leave(self, requests: Sequence[Request]) -> None:
        """Leave the last states of requests that end or are preempted in the prefix cache."""
        leaving = self._cache.leaving(requests)
        self._runner.complete([request for request in leaving if request.is_verifying])
        for request in leaving:
            self._cache.leave_last(request, self.features(request, request.num_run))

    def features(self, request: Request, position: int) -> Tensor | None:
        """Features from which the drafter can resume after a position of a request; None: it needs none."""
        return self._runner.drafter.features(request.held_row, position)

    def failure(self, request: Request, message: str = NOT_FINITE, code: str | None = None) -> OutputDelta:
        """The last delta of a request that cannot continue. An error of its grammar precedes ``message``."""
        if request.grammar_error is not None:
            message, code = str(request.grammar_error), request.grammar_error.code
        if code == "grammar_too_complex":
            self._constraints.distrust(request.params.grammar, self.by_id.values())
        return request.delta((), "", "error", message, error_code=code)

    def _free(self, request: Request) -> None:
        self._runner.dismiss(request)
        self._scheduler.release(request)
