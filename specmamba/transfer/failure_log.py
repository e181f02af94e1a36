"""What a decode server logs of prefill servers that do not give it their prompts."""

from __future__ import annotations

import logging
import threading
import time

from specmamba.cache.tiers.tier_stats import TierMiss
from specmamba.transfer.wanted import Source

logger = logging.getLogger("specmamba")

TELL_AGAIN_S = 60.0  # requests name the prefill server, which one that does not exist too: they must not fill the log
# The faults of a setup; others come and go with single requests, and are counted alone.
_TEXTS: dict[TierMiss, str] = {
    "unreachable": "is not reached",
    "refused": "has another key (--disaggregation-key)",
    "fingerprint": "has another model, or other settings",
    "format": "has another version, or another --disaggregation-transfer-backend",
}


MOST_TOLD = 16  # faults of servers within that time


class FailureLog:
    """Logs each kind of fault of a server once, and again after a time. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the field below
        self._told: dict[tuple[TierMiss, str, int], float] = {}  # when, by fault and server

    def tell(self, source: Source, reason: TierMiss) -> None:
        """Log why a prompt has not come, where that says something of the setup."""
        text, now = _TEXTS.get(reason), time.monotonic()
        if text is None:
            return
        with self._lock:
            self._told = {fault: when for fault, when in self._told.items() if now < when + TELL_AGAIN_S}
            fault = reason, source.host, source.port
            if fault in self._told or len(self._told) >= MOST_TOLD:
                return
            self._told[fault] = now
        logger.warning("the prefill server at %s:%d %s: its prompts are computed here", source.host, source.port, text)
