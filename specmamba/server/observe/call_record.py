"""One record per HTTP call, from its first byte to its last: the log, the metrics and the traces are made from it."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specmamba.core import OutputDelta

logger = logging.getLogger("specmamba")

_SCOPE_KEY = "specmamba.call"
# Request ids that can be copied into a header and into a log line unchanged.
_SAFE_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")
_STREAMED_ERROR = b'data: {"error":'
_CLIENT_LEFT = 499

AbortReason = Literal["disconnect", "queue_timeout", "request_timeout", "write_timeout"]


@dataclass(slots=True)
class CallRecord:
    """What is known of one HTTP call.

    ``latest`` and ``first_token_at`` are written by the engine thread, the rest by the event loop.
    """

    method: str
    path: str
    request_id: str  # the client's, or a generated one; in the header X-Request-Id of the answer
    has_own_id: bool  # generated here: the client sent no usable one
    arrived_at: float  # time.perf_counter()
    arrived_ns: int  # since 1970
    trace: dict[str, str]  # W3C trace context, by header
    call_id: str | None = None  # the id in the answer; engine requests are called ``{call_id}-{index of the choice}``
    num_choices: int = 0
    latest: dict[int, OutputDelta] = field(default_factory=dict)  # by choice
    first_token_at: float | None = None
    abort_reason: str | None = None
    status: int = _CLIENT_LEFT
    error: str | None = None  # its code
    ended_at: float = 0.0

    @classmethod
    def of(cls, scope: Scope) -> CallRecord:
        """The record of a call, created by the first caller."""
        if _SCOPE_KEY not in scope:
            scope[_SCOPE_KEY] = cls._new(scope)
        record: CallRecord = scope[_SCOPE_KEY]
        return record

    @classmethod
    def _new(cls, scope: Scope) -> CallRecord:
        wanted = (*_TRACE_HEADERS, "x-request-id")
        given = {
            name.decode("latin1"): value.decode("latin1")
            for name, value in scope["headers"]
            if name.decode("latin1") in wanted
        }
        sent = given.pop("x-request-id", "")
        is_safe = _SAFE_ID.fullmatch(sent) is not None
        return cls(
            method=scope["method"],
            path=scope["path"],
            request_id=sent if is_safe else uuid.uuid4().hex,
            has_own_id=not is_safe,
            arrived_at=time.perf_counter(),
            arrived_ns=time.time_ns(),
            trace=given,
        )

    def new_call_id(self, prefix: str) -> str:
        """Set and return the id of the answer, ``{prefix}-{unique}``.

        It is generated here even where the client sent a request id: two calls may come with the same one.
        """
        own = self.request_id if self.has_own_id else uuid.uuid4().hex
        self.call_id = f"{prefix}-{own}"
        return self.call_id

    @property
    def total_s(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended_at - self.arrived_at

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds; None when there was no token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def finish_reasons(self) -> list[str]:
        """One per choice; "abort" for a choice that did not end."""
        deltas = [self.latest.get(index) for index in range(self.num_choices)]
        return ["abort" if delta is None else delta.finish_reason or "abort" for delta in deltas]

    @property
    def outcome(self) -> str | None:
        """Why the call has no complete answer; None when it has one."""
        if self.error is not None:
            return self.error
        if self.status == _CLIENT_LEFT or "abort" in self.finish_reasons:
            return self.abort_reason or "disconnect"
        return None

    def totals(self) -> CallTotals:
        """Token counts over all choices."""
        return CallTotals.of(list(self.latest.values()))


@dataclass(frozen=True, slots=True)
class CallTotals:
    """The tokens of a call, summed over its choices."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    accept_length: float  # tokens gained per verify; 0 before the first one

    @classmethod
    def of(cls, latest: Sequence[OutputDelta]) -> CallTotals:
        """The totals after the newest delta of each choice."""
        num_steps = sum(delta.spec.num_verify_steps for delta in latest)
        accepted = sum(delta.spec.num_accepted_tokens for delta in latest)
        return cls(
            prompt_tokens=sum(delta.num_prompt_tokens for delta in latest),
            cached_tokens=sum(delta.num_cached_tokens for delta in latest),
            output_tokens=sum(delta.num_output_tokens for delta in latest),
            draft_tokens=sum(delta.spec.num_draft_tokens for delta in latest),
            accepted_tokens=accepted,
            accept_length=1 + accepted / num_steps if num_steps else 0.0,
        )


class RequestObserver(Protocol):
    """Observes one engine request. Deltas come in order from the engine thread, an abort from any thread."""

    def record(self, delta: OutputDelta) -> None: ...
    def record_abort(self, reason: AbortReason = "disconnect") -> None: ...


# Makes the observer of the choice ``index`` of a call.
ObserverFactory = Callable[[CallRecord, int], RequestObserver]


class CallRecorder:
    """Writes the newest delta, the time of the first token and the reason of an abort of one choice to the record."""

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


class RecordCalls:
    """ASGI middleware: gives every call its record, and passes the record to each of ``at_end`` when the call ends."""

    def __init__(self, app: ASGIApp, at_end: Sequence[Callable[[CallRecord], None]]) -> None:
        self.app = app
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        record = CallRecord.of(scope)
        try:
            await self.app(scope, receive, _recording_send(send, record))
        finally:
            record.ended_at = time.perf_counter()
            for report in self._at_end:
                try:
                    report(record)
                except Exception:  # an observer that fails must not cost the client its answer
                    logger.exception("a call could not be recorded")


def _recording_send(send: Send, record: CallRecord) -> Send:
    """``send``, which adds the header X-Request-Id, and records the status and the code of an error."""
    id_header = (b"x-request-id", record.request_id.encode("latin1"))

    async def recording_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message.get("headers", ()), id_header]
        elif record.status >= 400 or message.get("body", b"").startswith(_STREAMED_ERROR):
            record.error = record.error or _error_code(message.get("body", b""), record.status)
        await send(message)

    return recording_send


def _error_code(body: bytes, status: int) -> str | None:
    """The code in the body of an error, or ``http_STATUS`` where the body has none."""
    if status == _CLIENT_LEFT:
        return None
    try:
        detail: Any = json.loads(body.removeprefix(b"data:"))["error"]
        return str(detail["code"] or detail["type"])
    except (ValueError, TypeError, KeyError):
        return f"http_{status}"
