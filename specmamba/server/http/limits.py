"""What one client may take: how many calls at a time, how large a body, how many seconds."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specmamba.processes.unused_memory import return_freed_memory
from specmamba.server.http.callers import caller_of
from specmamba.server.http.error_answers import SERVER, ApiError, queue_timeout
from specmamba.server.observe.call_record import AbortReason
from specmamba.server_config import ServerConfig

_PLACES = "specmamba.places"  # the key of the ASGI scope
_COUNTED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
# Reading and checking this many JSON values takes a few tenths of a second, in which no other client is answered.
MAX_VALUES, MAX_STRINGS, MAX_NESTED = 1 << 20, 1 << 17, 1 << 16
# Bodies of fewer bytes cannot hold enough values to matter.
SMALL_BODY = 1 << 18
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# After a larger body, freed memory is returned to the system.
_LARGE_BODY = 1 << 20
_one_at_a_time = threading.Lock()


class LimitCalls:
    """ASGI middleware: at most ``max_calls`` calls of one client that generate or tokenize at a time.

    A client is an API key, or an address where there are no keys; more calls get status 429. Each choice that a call
    generates counts as a call (``count_choices``), until the last part of the answer is sent or the client disconnects.
    """

    def __init__(self, app: ASGIApp, max_calls: int) -> None:
        self.app = app
        self._max_calls = max_calls
        self.num_open: Counter[str] = Counter()  # callers without open calls have no entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(_COUNTED_PREFIXES):
            await self.app(scope, receive, send)
            return
        places = scope[_PLACES] = _Places(self.num_open, caller_of(scope).name, self._max_calls)

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                places.give_back()  # before the client sees the end and sends its next call
            await send(message)

        try:
            places.take(1)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await self.app(scope, receive, counting_send)
        finally:
            places.give_back()


def count_choices(scope: Scope, number: int, param: str) -> None:
    """Count the choices that a call is about to generate against ``--max-calls-per-key``.

    Raises:
        ApiError: 400, naming ``param``: there are more than a client may ever have. 429: too many together with the
            client's other calls.
    """
    places: _Places | None = scope.get(_PLACES)
    if places is not None:
        places.check(number, param)
        places.take(number - 1)  # the call itself was counted when it came


class _Places:
    """What one call takes of the limit of its caller."""

    def __init__(self, num_open: Counter[str], caller: str, most: int) -> None:
        self._num_open, self._caller, self._most = num_open, caller, most
        self._num_taken = 0

    def check(self, number: int, param: str) -> None:
        """Raise ApiError 400 where a call has more choices than the limit allows without any other call."""
        if number > self._most:
            message = f"{param}: {number} choices in a call, but a client has {self._most} at a time at the most"
            raise ApiError(400, f"{message} (--max-calls-per-key)", param=param)

    def take(self, number: int) -> None:
        """Take so many more places, or raise ApiError 429."""
        if self._num_open[self._caller] + number > self._most:
            raise _too_many_calls(self._most)
        self._num_taken += number
        self._num_open[self._caller] += number

    def give_back(self) -> None:
        """Free all places. Does nothing when called again."""
        taken, self._num_taken = self._num_taken, 0
        self._num_open[self._caller] -= taken
        if not self._num_open[self._caller]:
            del self._num_open[self._caller]


def _too_many_calls(most: int) -> ApiError:
    return ApiError(
        429,
        f"{most} calls and choices of this client are being answered at a time (--max-calls-per-key): "
        "wait for one of them to end",
        kind="rate_limit_error",
        code="too_many_calls",
        headers={"Retry-After": "1"},
    )


class LimitBody:
    """ASGI middleware: refuses bodies that are too large, have too many values, are compressed or are not JSON."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self._refusal(Headers(scope=scope))
        if error is not None:
            await error.response()(scope, receive, send)
            return
        body = _Body(self._max_bytes)
        try:
            await self.app(scope, body.counted(receive), send)
        finally:
            if body.num_received > _LARGE_BODY:
                give_back_memory_later()

    def _refusal(self, headers: Headers) -> ApiError | None:
        announced = headers.get("content-length", "")
        if announced in ("", "0") and "transfer-encoding" not in headers:
            return None
        if announced.isdecimal() and int(announced) > self._max_bytes:
            return _too_large(self._max_bytes)
        if not _is_json(headers.get("content-type", "")):
            # Also refuses forms of web pages of other servers, which browsers send without a preflight request.
            return ApiError(415, "send JSON, with the header 'Content-Type: application/json'", code="not_json")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return ApiError(415, "send the body as it is, without a Content-Encoding", code="compressed_body")
        return None


class _Body:
    """Counts the bytes and values of one body while it is received."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self.num_received = 0

    def counted(self, receive: Receive) -> Receive:
        async def receive_counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._add(message.get("body", b""), is_last=not message.get("more_body", False))
            return message

        return receive_counted

    def _add(self, part: bytes, is_last: bool) -> None:
        self.num_received += len(part)
        if self.num_received > self._max_bytes:
            # Of all exceptions only an HTTPException passes through FastAPI's reading of a body unchanged.
            raise HTTPException(413, str(_too_large(self._max_bytes)))
        if part:
            self._parts.append(part)
        if is_last:
            _check_encoding(b"".join(part[:4] for part in self._parts[:4])[:4])
            if self.num_received > SMALL_BODY:
                body, self._parts = b"".join(self._parts), []
                _check_values(body)


def _check_encoding(first_bytes: bytes) -> None:
    """Check that Python's JSON parser takes a body for UTF-8; it looks at the first four bytes.

    A byte order mark of UTF-8 is allowed: the parser leaves it out.
    """
    if b"\0" in first_bytes or first_bytes.startswith(_UTF16_MARKS):
        raise HTTPException(400)


def _check_values(body: bytes) -> None:
    if b"\0" in body:  # not UTF-8: in UTF-16 or UTF-32 too_many_values would count wrongly
        raise HTTPException(400)
    if (problem := too_many_values(body)) is not None:
        raise HTTPException(413, f"the body has more than {problem}: send it in parts")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (--max-request-bytes)", code="request_too_large")


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Seconds that a call may take; None: any."""

    queue_timeout: float | None = None  # to the first delta of any choice
    request_timeout: float | None = None  # to its end

    @classmethod
    def of(cls, config: ServerConfig) -> CallLimits:
        return cls(config.queue_timeout, config.request_timeout)


class Deadline:
    """Calls ``on_late`` when a call has taken too long: first to begin, then to end."""

    def __init__(self, limits: CallLimits, waited_s: float, on_late: Callable[[], None]) -> None:
        """``waited_s``: seconds since the call arrived."""
        self._limits, self._on_late = limits, on_late
        self._loop = asyncio.get_running_loop()
        self._arrived_at = self._loop.time() - waited_s
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_past = False
        self._start()

    @property
    def _is_for_queue(self) -> bool:
        queue, request = self._limits.queue_timeout, self._limits.request_timeout
        return not self._has_begun and queue is not None and (request is None or queue < request)

    def _start(self) -> None:
        limit = self._limits.queue_timeout if self._is_for_queue else self._limits.request_timeout
        if limit is not None:
            self._timer = self._loop.call_at(self._arrived_at + limit, self._pass)

    def _pass(self) -> None:
        self.is_past = True
        self._on_late()

    def note_begin(self) -> None:
        """Change from the limit on the queue to the limit on the whole call: the first delta has come."""
        if not self._has_begun:
            self.cancel()
            self._has_begun, self.is_past = True, False
            self._start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def at(self) -> float | None:
        """When it passes, on the loop's clock; None: never."""
        return None if self._timer is None else self._timer.when()

    @property
    def reason(self) -> AbortReason:
        return "queue_timeout" if self._is_for_queue else "request_timeout"

    def error(self) -> ApiError:
        """The error for a client whose call has passed the deadline."""
        if self._is_for_queue:
            return queue_timeout("no turn", self._limits.queue_timeout)
        text = f"the answer was not complete after {self._limits.request_timeout:g} s (--request-timeout)"
        return ApiError(504, text, kind=SERVER, code="request_timeout")


def too_many_values(body: bytes) -> str | None:
    """Count the values of a JSON text (UTF-8) without parsing it: each would become an object.

    Returns what there is too much of, as a part of a sentence ("131072 strings"); None when it is within the limits.
    """
    # Pairs of backslashes first: only a single backslash escapes the quote behind it.
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * MAX_STRINGS:
        return f"{MAX_STRINGS} strings"
    outside = b"".join(body.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_NESTED:
        return f"{MAX_NESTED} lists and objects"
    return f"{MAX_VALUES} values" if outside.count(b",") >= MAX_VALUES else None


def give_back_memory() -> None:
    """Return freed memory to the system. Does nothing while another thread does it."""
    if _one_at_a_time.acquire(blocking=False):
        try:
            return_freed_memory()
        finally:
            _one_at_a_time.release()


def give_back_memory_later() -> None:
    """``give_back_memory`` on a thread, 0.2 s later: the body that has just been answered is still referenced."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, loop.run_in_executor, None, give_back_memory)
