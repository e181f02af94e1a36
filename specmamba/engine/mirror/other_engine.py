"""The engine of a rank other than 0: it does what rank 0 tells it, and its texts are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmamba.config import EngineConfig
from specmamba.engine.channels import SentRequest
from specmamba.engine.engine import Engine
from specmamba.engine.request import Request
from specmamba.errors import GrammarError
from specmamba.parallel.control import FirstRankLink
from specmamba.parallel.ranks import Ranks


class OtherEngine(Engine):
    """An engine that repeats the calls of rank 0."""

    def __init__(self, config: EngineConfig, ranks: Ranks, link: FirstRankLink) -> None:
        """Load this rank's part; ``link``: to rank 0. Raises as ``Engine``."""
        self._link, self._is_told = link, False
        super().__init__(config, ranks)

    def run(self) -> None:
        """Do what rank 0 says until it ends."""
        while (message := self._link.receive())["do"] != "close":
            self._do(message)

    def _do(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "step":
                self._is_told = self.runner.drafts_before = message["has_grammars"]
                self.step()
            case "add":
                SentRequest.of(message).add_to(self)
            case "abort":
                self.abort(message["request_id"])
            case "preempt":
                self.preempt(self._requests[message["request_id"]])
            case "flush":
                self.flush_cache()
            case "forget":
                self.forget(message["num_added"])
            case other:
                raise ValueError(f"rank 0 asks for {other!r}, which no rank does")

    def _ready(self, is_idle: bool) -> list[Request]:
        if not self._is_told:
            return super()._ready(is_idle)
        message = self._link.receive()
        ready = [self._requests[request_id] for request_id in message["ready"]]
        self._note_errors(message)
        return ready

    def _told_errors(self, batch: Sequence[Request]) -> None:
        if self._is_told:
            self._note_errors(self._link.receive())

    def _note_errors(self, message: Mapping[str, Any]) -> None:
        for request_id, text in message["errors"].items():
            self._requests[request_id].told_error = GrammarError(text)
