"""How long a call may take to begin and to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from specmamba.server.errors import SERVER, ApiError
from specmamba.server.observers import AbortReason
from specmamba.server_config import ServerConfig


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
        self._limits, self._on_late = limits, on_late
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time() - waited_s
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
            self._timer = self._loop.call_at(self._began + limit, self._pass)

    def _pass(self) -> None:
        self.is_past = True
        self._on_late()

    def note_begin(self) -> None:
        """The first delta is there: from now on the time for the whole call counts."""
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
        """What a client is told who has waited in vain."""
        if self._is_for_queue:
            text = f"no turn came within {self._limits.queue_timeout:g} s (--queue-timeout): try again later"
            return ApiError(503, text, kind=SERVER, code="queue_timeout", headers={"Retry-After": "1"})
        text = f"the answer was not complete after {self._limits.request_timeout:g} s (--request-timeout)"
        return ApiError(504, text, kind=SERVER, code="request_timeout")
