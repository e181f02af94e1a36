"""Client connections: their number is limited, and the time that a client may take to send and to read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import Scope

from specmamba.server.http.connection_table import Activity, ConnectionTable
from specmamba.server.http.error_answers import SERVER, ApiError
from specmamba.server.http.reading import BoundedHttp
from specmamba.server.observe.call_record import CallRecord
from specmamba.server_config import ServerConfig

# Longer than connection pools of common clients: a connection must not be closed just when a client uses it again.
_KEEP_ALIVE_S = 30
# A refused connection is read for this time: closing it with unread bytes would reset it and lose the answer.
_LINGER_S = 1.0
_MAX_LINGERING = 64
# When the server ends, clients have this time to read what has been written.
FLUSH_TIMEOUT_S = 5.0
# uvicorn logs a line for every invalid request, with which any client could fill the log.
_parser_logger = logging.getLogger("specmamba.connections")
_parser_logger.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the number of connections, and on the time of each."""

    max_connections: int
    max_per_address: int
    read_timeout: float  # seconds from the first byte of a request to its last
    write_timeout: float  # seconds in which a client reads nothing although data is ready

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        share = config.max_connections_per_address
        if share is None:
            share = max(1, config.max_connections * 3 // 4)
        return cls(config.max_connections, share, config.read_timeout, config.write_timeout)


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, for connections with limits."""

    def __init__(self, app: FastAPI, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(
            app,
            http=LimitedConnection,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            **options,
        )
        self.limits = limits
        self.lingering: set[LimitedConnection] = set()  # refused, not closed yet
        self.table: ConnectionTable[LimitedConnection] = ConnectionTable(
            limits.max_connections, limits.max_per_address, LimitedConnection.give_way
        )


class _Timer:
    """Calls a function once, ``seconds`` after it was started, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> None:
        self._loop, self._seconds, self._callback = loop, seconds, callback
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Does nothing when the timer runs already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()


class LimitedConnection(BoundedHttp):
    """One client connection.

    A client that sends too slowly gets status 408, one that does not read is disconnected. A connection above a limit
    takes the place of an idle one, and gets 503 if there is none. The transport pauses the application as soon as the
    kernel does not accept a byte, so that an answer waits in the application, where deltas are merged, and at most one
    piece of it is buffered here.
    """

    config: ConnectionConfig

    def __init__(self, config: ConnectionConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.logger = _parser_logger
        limits = config.limits
        self._reading = _Timer(self.loop, limits.read_timeout, self._on_read_timeout)
        self._writing = _Timer(self.loop, limits.write_timeout, self._on_write_timeout)
        self._lingering = _Timer(self.loop, _LINGER_S, self.drop)
        self._flushing = _Timer(self.loop, FLUSH_TIMEOUT_S, self.drop)
        self._num_unwritten = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's own
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        if self.config.table.add(self, self.client[0] if self.client else None):
            self._reading.start()
        else:
            self._refuse_or_drop(_too_many_connections())

    def give_way(self) -> None:
        """Close, for a new connection. A client that has sent nothing sees what it sees when it is idle too long."""
        if self.has_half_a_request:
            self._refuse_or_drop(_too_many_connections())
        else:
            self.drop()

    def _refuse_or_drop(self, error: ApiError) -> None:
        if len(self.config.lingering) < _MAX_LINGERING:
            self.refuse(error)
        else:
            self.drop()

    def _note_activity(self) -> None:
        if self.flow.write_paused or (self.is_answering and not self.awaits_client):
            activity = Activity.BUSY
        else:
            activity = Activity.HALF if self.has_begun else Activity.SILENT
        self.config.table.note(self, activity)

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.table.remove(self)
        for timer in (self._reading, self._writing, self._lingering, self._flushing):
            timer.stop()
        self.config.lingering.discard(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self in self.config.lingering:
            self.drop()
        elif self.has_half_a_request:
            self.refuse(_shutting_down())
        else:
            self._flushing.start()
            super().shutdown()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self in self.config.lingering:
            return
        super().data_received(data)
        if self not in self.config.lingering:
            self._time_reading(self.awaits_client)
            self._note_activity()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Before the first byte of the next request uvicorn's timer for idle connections applies.
        if self not in self.config.lingering:
            self._time_reading(self.has_begun and self.awaits_client)
            self._note_activity()

    def _time_reading(self, is_waiting: bool) -> None:
        if is_waiting:
            self._reading.start()
        else:
            self._reading.stop()

    def _on_read_timeout(self) -> None:
        if self.has_half_a_request:
            self.refuse(_too_slow(self.config.limits.read_timeout))
        else:
            self.drop()  # no request waits for an answer

    def refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close when the client does, or after ``_LINGER_S``."""
        self._reading.stop()
        self._unset_keepalive_if_required()
        if self.part == "body":  # the application waits for the rest of the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.config.table.remove(self)
        self.config.lingering.add(self)
        self._lingering.start()
        self.flow.resume_reading()
        self.transport.write(_raw_answer(error))
        with suppress(OSError):  # the client has gone
            self.transport.write_eof()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unwritten = self.transport.get_write_buffer_size()
        self._writing.start()
        self._note_activity()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.stop()
        self._note_activity()

    def _on_write_timeout(self) -> None:
        num_unwritten = self.transport.get_write_buffer_size()
        if num_unwritten < self._num_unwritten:
            self._num_unwritten = num_unwritten
            self._writing.start()
            return
        if self.active is not None:
            record = CallRecord.of(cast("Scope", self.active.scope))
            record.abort_reason = record.abort_reason or "write_timeout"
        self.drop()

    def drop(self) -> None:
        self.transport.abort()  # close() would wait until the client has read everything


def _raw_answer(error: ApiError) -> bytes:
    body = error.answer().model_dump_json().encode()
    phrase = HTTPStatus(error.status).phrase
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **(error.headers or {}),
    }
    lines = [f"HTTP/1.1 {error.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _too_many_connections() -> ApiError:
    return ApiError(
        503,
        "too many connections are open (--max-connections, --max-connections-per-address): try again later",
        kind=SERVER,
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )


def _shutting_down() -> ApiError:
    text = "the server shuts down: the request had not been received whole"
    return ApiError(503, text, kind=SERVER, code="engine_stopped")


def _too_slow(read_timeout: float) -> ApiError:
    return ApiError(408, f"the request was not complete after {read_timeout:g} s (--read-timeout)", code="read_timeout")
