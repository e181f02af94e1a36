"""Rendering of chat templates for the calls of a server: in turns, with limits, away from the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Request

from specmamba.engine.thread import EngineConstants
from specmamba.errors import RequestError, TemplateLimitError
from specmamba.server.api.streaming import until_client_gone
from specmamba.server.http.callers import caller_of
from specmamba.server.http.error_answers import SERVER, ApiError
from specmamba.server.http.fields import shortened
from specmamba.server_config import ServerConfig
from specmamba.templates.renderer import TemplateRenderer
from specmamba.templates.rendering import RenderedChat

# Characters that a template may write besides those it was given: the first number, or what fits into the context, with
# this many for each token where the tokenizer knows no bound.
_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN = 1 << 20, 8


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
            fitting = self._tokenizer.most_characters(length) or _CHARACTERS_PER_TOKEN * length
            self._renderer = TemplateRenderer(max(_LEAST_CHARACTERS, fitting))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        request: Request,
    ) -> RenderedChat:
        """Render a conversation in the renderer's process. Clients are served in turns.

        Args:
            messages: as chat templates read them.
            tools: passed to the template.
            variables: further variables of the template.
            request: its connection; rendering ends when the client disconnects.

        Raises:
            ApiError: 400, a limit is exceeded; 503, its turn did not come in time; 499, the client disconnected.
            RequestError: the model has no template, or it refuses the messages, tools or variables.
            EngineStoppedError: the server shuts down.
        """
        make = partial(self._tokenizer.conversation, messages, tools, variables, self._config.allow_special_tokens)
        if self._renderer is None:
            raise RequestError("this model has no chat template", "messages")
        work = asyncio.create_task(self._rendered(partial(self._renderer.render, make), caller_of(request.scope).name))
        rendered = await until_client_gone(request.receive, work)
        if rendered is None:
            raise ApiError(499, "the client hung up before its messages were rendered", code="client_gone")
        return rendered

    async def _rendered(self, start: Callable[[], Future[RenderedChat]], caller: str) -> RenderedChat:
        limit = self._config.queue_timeout
        try:
            async with asyncio.timeout(limit) as waiting, self._turns.of(caller):
                waiting.reschedule(None)  # the rendering has its own limit
                return await asyncio.wrap_future(start())
        except TimeoutError:
            message = f"the turn of these messages did not come within {limit:g} s (--queue-timeout): try again later"
            headers = {"Retry-After": "1"}
            raise ApiError(503, message, kind=SERVER, code="queue_timeout", headers=headers) from None
        except TemplateLimitError as error:
            raise ApiError(
                400, f"messages: {shortened(str(error))}", param="messages", code="template_too_complex"
            ) from None

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
