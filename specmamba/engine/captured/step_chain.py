"""Steps that are launched before the one before them was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from specmamba.core import ChainStats
from specmamba.engine.captured.step_in_flight import ExtendInFlight, StepInFlight
from specmamba.engine.request import Request

if TYPE_CHECKING:
    from specmamba.engine.runner import Runner
    from specmamba.engine.scheduler import Scheduler


class Arrivals(NamedTuple):
    """What was launched behind a step in flight, in front of the next one."""

    joining: Sequence[Request]  # they take part in the next step
    extend: ExtendInFlight | None


NO_ARRIVALS = Arrivals((), None)


class StepChain:
    """Launches a step behind the one in flight, where the host has nothing to do between the two.

    A request that the step in flight ends for a reason that the step itself knows is padding in the one behind it: it
    is *gone*, and its memory is free. Any other request that ends, as by a stop string, takes part in the one behind
    it all the same. It is *ended* until that one was read: its row, slot and pages are still in use, and nothing of
    what that step decides for it is kept.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self.ended: dict[Request, bool] = {}  # of the newest step, and whether they leave their states
        self.gone: frozenset[Request] = frozenset()  # of the newest step
        self.behind: StepInFlight | None = None  # behind the step that is to be read next
        self._num_steps = self._num_chained = self._num_discarded = 0
        self._num_for_host = self._num_for_requests = self._num_for_memory = 0

    def launch_behind(self, step: StepInFlight, arrive: Callable[[], Arrivals | None]) -> bool:
        """Launch a step behind the newest one; False: it is to be read first, and no step was launched.

        Args:
            step: the newest one.
            arrive: admits requests, and runs known tokens behind that step; None: that must be read first.
        """
        out, scheduler = self.gone.union(self.ended), self._scheduler
        places = [place for place, request in enumerate(step.requests) if request not in out]
        requests = step.requests if len(places) == len(step.requests) else [step.requests[place] for place in places]
        is_settled = scheduler.is_settled()
        if len(requests) < len(scheduler.verifying) or not (scheduler.may_join if not is_settled else requests):
            self._num_for_requests += 1
        elif not step.leads:
            self._num_for_host += 1
        elif not scheduler.grow_ahead(step.num_nodes):
            self._num_for_memory += 1
        elif (arrivals := NO_ARRIVALS if is_settled else arrive()) is None or (
            not arrivals.joining and _all_end(requests)
        ):
            self._num_for_requests += 1
        else:
            self.behind = self._runner.launch_behind(step, places, arrivals.joining, arrivals.extend)
            self._num_for_host += self.behind is None
        return self.behind is not None

    def take(self) -> tuple[StepInFlight | None, dict[Request, bool]]:
        """Return the step behind the one that is read now, and the requests that had ended before that; forget them."""
        behind, self.behind = self.behind, None
        self._num_steps += 1
        self._num_chained += behind is not None
        return behind, self.take_ended()

    def take_ended(self) -> dict[Request, bool]:
        """Return the requests that had ended before the newest step; forget them."""
        ended, self.ended, self.gone = self.ended, {}, frozenset()
        self._num_discarded += len(ended)
        return ended

    def is_wanted(self, step: StepInFlight) -> bool:
        """Whether some request of the newest step has not ended, or known tokens were run in front of it."""
        is_live = any(request not in self.gone and request not in self.ended for request in step.requests)
        return is_live or step.extend is not None

    def hold(self, request: Request, leaves: bool) -> None:
        """Note that a request has ended, which the newest step has a row of.

        ``leaves``: its state goes to the prefix cache.
        """
        self._scheduler.drop(request)
        self.ended[request] = leaves

    @property
    def stats(self) -> ChainStats:
        """Numbers since the start."""
        waits = self._num_for_host, self._num_for_requests, self._num_for_memory
        return ChainStats(self._num_steps, self._num_chained, self._num_discarded, *waits)


def _all_end(requests: Sequence[Request]) -> bool:
    """Whether the step in flight is the last one of each, whatever it decides."""
    return all(request.text.num_left <= 1 for request in requests)
