"""Who looks on while a request is answered: metrics, the log, traces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request

from specmamba.core import OutputDelta


@dataclass(frozen=True, slots=True)
class CallContext:
    """One HTTP call, as it arrived. Its engine requests, one per choice, are called ``{call_id}-{index}``."""

    call_id: str
    path: str
    arrived_at: float  # time.perf_counter()

    @classmethod
    def of(cls, request: Request, prefix: str) -> CallContext:
        """Of a call that has just arrived; its id begins with ``prefix``."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", request.url.path, time.perf_counter())


class RequestObserver(Protocol):
    """Sees one engine request. Deltas come in order from the engine thread, an abort from any thread."""

    def record(self, delta: OutputDelta) -> None: ...
    def record_abort(self) -> None: ...


# Makes the observer of the request ``index`` of a call.
ObserverFactory = Callable[[CallContext, int], RequestObserver]
