"""Reading HTTP with limits: the size of a head, what is refused as invalid, and when the next request is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specmamba.server.http.error_answers import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_MAX_HEAD_BYTES = 32 << 10  # request line and headers; also the framing of a chunked body
_MAX_BLANK_BYTES = 64  # of empty lines before a request, which old clients send behind a body
_SLICE_BYTES = 1 << 10  # of a chunked body, whose end only the parser finds
_BLANK_LINE = re.compile(rb"(?:\A|\n)\r?\n")
# The parser stops after a request to upgrade, without its body. No upgrade is supported here.
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)
# A client that has closed its side is probed after this time, then after twice as long, up to the longest.
_FIRST_PROBE_S, _LONGEST_PROBE_S = 0.1, 8.0
_INTERIM_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Reads one request at a time: the next one is read when the one before has been answered."""

    part: str | None = None  # of the newest request, "head" or "body" while it is incomplete
    active: RequestResponseCycle | None = None  # being answered, or answered last
    _num_left: int | None = None  # bytes of the body that have not been parsed; None: the body is chunked
    _num_unbounded = 0  # bytes parsed since the last result of the parser
    _num_blank = 0  # bytes of empty lines since the last request
    _unread = b""
    _failure: ApiError | None = None  # answered after the requests before it
    _has_eof = False  # the client sends no more, and may still read
    _probing: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        return self.active is not None and not self.active.response_complete

    @property
    def awaits_client(self) -> bool:
        """Whether the connection waits for more bytes of the client."""
        return self.cycle is self.active if self.part == "body" else not self.is_answering

    @property
    def has_half_a_request(self) -> bool:
        """Whether a request is incomplete and its answer has not begun."""
        if self.part == "body":
            return self.cycle is self.active and not self.cycle.response_started
        return self.has_begun and not self.is_answering

    @property
    def has_begun(self) -> bool:
        """Whether a part of an incomplete request has been received."""
        return self.part is not None or bool(self._unread)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error in place of the application, and close."""
        raise NotImplementedError

    def drop(self) -> None:
        """Close at once."""
        raise NotImplementedError

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += data
        self._read_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._read_on()
            if self._has_eof and self.awaits_client:
                self.transport.close()
            elif self.has_begun:
                self._unset_keepalive_if_required()  # the timer for idle connections does not apply

    def _read_on(self) -> None:
        """Parse the received bytes up to the end of the first request that has no answer yet."""
        data, self._unread = self._unread, b""
        place = self._skip_blank_lines(data, 0)
        while self._failure is None and self.awaits_client and (size := self._num_readable(data, place)):
            self._parse(data[place : place + size])
            place = self._skip_blank_lines(data, place + size)
        self._unread = data[place:]
        if self._failure is None and self.awaits_client and len(self._unread) + self._num_unbounded > _MAX_HEAD_BYTES:
            self._failure = _not_http(431, f"more than {_MAX_HEAD_BYTES} bytes of headers")
        if self._failure is not None:
            self._unread = b""
            self._fail()
        elif not self.awaits_client and self._unread:
            self.flow.pause_reading()

    def _skip_blank_lines(self, data: bytes, place: int) -> int:
        """Where the next request begins: empty lines before it are bounded, and the parser does not see them."""
        if self.part is not None or not self.awaits_client or data[place : place + 1] not in (b"\r", b"\n"):
            return place
        rest = data[place : place + _MAX_BLANK_BYTES + 1]
        num_blank = len(rest) - len(rest.lstrip(b"\r\n"))
        self._num_blank += num_blank
        if self._num_blank > _MAX_BLANK_BYTES:
            self._failure = _not_http(400, f"more than {_MAX_BLANK_BYTES} bytes of empty lines")
        return place + num_blank

    def _num_readable(self, data: bytes, place: int) -> int:
        """How many bytes may be parsed next: complete lines of a head, or a part of a body, but no byte beyond it."""
        if self.part == "body":
            return min(len(data) - place, _SLICE_BYTES if self._num_left is None else self._num_left)
        first = data[place : place + 1]
        if self.part is None and not first.isupper():
            return len(data) - place  # not a method: refuse it without waiting for the end of the line
        blank = _BLANK_LINE.search(data, place)
        end = data.rfind(b"\n", place) + 1 if blank is None else blank.end()
        is_bounded = self._num_unbounded + end - place <= _MAX_HEAD_BYTES
        return end - place if place < end and is_bounded else 0

    def _parse(self, data: bytes) -> None:
        is_body = self.part == "body"
        try:
            self.parser.feed_data(data if is_body else _UPGRADE.sub(b"not-upgrade:", data))
        except httptools.HttpParserUpgrade:
            self._failure = _not_http(400, "nothing but HTTP is spoken here")
        except httptools.HttpParserError as error:
            reason = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            self._failure = reason if isinstance(reason, ApiError) else _not_http(400, reason or error)
        if self.part == "head" or (is_body and self.part == "body" and self._num_left is None):
            self._num_unbounded += len(data)

    def _fail(self) -> None:
        """Refuse an invalid request, now or after the answers to the requests before it."""
        error = self._failure
        assert error is not None
        if self.part == "body" and self.cycle is not self.active:
            self.pipeline.popleft()  # it will not be answered by the application
            self.part = None
        if self.part == "body" and self.cycle.response_started:
            self.drop()  # a second answer would be read as a part of the first
        elif self.part == "body" or not self.is_answering:
            self.refuse(error)
        else:
            self.flow.pause_reading()

    # ---- a client that sends no more ---------------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's own closes
        """Keep the connection for the answers to whole requests; close it if a request is incomplete.

        A client that shut down its side waits for its answer. One that is gone looks the same, until it resets the
        connection because it is sent something: what it is sent is an interim answer, which clients skip. HTTP/1.0 has
        none, so its clients count as gone.
        """
        self._has_eof = self.is_answering and not self.awaits_client and self._may_get_interim_answers
        if self._has_eof and self._probing is None:
            self._probe(_FIRST_PROBE_S)
        return self._has_eof

    @property
    def _may_get_interim_answers(self) -> bool:
        return self.active is not None and self.active.scope["http_version"] == "1.1"

    def _probe(self, pause_s: float) -> None:
        """Send an interim answer if the answer has not begun: a write finds out whether the client has gone."""
        if self.transport.is_closing():
            return
        self._probing = self.loop.call_later(pause_s, self._probe, min(2 * pause_s, _LONGEST_PROBE_S))
        is_waiting = self.active is not None and not self.active.response_started
        if is_waiting and self._may_get_interim_answers and not self.flow.write_paused:
            self.transport.write(_INTERIM_ANSWER)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    # ---- callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.part, self._num_unbounded, self._num_blank = "head", 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.part == "head":  # trailers of a chunked body are not headers of the request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        _check_head(self.parser.get_http_version(), self.headers)
        super().on_headers_complete()
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self.part, self._num_left = "body", int(lengths[0]) if lengths else None
        self._num_unbounded = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_unbounded = 0
        if self._num_left is not None:  # bytes that are fed may belong to the next request, these do not
            self._num_left -= len(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.part, self._num_left, self._num_unbounded = None, None, 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)


def _check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check what the parser does not.

    Raises:
        ApiError: the version, the Host headers or the transfer encoding are not accepted.
    """
    if version not in ("1.0", "1.1"):
        raise _not_http(400, f"HTTP/{version} is not spoken")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _not_http(400, "a request must have one Host header")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        raise _not_http(501, "the only Transfer-Encoding is chunked")


def _not_http(status: int, reason: object) -> ApiError:
    return ApiError(status, f"this is not HTTP that can be read here: {reason}", code="invalid_http")
