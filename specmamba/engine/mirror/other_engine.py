"""The engine of a rank other than 0: it does what rank 0 tells it, and its texts are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmamba.config import EngineConfig
from specmamba.engine.channels import SentRequest
from specmamba.engine.engine import Engine
from specmamba.engine.request import Request
from specmamba.engine.stepping.constraints import Constraints
from specmamba.engine.stepping.live_requests import LiveRequests
from specmamba.engine.stepping.step_cycle import GrammarTurns
from specmamba.errors import GrammarError
from specmamba.parallel.control import FirstRankLink
from specmamba.parallel.ranks import Ranks


class OtherEngine(Engine):
    """An engine that repeats the calls of rank 0."""

    def __init__(self, config: EngineConfig, ranks: Ranks, link: FirstRankLink) -> None:
        """Load this rank's part; ``link``: to rank 0. Raises as ``Engine``."""
        self._link = link
        super().__init__(config, ranks)

    def run(self) -> None:
        """Do what rank 0 says until it ends."""
        while (message := self._link.receive())["do"] != "close":
            self._do(message)

    def _do(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "step":
                self._turns.are_told = self.runner.drafts_before = message["has_grammars"]
                self.step()
            case "add":
                SentRequest.of(message).add_to(self)
            case "abort":
                self.abort(message["request_id"])
            case "preempt":
                self.preempt(self.live.by_id[message["request_id"]])
            case "flush":
                self.flush_cache()
            case "forget":
                self.forget(message["num_added"])
            case other:
                raise ValueError(f"rank 0 asks for {other!r}, which no rank does")

    def make_turns(self) -> GrammarTurns:
        """As ``Engine.make_turns``: rank 0 says it."""
        self._turns = HeardTurns(self.constraints, self._link, self.live)
        return self._turns


class HeardTurns:
    """Which requests wait for their grammars, as rank 0 says."""

    def __init__(self, constraints: Constraints, link: FirstRankLink, live: LiveRequests) -> None:
        self._constraints, self._link, self._live = constraints, link, live
        self.are_told = False  # in this step: some request has a grammar there

    def ready(self, requests: Sequence[Request], is_idle: bool) -> list[Request]:
        """As ``Constraints.ready``."""
        if not self.are_told:
            return self._constraints.ready(requests, is_idle)
        message = self._link.receive()
        ready = [self._live.by_id[request_id] for request_id in message["ready"]]
        self._note_errors(message)
        return ready

    def agree_on_errors(self, batch: Sequence[Request]) -> None:
        """Note which requests of a step cannot go on within their grammars."""
        if self.are_told:
            self._note_errors(self._link.receive())

    def _note_errors(self, message: Mapping[str, Any]) -> None:
        for request_id, text in message["errors"].items():
            self._live.by_id[request_id].told_error = GrammarError(text)
