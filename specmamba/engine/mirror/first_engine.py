"""The engine of rank 0: it has the requests, and repeats what it does with them on the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from specmamba.config import EngineConfig
from specmamba.core import ANYONE, OutputDelta, Owner
from specmamba.engine.channels import SentRequest
from specmamba.engine.engine import Engine
from specmamba.engine.mirror.rank_children import RankChildren
from specmamba.engine.request import Request
from specmamba.engine.stepping.constraints import Constraints
from specmamba.engine.stepping.step_cycle import GrammarTurns
from specmamba.errors import ConfigError, RankLostError
from specmamba.grammar import CompiledGrammar
from specmamba.parallel.control import RankLinks
from specmamba.parallel.ranks import Ranks
from specmamba.sampling_params import SamplingParams

logger = logging.getLogger("specmamba")


class FirstEngine(Engine):
    """An engine whose calls are repeated on other ranks.

    Whatever a call decides by its arguments and the state of the engine, the other ranks decide in the same way. What
    depends on a clock, or on what only this rank has, is told to them: which requests wait for their grammars, draft
    trees, and which drafts are accepted.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks, links: RankLinks, children: RankChildren | None) -> None:
        """Load this rank's part.

        Args:
            config: of all ranks.
            ranks: joined by all.
            links: to the others.
            children: the others, where this process has started them.

        Raises:
            SpecmambaError: as ``Engine``; also where another rank cannot load its part.
        """
        self._links, self._children = links, children
        try:
            super().__init__(config, ranks)
        except RuntimeError as error:
            if (lost := links.lost_soon()) is None:
                raise
            raise ConfigError(str(lost)) from error
        links.watch_strictly()

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        """Call a function, from another thread, when a rank is lost."""
        self._links.when_lost(callback)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        forced_output_ids: Sequence[int] = (),
        extra_key: str | None = None,
        grammar: CompiledGrammar | None = None,
        owner: Owner = ANYONE,
        predicted_ids: Sequence[int] = (),
    ) -> None:
        """As ``Engine.add_request``. What is refused here is not told to the others."""
        self.check_request(prompt_token_ids, params, forced_output_ids)
        predicted_ids = tuple(predicted_ids or self.encode_prediction(params))
        own = params.model_copy(update={"grammar": None})
        sent = SentRequest(request_id, prompt_token_ids, own, forced_output_ids, extra_key, None, owner, predicted_ids)
        line = sent.line()  # what cannot be told must not be added here either
        super().add_request(
            request_id, prompt_token_ids, params, forced_output_ids, extra_key, grammar, owner, predicted_ids
        )
        try:
            self._links.send_line(line)
        except BaseException:
            super().abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """As ``Engine.abort``; what ends in a step ends on all ranks."""
        if request_id in self.live.by_id:
            with suppress(RankLostError):  # then nothing goes on, and what is left here is still to be freed
                self._links.send({"do": "abort", "request_id": request_id})
        super().abort(request_id)

    def step(self) -> list[OutputDelta]:
        """As ``Engine.step``. Raises RankLostError where another rank is lost."""
        has_grammars = any(request.follower is not None for request in self.live.by_id.values())
        # the others have no grammars, and must exchange the same in the same order
        self._turns.are_told = self.runner.drafts_before = has_grammars
        self._links.send({"do": "step", "has_grammars": has_grammars})
        try:
            return super().step()
        except RuntimeError as error:  # perhaps of an exchange with a rank that has ended
            if (lost := self._links.lost_soon()) is None:
                raise
            raise lost from error

    def preempt(self, request: Request) -> None:
        """As ``Engine.preempt``."""
        self._links.send({"do": "preempt", "request_id": request.request_id})
        super().preempt(request)

    def flush_cache(self) -> int:
        """As ``Engine.flush_cache``."""
        self._links.send({"do": "flush"})
        return super().flush_cache()

    def forget(self, num_added: int) -> None:
        """As ``Engine.forget``."""
        self._links.send({"do": "forget", "num_added": num_added})
        super().forget(num_added)

    def close(self) -> None:
        """As ``Engine.close``; the other ranks end too."""
        super().close()
        self._links.close()
        try:
            leave(self.ranks, self._links)
        finally:
            if self._children is not None:
                self._children.close()

    def make_turns(self) -> GrammarTurns:
        """As ``Engine.make_turns``; the others are told of them."""
        self._turns = ToldTurns(self.constraints, self._links)
        return self._turns


class ToldTurns:
    """Which requests wait for their grammars here; other ranks, which have no grammars, are told."""

    def __init__(self, constraints: Constraints, links: RankLinks) -> None:
        self._constraints, self._links = constraints, links
        self.are_told = False  # in this step: some request has a grammar

    def ready(self, requests: Sequence[Request], is_idle: bool) -> list[Request]:
        """As ``Constraints.ready``."""
        ready = self._constraints.ready(requests, is_idle)
        if self.are_told:
            self._links.send({"ready": [request.request_id for request in ready], **_errors(ready)})
        return ready

    def agree_on_errors(self, batch: Sequence[Request]) -> None:
        """Tell others which requests of a step cannot go on within their grammars."""
        if self.are_told:
            self._links.send(_errors(batch))


def _errors(requests: Sequence[Request]) -> dict[str, Any]:
    return {"errors": {r.request_id: str(r.grammar_error) for r in requests if r.grammar_error is not None}}


def leave(ranks: Ranks, links: RankLinks) -> None:
    """End the exchanges of this rank, so that this process can join others again."""
    if links.lost is None:
        ranks.close()
        return
    try:
        ranks.abort()
    except RuntimeError as error:  # of an exchange with a rank that is gone, which is reported already
        logger.debug("the exchanges do not end well: %s", error)
