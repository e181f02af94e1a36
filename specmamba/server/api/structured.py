"""Structured output: the fields that ask for it, and the compiler that makes grammars of them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator
from starlette.requests import Request

from specmamba.engine.thread import EngineConstants
from specmamba.errors import EngineStoppedError, RequestError
from specmamba.grammar import CompiledGrammar, GrammarCompiler
from specmamba.sampling_params import GrammarSpec
from specmamba.server.api.grammar_fields import (
    Choice,
    GrammarText,
    JsonSchema,
    StructuredOutputs,
    of_choice,
    of_schema,
    of_text,
    wrong,
)
from specmamba.server.api.streaming import unless_client_gone
from specmamba.server.http.callers import caller_of
from specmamba.server.http.error_answers import ApiError, queue_timeout
from specmamba.server.http.fields import EncodableText, StrictModel, shortened
from specmamba.server_config import ServerConfig

# The field that a grammar comes in, by its kind.
FIELDS = {"json_object": "response_format", "json_schema": "response_format", "regex": "regex", "ebnf": "ebnf"}


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON schema as OpenAI's clients send it. The answer keeps to it whether ``strict`` is set or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="changes nothing")]
    description: Annotated[EncodableText | None, Field(description="changes nothing")] = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Annotated[bool | None, Field(description="changes nothing")] = None


class JsonSchemaFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _kind_of_format(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"({kind})" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("(text)")]
    | Annotated[JsonObjectFormat, Tag("(json_object)")]
    | Annotated[JsonSchemaFormat, Tag("(json_schema)")],
    Discriminator(
        _kind_of_format,
        custom_error_type="response_format_type",
        custom_error_message='must be an object whose "type" is "text", "json_object" or "json_schema"',
    ),
]


class StructuredRequest(StrictModel):
    """The fields that restrict the text of every answer; a request may use one of them."""

    response_format: Annotated[ResponseFormat | None, Field(description="the form of the whole answer")] = None
    json_schema: Annotated[JsonSchema | None, Field(description="extension: JSON that this schema allows")] = None
    regex: Annotated[GrammarText | None, Field(description="extension: a text that this expression matches")] = None
    ebnf: Annotated[GrammarText | None, Field(description="extension: a text that these rules (GBNF) derive")] = None
    guided_json: Annotated[JsonSchema | None, Field(description="extension: json_schema, as vLLM calls it")] = None
    guided_regex: Annotated[GrammarText | None, Field(description="extension: regex, as vLLM calls it")] = None
    guided_choice: Annotated[Choice | None, Field(description="extension: one of these texts, as vLLM has it")] = None
    guided_grammar: Annotated[GrammarText | None, Field(description="extension: ebnf, as vLLM calls it")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="extension: one of these fields, as vLLM has it")
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="extension: go on after the model's own end-of-text token")
    ] = None

    _grammar: tuple[str, GrammarSpec] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        asked = {name: spec for name, spec in self._specs().items() if spec is not None}
        if len(asked) > 1:
            message = "send one of {fields}"
            raise wrong(list(asked)[-1], "two_grammars", message, fields=" and ".join(asked))
        if asked and self.ignore_eos:
            message = "an answer ends where its form is whole: ignore_eos does not go together with {other}"
            raise wrong("ignore_eos", "ignore_eos", message, other=next(iter(asked)))
        object.__setattr__(self, "_grammar", next(iter(asked.items()), None))
        return self

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """The grammar that the request asks for, or None."""
        return None if self._grammar is None else self._grammar[1]

    @property
    def grammar_field(self) -> str | None:
        """The name of the field that asks for a grammar, or None."""
        return None if self._grammar is None else self._grammar[0]

    def _specs(self) -> dict[str, GrammarSpec | None]:
        outputs = {} if self.structured_outputs is None else self.structured_outputs.specs()
        return {
            "response_format": _of_response_format(self.response_format),
            "json_schema": of_schema(self.json_schema, "json_schema"),
            "regex": of_text("regex", self.regex),
            "ebnf": of_text("ebnf", self.ebnf),
            "guided_json": of_schema(self.guided_json, "guided_json"),
            "guided_regex": of_text("regex", self.guided_regex),
            "guided_choice": of_choice(self.guided_choice, "guided_choice"),
            "guided_grammar": of_text("ebnf", self.guided_grammar),
            **{f"structured_outputs.{name}": spec for name, spec in outputs.items()},
        }


def _of_response_format(asked: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> GrammarSpec | None:
    match asked:
        case JsonObjectFormat():
            return GrammarSpec(kind="json_object")
        case JsonSchemaFormat():
            return of_schema(asked.json_schema.schema_, "response_format")
    return None


class Grammars:
    """The grammar compiler of a server, created for the first request that needs it.

    ``compile`` is called on the event loop, ``refuse`` and ``close`` on any thread.
    """

    def __init__(self, config: ServerConfig, constants: EngineConstants) -> None:
        self._config, self._constants = config, constants
        self._compiler: GrammarCompiler | None = None
        self._making = asyncio.Lock()
        self._is_closed = False

    async def compile(
        self, spec: GrammarSpec, param: str | None = None, request: Request | None = None
    ) -> CompiledGrammar:
        """Compile a grammar in the compiler's process. Clients are served in turns.

        Args:
            spec: the grammar, as in ``SamplingParams.grammar``.
            param: the field that asks for it, named in errors; by default the field for this kind of grammar.
            request: its connection; compiling ends when the client disconnects.

        Raises:
            ApiError: 400, it cannot be compiled; 503, its turn did not come in time; 499, the client disconnected.
            GrammarQueueFullError: too many grammars wait already.
            EngineStoppedError: the server shuts down.
        """
        param = FIELDS[spec.kind] if param is None else param
        if request is None:
            return await self._compiled(spec, param, None)
        work = self._compiled(spec, param, caller_of(request.scope).name)
        return await unless_client_gone(request, work, "its grammar was compiled")

    async def _compiled(self, spec: GrammarSpec, param: str, caller: str | None) -> CompiledGrammar:
        limit = self._config.queue_timeout
        try:
            async with asyncio.timeout(limit):
                compiler = await self._ready_compiler(param)
                return await asyncio.wrap_future(compiler.compile(spec, caller))
        except TimeoutError:
            raise queue_timeout("no turn for the grammar", limit) from None
        except RequestError as error:
            code = "grammar_too_complex" if isinstance(error.__cause__, TimeoutError) else "invalid_grammar"
            raise ApiError(400, f"{param}: {shortened(str(error))}", param=param, code=code) from None

    def refuse(self, spec: GrammarSpec) -> None:
        """Refuse a grammar for some time, because it was too slow while it was used."""
        compiler = self._compiler
        if compiler is not None:
            compiler.refuse(spec)

    def close(self) -> None:
        """Stop the compiler; requests that wait for it get EngineStoppedError. Does nothing when called again."""
        self._is_closed = True
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.close()

    async def _ready_compiler(self, param: str) -> GrammarCompiler:
        async with self._making:
            if self._compiler is None:
                self._refuse_when_closed()
                self._compiler = await asyncio.to_thread(self._make_compiler, param)
            if self._is_closed:  # by another thread, while the compiler was being made
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
