"""Reading HTTP with bounds: how long a head may be, what is no HTTP, and when the next request is looked at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specmamba.server.http.error_answers import ApiError

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_MAX_HEAD_BYTES = 32 << 10  # request line and headers; also of what frames a body in chunks


_SLICE_BYTES = 1 << 10  # of a body in chunks, whose end only the parser knows


_BLANK_LINE = re.compile(rb"(?:\A|\n)\r?\n")


# The parser takes such a request for the last thing in HTTP and drops its body. No upgrade is granted here.
_UPGRADE = re.compile(rb"^upgrade:", re.IGNORECASE | re.MULTILINE)


class BoundedHttp(HttpToolsProtocol):
    """Reads a request, and the next one only when it has been answered.

    ``part`` is where the newest request stands: "head" or "body" while more of it has to come, else None.
    """

    part: str | None = None
    active: RequestResponseCycle | None = None  # being answered, or answered last
    _num_left: int | None = None  # bytes of the body that the parser has not seen; None: the body comes in chunks
    _num_unbounded = 0  # bytes that the parser has seen since it gave something away
    _unread = b""
    _failure: ApiError | None = None  # for when the answers before it are out

    @property
    def is_answering(self) -> bool:
        return self.active is not None and not self.active.response_complete

    @property
    def awaits_client(self) -> bool:
        """Nothing goes on before the client has sent more."""
        return self.cycle is self.active if self.part == "body" else not self.is_answering

    @property
    def has_half_a_request(self) -> bool:
        """And no answer to it has begun."""
        if self.part == "body":
            return self.cycle is self.active and not self.cycle.response_started
        return self.has_begun and not self.is_answering

    @property
    def has_begun(self) -> bool:
        """A part of a request is there that has not come whole."""
        return self.part is not None or bool(self._unread)

    def refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close."""
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
            if self.has_begun:
                self._unset_keepalive_if_required()  # the rest must come, in its own time

    def _read_on(self) -> None:
        """Parse what is there, up to the end of a request that is not answered yet."""
        data, self._unread = self._unread, b""
        place = 0
        while self._failure is None and self.awaits_client and (size := self._num_readable(data, place)):
            self._parse(data[place : place + size])
            place += size
        self._unread = data[place:]
        if self._failure is None and self.awaits_client and len(self._unread) + self._num_unbounded > _MAX_HEAD_BYTES:
            self._failure = _not_http(431, f"more than {_MAX_HEAD_BYTES} bytes of headers")
        if self._failure is not None:
            self._unread = b""
            self._fail()
        elif not self.awaits_client and self._unread:
            self.flow.pause_reading()

    def _num_readable(self, data: bytes, place: int) -> int:
        """Of a head whole lines and no more than the head, of a body no more than there is."""
        if self.part == "body":
            return min(len(data) - place, _SLICE_BYTES if self._num_left is None else self._num_left)
        first = data[place : place + 1]
        if self.part is None and not (first.isupper() or first in b"\r\n"):
            return len(data) - place  # this will never be a method: no need to wait for the line
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
        """Refuse what cannot be read, now or after the answers to what came before it."""
        error = self._failure
        assert error is not None
        if self.part == "body" and self.cycle is not self.active:
            self.pipeline.popleft()  # its turn will not come
            self.part = None
        if self.part == "body" and self.cycle.response_started:
            self.drop()  # another answer would be taken for a part of this one
        elif self.part == "body" or not self.is_answering:
            self.refuse(error)
        else:
            self.flow.pause_reading()

    # ---- what the parser finds ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.part, self._num_unbounded = "head", 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.part == "head":  # what follows a body in chunks is no header of the request
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
        if self._num_left is not None:  # not by what was fed: the end of a body in chunks may have a request behind it
            self._num_left -= len(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.part, self._num_left, self._num_unbounded = None, None, 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)


def _check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises ApiError for what the parser lets through."""
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
