"""Who looks on while a request is answered: metrics, the log, traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specmamba.core import OutputDelta


@dataclass(frozen=True, slots=True)
class CallContext:
    """One HTTP call, as it arrived. Its engine requests, one per choice, are called ``{call_id}-{index}``."""

    call_id: str
    path: str
    arrived_at: float  # time.perf_counter()


class RequestObserver(Protocol):
    """Sees one engine request. Deltas come in order from the engine thread, an abort from any thread."""

    def record(self, delta: OutputDelta) -> None: ...
    def record_abort(self) -> None: ...


# Makes the observer of the request ``index`` of a call.
ObserverFactory = Callable[[CallContext, int], RequestObserver]
