"""Who looks on while a request is answered: metrics, the log, traces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from fastapi import Request

from specmamba.core import OutputDelta
from specmamba.server.calls import CallRecord

if TYPE_CHECKING:
    from specmamba.server.metrics import ServerMetrics

AbortReason = Literal["disconnect", "queue_timeout", "request_timeout", "write_timeout"]


@dataclass(frozen=True, slots=True)
class CallContext:
    """One HTTP call, as it arrived. Its engine requests, one per choice, are called ``{call_id}-{index}``."""

    call_id: str
    path: str
    arrived_at: float  # time.perf_counter()
    record: CallRecord

    @classmethod
    def of(cls, request: Request, prefix: str) -> CallContext:
        """Of a call that has just arrived; its id begins with ``prefix``.

        The id is the server's own even where the client sent a request id: two calls may come with the same one.
        """
        record = CallRecord.of(request.scope)
        own = record.request_id if record.has_own_id else uuid.uuid4().hex
        record.call_id = f"{prefix}-{own}"
        return cls(record.call_id, request.url.path, record.arrived_at, record)

    @property
    def request_id(self) -> str:
        """The client's, or one that was made for it; in the header X-Request-Id of the answer."""
        return self.record.request_id

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context that the client sent."""
        return self.record.trace.get("traceparent")


class RequestObserver(Protocol):
    """Sees one engine request. Deltas come in order from the engine thread, an abort from any thread."""

    def record(self, delta: OutputDelta) -> None: ...
    def record_abort(self, reason: AbortReason = "disconnect") -> None: ...


# Makes the observer of the request ``index`` of a call.
ObserverFactory = Callable[[CallContext, int], RequestObserver]


class _Recorder:
    """Keeps what the call's record says of one request at its end."""

    def __init__(self, record: CallRecord, index: int) -> None:
        self._record, self._index = record, index
        record.num_choices = max(record.num_choices, index + 1)

    def record(self, delta: OutputDelta) -> None:
        record = self._record
        if record.first_token_at is None and delta.token_ids:
            record.first_token_at = time.perf_counter()
        record.latest[self._index] = delta

    def record_abort(self, reason: AbortReason = "disconnect") -> None:
        self._record.abort_reason = self._record.abort_reason or reason


def build_observers(metrics: ServerMetrics) -> list[ObserverFactory]:
    """The observers of an application."""
    return [metrics.observe, lambda context, index: _Recorder(context.record, index)]
