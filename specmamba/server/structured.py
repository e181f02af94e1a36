"""Grammars for requests that ask for structured output: compiled off the event loop, refused in the API's words."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from specmamba.core import GrammarSpec
from specmamba.engine.thread import EngineConstants
from specmamba.errors import EngineStoppedError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.server.errors import SERVER, ApiError
from specmamba.server.fields import shortened
from specmamba.server.limits import CALLER
from specmamba.server.streams import until_client_gone
from specmamba.server_config import ServerConfig

FIELDS = {"json_object": "response_format", "json_schema": "response_format", "regex": "regex", "ebnf": "ebnf"}


class Grammars:
    """The compiler of a server, made for the first request that needs one; used on the event loop, closed anywhere."""

    def __init__(self, config: ServerConfig, constants: EngineConstants) -> None:
        self._config, self._constants = config, constants
        self._compiler: GrammarCompiler | None = None
        self._making = asyncio.Lock()
        self._is_closed = False

    async def compile(
        self, spec: GrammarSpec, param: str | None = None, request: Request | None = None
    ) -> CompiledGrammar:
        """What a request hands to the engine beside its ``SamplingParams.grammar``.

        Its caller takes turns with others; when it hangs up, the work for it ends.

        Raises:
            ApiError: 400 that names ``param`` (by default the field that a specification of this kind comes in) when
                it cannot be compiled; 503 when its turn does not come in time; 499 when the client hung up.
            GrammarQueueFullError, EngineStoppedError: too many wait already; the server shuts down.
        """
        param = FIELDS[spec.kind] if param is None else param
        if request is None:
            return await self._compiled(spec, param, None)
        work = asyncio.create_task(self._compiled(spec, param, _caller(request)))
        compiled = await until_client_gone(request.receive, work)
        if compiled is None:
            raise ApiError(499, "the client hung up before its grammar was compiled", code="client_gone")
        return compiled

    async def _compiled(self, spec: GrammarSpec, param: str, caller: str | None) -> CompiledGrammar:
        limit = self._config.queue_timeout
        try:
            async with asyncio.timeout(limit):
                compiler = await self._ready_compiler(param)
                return await asyncio.wrap_future(compiler.compile(spec, caller))
        except TimeoutError:
            message = f"the grammar's turn did not come within {limit:g} s (--queue-timeout): try again later"
            headers = {"Retry-After": "1"}
            raise ApiError(503, message, kind=SERVER, code="queue_timeout", headers=headers) from None
        except RequestError as error:
            code = "grammar_too_complex" if isinstance(error.__cause__, TimeoutError) else "invalid_grammar"
            raise ApiError(400, f"{param}: {shortened(str(error))}", param=param, code=code) from None

    def close(self) -> None:
        """End what still compiles; who waits for it gets EngineStoppedError. Harmless when called again."""
        self._is_closed = True
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.close()

    async def _ready_compiler(self, param: str) -> GrammarCompiler:
        async with self._making:
            if self._compiler is None:
                self._refuse_when_closed()
                self._compiler = await asyncio.to_thread(self._make_compiler, param)
            if self._is_closed:  # while it was being made
                self.close()
            self._refuse_when_closed()
            return self._compiler

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise EngineStoppedError("the server is shutting down and takes no more requests")

    def _make_compiler(self, param: str) -> GrammarCompiler:
        try:
            return GrammarCompiler(
                self._constants.tokenizer,
                self._constants.vocab_size,
                self._constants.eos_token_ids,
                self._config.grammar_timeout,
                self._config.grammar_cache_mb << 20,
            )
        except ImportError:
            message = f"{param}: structured output needs xgrammar on this server: pip install 'specmamba[grammar]'"
            raise ApiError(400, message, param=param, code="grammar_unavailable") from None


def _caller(request: Request) -> str:
    """Who asks, as calls are counted: by key, or by address where there are none."""
    address = request.client.host if request.client else "unknown"
    return str(request.scope.get(CALLER, f"address {address}"))
