"""Rendering of chat templates for the calls of a server: in turns, with limits, away from the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request

from specmamba.engine.thread import EngineConstants
from specmamba.errors import RequestError, TemplateLimitError
from specmamba.models.text.special_text import strings
from specmamba.server.api.streaming import unless_client_gone
from specmamba.server.http.callers import caller_of
from specmamba.server.http.error_answers import ApiError, queue_timeout
from specmamba.server.http.fields import longest_text, shortened
from specmamba.server_config import ServerConfig
from specmamba.templates.renderer import TemplateRenderer
from specmamba.templates.rendering import Conversation, Effort, RenderedChat

# Characters that clients may send for each token of the context where the tokenizer knows no bound.
_SENT_PER_TOKEN = 32


class Templates:
    """The renderer of a server's chat template; its process starts in the background.

    ``render`` is called on the event loop, ``close`` on any thread.
    """

    def __init__(self, config: ServerConfig, constants: EngineConstants) -> None:
        self._config, self._tokenizer = config, constants.tokenizer
        self._turns = Turns()
        self._renderer: TemplateRenderer | None = None
        if self._tokenizer.has_chat_template:
            length = constants.context_length
            fitting = self._tokenizer.most_characters(length)
            # Characters that a template may write besides those it was given.
            self._renderer = TemplateRenderer(longest_text(length, fitting))
            # Templates may leave text out, such as earlier reasoning: so it is no less than /tokenize takes.
            self._most_sent = max(longest_text(length), fitting or _SENT_PER_TOKEN * length)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        request: Request,
        check_length: Callable[[int], None] | None = None,
        effort: Effort | None = None,
    ) -> RenderedChat:
        """Render a conversation in the renderer's process. Clients are served in turns.

        Args:
            messages: as chat templates read them.
            tools: passed to the template.
            variables: further variables of the template.
            request: its connection; rendering ends when the client disconnects.
            check_length: called on another thread with the characters of all strings above, before any other work on
                them; it raises ApiError where they are too many. By default, for what cannot fit into the context.
            effort: the ``reasoning_effort`` of the request, which becomes a variable.

        Raises:
            ApiError: 400, a limit is exceeded; 503, its turn did not come in time; 499, the client disconnected.
            RequestError: the model has no template, or it refuses the messages, tools or variables.
            EngineStoppedError: the server shuts down.
        """

        def make() -> Conversation:
            (check_length or self._check_length)(sum(map(len, strings([messages, tools, variables]))))
            made = self._tokenizer.conversation(messages, tools, variables, self._config.allow_special_tokens)
            return made if effort is None else replace(made, effort=effort)

        if self._renderer is None:
            raise RequestError("this model has no chat template", "messages")
        work = self._rendered(partial(self._renderer.render, make), caller_of(request.scope).name)
        return await unless_client_gone(request, work, "its messages were rendered")

    async def _rendered(self, start: Callable[[], Future[RenderedChat]], caller: str) -> RenderedChat:
        limit = self._config.queue_timeout
        try:
            async with asyncio.timeout(limit) as waiting, self._turns.of(caller):
                waiting.reschedule(None)  # the rendering has its own limit
                return await asyncio.wrap_future(start())
        except TimeoutError:
            raise queue_timeout("no turn for these messages", limit) from None
        except TemplateLimitError as error:
            raise ApiError(
                400, f"messages: {shortened(str(error))}", param="messages", code="template_too_complex"
            ) from None

    def _check_length(self, length: int) -> None:
        if length > self._most_sent:
            message = (
                f"the messages and tools have {length} characters, but at most {self._most_sent} are taken: "
                "shorten them, or serve with a larger --context-length / --max-total-tokens"
            )
            raise ApiError(400, message, param="messages", code="context_length_exceeded")

    def close(self) -> None:
        """Stop the renderer; requests that wait for it get EngineStoppedError."""
        if self._renderer is not None:
            self._renderer.close()


class Turns:
    """One turn at a time: callers alternate, and the requests of each keep their order. Used on one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        # The caller whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, caller: str) -> AsyncIterator[None]:
        """Wait for a turn of a caller, and keep it during the ``with`` block."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(caller, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it came at the same time
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            caller, turns = self._waiting.popitem(last=False)
            while turns:
                turn = turns.popleft()
                if turn.cancelled():
                    continue
                if turns:
                    self._waiting[caller] = turns  # behind all others
                turn.set_result(None)
                return
        self._is_taken = False
