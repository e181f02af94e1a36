"""What one client may ask for: the size and type of a body, and how many calls at a time."""

from __future__ import annotations

from collections import Counter

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specmamba.server.errors import ApiError
from specmamba.server.json_size import SMALL_BODY, too_many_values
from specmamba.server.memory import give_back_memory_later

# Where RequireApiKey notes which key a request came with.
CALLER = "specmamba.caller"
_COUNTED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")
# Bodies above this leave memory behind that is worth giving back.
_LARGE_BODY = 1 << 20


class LimitCalls:
    """At most ``max_calls`` calls that generate, or tokenize, at a time for each API key, or each address without keys.

    A slot is held until the last of the answer is on its way, or its client has hung up.
    """

    def __init__(self, app: ASGIApp, max_calls: int) -> None:
        self.app = app
        self._max_calls = max_calls
        self.num_open: Counter[str] = Counter()  # only callers that have calls: forgotten ones cost nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(_COUNTED_PREFIXES):
            await self.app(scope, receive, send)
            return
        caller = _caller(scope)
        if self.num_open[caller] >= self._max_calls:
            await self._too_many().response()(scope, receive, send)
            return
        slot = _Slot(self.num_open, caller)

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                slot.give_back()  # before the client can know, and come again
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            slot.give_back()

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"{self._max_calls} calls of this client are being answered already (--max-calls-per-key): "
            "wait for one of them to end",
            kind="rate_limit_error",
            code="too_many_calls",
            headers={"Retry-After": "1"},
        )


class _Slot:
    """One call's place in the count of its caller."""

    def __init__(self, num_open: Counter[str], caller: str) -> None:
        self._num_open, self._caller = num_open, caller
        self._is_taken = True
        num_open[caller] += 1

    def give_back(self) -> None:
        """Harmless when called again."""
        if self._is_taken:
            self._is_taken = False
            self._num_open[self._caller] -= 1
            if not self._num_open[self._caller]:
                del self._num_open[self._caller]


def _caller(scope: Scope) -> str:
    if CALLER in scope:
        return str(scope[CALLER])
    client = scope.get("client")
    return f"address {client[0]}" if client else "unknown"


class LimitBody:
    """Refuses bodies that are too large, have too many values, are not JSON, or are compressed.

    The size is checked whether it is announced or not.
    """

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
            # Also keeps the forms of foreign web pages out, which browsers send without asking.
            return ApiError(415, "send JSON, with the header 'Content-Type: application/json'", code="not_json")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            return ApiError(415, "send the body as it is, without a Content-Encoding", code="compressed_body")
        return None


class _Body:
    """One body on its way in."""

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
        """Only an HTTPException passes through the reading of a body unchanged."""
        self.num_received += len(part)
        if self.num_received > self._max_bytes:
            raise HTTPException(413, str(_too_large(self._max_bytes)))
        self._parts.append(part)
        if is_last and self.num_received > SMALL_BODY:
            body, self._parts = b"".join(self._parts), []
            _check_values(body)


def _check_values(body: bytes) -> None:
    if b"\0" in body:  # another encoding, in which quotes and brackets are not where they seem to be
        raise HTTPException(400)
    if (problem := too_many_values(body)) is not None:
        raise HTTPException(413, f"the body has more than {problem}: send it in parts")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (--max-request-bytes)", code="request_too_large")


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))
