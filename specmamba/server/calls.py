"""One record per HTTP call, from its first byte to its last: what the log, the metrics and the traces say of it."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from specmamba.core import OutputDelta

logger = logging.getLogger("specmamba")

_SCOPE_KEY = "specmamba.call"
# What may be echoed in a header and stand in a log line as it is.
_SAFE_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")
_STREAMED_ERROR = b'data: {"error":'
_CLIENT_LEFT = 499


@dataclass(slots=True)
class CallRecord:
    """``latest`` and ``first_token_at`` are written by the engine thread, the rest by the event loop."""

    method: str
    path: str
    request_id: str
    has_own_id: bool  # the client sent none that can be used
    arrived_at: float  # time.perf_counter()
    arrived_ns: int  # since 1970
    trace: dict[str, str]  # W3C trace context, by header
    call_id: str | None = None  # the answer's id
    num_choices: int = 0
    latest: dict[int, OutputDelta] = field(default_factory=dict)  # by choice
    first_token_at: float | None = None
    abort_reason: str | None = None
    status: int = _CLIENT_LEFT
    error: str | None = None  # its code
    ended_at: float = 0.0

    @classmethod
    def of(cls, scope: Scope) -> CallRecord:
        """The record of a call; a new one where the call has none yet."""
        if _SCOPE_KEY not in scope:
            scope[_SCOPE_KEY] = cls._arriving(scope)
        record: CallRecord = scope[_SCOPE_KEY]
        return record

    @classmethod
    def _arriving(cls, scope: Scope) -> CallRecord:
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

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds; None when there was no token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def finish_reasons(self) -> list[str]:
        """One per choice, also of those that were given up."""
        deltas = [self.latest.get(index) for index in range(self.num_choices)]
        return ["abort" if delta is None else delta.finish_reason or "abort" for delta in deltas]

    @property
    def outcome(self) -> str | None:
        """Why the call has no whole answer; None when it has one."""
        if self.error is not None:
            return self.error
        if self.status == _CLIENT_LEFT or "abort" in self.finish_reasons:
            return self.abort_reason or "disconnect"
        return None

    def totals(self) -> CallTotals:
        return CallTotals.of(list(self.latest.values()))


@dataclass(frozen=True, slots=True)
class CallTotals:
    """The tokens of a call, all its choices together."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    accept_length: float  # tokens gained per verify; 0 before the first one

    @classmethod
    def of(cls, latest: Sequence[OutputDelta]) -> CallTotals:
        """Of the newest delta of each choice."""
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


class RecordCalls:
    """Stands before everything else: names every call, and tells ``at_end`` of each when it is over."""

    def __init__(self, app: ASGIApp, at_end: Sequence[Callable[[CallRecord], None]]) -> None:
        self.app = app
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = CallRecord.of(scope)
        try:
            await self.app(scope, receive, _watched(send, record))
        finally:
            record.ended_at = time.perf_counter()
            for tell in self._at_end:
                try:
                    tell(record)
                except Exception:  # who looks on costs nobody an answer
                    logger.exception("a call could not be recorded")


def _watched(send: Send, record: CallRecord) -> Send:
    id_header = (b"x-request-id", record.request_id.encode("latin1"))

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message.get("headers", ()), id_header]
        elif record.status >= 400 or message.get("body", b"").startswith(_STREAMED_ERROR):
            record.error = record.error or _error_code(message.get("body", b""), record.status)
        await send(message)

    return watched


def _error_code(body: bytes, status: int) -> str | None:
    """The code in the body of an error. Its own code knows best what went wrong, whoever answered."""
    if status == _CLIENT_LEFT:
        return None
    try:
        detail: Any = json.loads(body.removeprefix(b"data:"))["error"]
        return str(detail["code"] or detail["type"])
    except (ValueError, TypeError, KeyError):
        return f"http_{status}"
