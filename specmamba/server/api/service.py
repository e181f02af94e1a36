"""What the routes share: the engine, the names of the model, and the steps that every generating call takes."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from specmamba.core import OutputDelta
from specmamba.engine.thread import EngineThread
from specmamba.errors import RequestError
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import GrammarSpec, ReasoningStart
from specmamba.server.api.answers import AnswerFormat, Choices, check_number, send_answer
from specmamba.server.api.listed_logprobs import check_listed
from specmamba.server.api.requests import GenerationRequest
from specmamba.server.api.streaming import INLINE_SIZE, Call, ChoiceRequest, off_loop
from specmamba.server.api.structured import Grammars
from specmamba.server.api.templates import Templates
from specmamba.server.http.callers import caller_of
from specmamba.server.http.error_answers import ApiError, api_error_of_validation
from specmamba.server.http.fields import shortened
from specmamba.server.http.handoff_fields import handoffs_of
from specmamba.server.http.limits import CallLimits, count_choices
from specmamba.server.observe.call_record import AbortReason, CallRecord, CallRecorder, ObserverFactory
from specmamba.server.observe.metrics import ServerMetrics
from specmamba.server.tools.reasoning import ReasoningFormat
from specmamba.server_config import ServerConfig
from specmamba.templates.rendering import RenderedChat


class Service:
    """The state of one application: created by ``create_app``, used on the event loop."""

    def __init__(self, config: ServerConfig, engine: EngineThread) -> None:
        """``engine`` must have been started: its constants are read here."""
        self.config = config
        self.engine = engine
        self.tokenizer = engine.constants.tokenizer
        self.context_length = engine.constants.context_length
        self.metrics = ServerMetrics(config)
        self.grammars = Grammars(config, engine.constants)
        self.templates = Templates(config, engine.constants)
        self.reasoning = ReasoningFormat.of(config.reasoning_parser, self.tokenizer)
        # They run on the engine thread; waiting requests get EngineStoppedError.
        engine.on_stop(self.grammars.close)
        engine.on_stop(self.templates.close)
        self.limits = CallLimits.of(config)
        self.observers: list[ObserverFactory] = [self.metrics.observe, CallRecorder]
        self.model_names = (config.model_name,)  # answers carry the first one
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names; None is allowed.

        Raises:
            ApiError: 404; this server does not serve the model.
        """
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"there is no model {shortened(name)!r} here; served: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, computed without blocking the event loop.

        Raises:
            ApiError: 400, before the work is done; the prompt cannot fit into the context. A prompt just below this
                bound may still have too many tokens; the engine refuses it.
            RequestError: the text is not valid Unicode.
        """
        check_fits(self.tokenizer, text, self.context_length)
        return await off_loop(len(text), self.tokenizer.encode, text, add_special_tokens, encodes=True)

    async def _encode_prediction(self, body: GenerationRequest) -> Sequence[int]:
        """Token ids of the text that the answer is expected to repeat; none without one. Raises as ``encode``."""
        if body.prediction is None:
            return ()
        text = body.prediction.text
        check_fits(self.tokenizer, text, self.context_length, "prediction")
        try:
            return await off_loop(len(text), self.tokenizer.encode, text, False, encodes=True)
        except RequestError as error:
            raise RequestError(str(error), "prediction") from None

    async def encode_chat(self, rendered: RenderedChat) -> list[int]:
        """Token ids of a rendered conversation, as ``encode``."""
        check_fits(self.tokenizer, rendered.text, self.context_length)
        return await off_loop(size_of(rendered), self.tokenizer.encode_chat, rendered, encodes=True)

    def hidden_ids(self, body: GenerationRequest) -> frozenset[int]:
        """The tokens that end an answer and have no text in it."""
        own = () if body.ignore_eos else self.engine.constants.eos_token_ids
        return frozenset((*own, *(body.stop_token_ids or ())))

    async def choices(
        self,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        per_prompt: int | None = None,
        grammar: GrammarSpec | None = None,
        reasoning: ReasoningStart = "none",
        request: Request | None = None,
    ) -> Choices:
        """Build the engine requests of a call, and compile its grammar.

        Args:
            body: the request as it was sent.
            prompts: token ids of each prompt.
            max_tokens: new tokens of each choice at the most.
            per_prompt: choices to generate for each prompt; by default ``body.n``, or 1.
            grammar: used in place of the grammar that ``body`` asks for.
            reasoning: whether an answer begins with it; its form is free under any grammar.
            request: its connection; compiling ends when the client disconnects.

        Raises:
            ApiError: a field has a value that this server does not support; the error names the field.
        """
        is_answered_elsewhere = self.config.disaggregation_mode == "prefill" and body.bootstrap_room is not None
        max_tokens = 0 if is_answered_elsewhere else max_tokens
        kept = body.n or 1
        per_prompt = kept if per_prompt is None else per_prompt
        check_number(per_prompt, "n" if per_prompt == kept else "best_of", len(prompts), self.config)
        handoffs = handoffs_of(body, self.config, len(prompts), per_prompt)
        check_listed(body, prompts, max_tokens, per_prompt, self.context_length)
        if request is not None:
            count_choices(request.scope, per_prompt * len(prompts), "n" if len(prompts) == 1 else "prompt")
        if body.stop:
            self.tokenizer.require_text("a stop string", "stop")
        self.check_token_ids("logit_bias", body.logit_bias or ())
        self.check_token_ids("stop_token_ids", body.stop_token_ids or ())
        param, spec = ("tools", grammar) if grammar else (body.grammar_field, body.grammar_spec)
        if is_answered_elsewhere:
            spec = None  # of the text that a decode server writes
        if spec is not None:
            self.tokenizer.require_text("structured output", param or "grammar")
            spec = spec.model_copy(update={"reasoning": reasoning})
        try:
            params = body.sampling_params(max_tokens, spec)
        except ValidationError as error:
            raise api_error_of_validation(error.errors()) from None
        compiled = None if spec is None else await self.grammars.compile(spec, param, request)
        predicted = await self._encode_prediction(body)
        return Choices.of(prompts, params, compiled, predicted, handoffs, per_prompt=per_prompt, kept=kept)

    def check_token_ids(self, param: str, ids: Collection[int]) -> None:
        """Check token ids against the vocabulary.

        Raises:
            ApiError: 400; the field ``param`` has an id that is too large.
        """
        num_tokens = self.engine.constants.vocab_size
        if (highest := max(ids, default=0)) >= num_tokens:
            message = f"{param}: there is no token {highest}: the vocabulary has {num_tokens}"
            raise ApiError(400, message, param=param)

    def _observers_of(self, choices: Choices) -> list[ObserverFactory]:
        if all(request.grammar is None for request in choices.requests):
            return self.observers
        return [*self.observers, partial(_SlowGrammar, self.grammars, choices.requests)]

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        choices: Choices,
        answer_format: AnswerFormat,
        record: CallRecord,
    ) -> Response:
        """Generate ``choices``, and answer whole or as a stream. When the client disconnects, they are aborted.

        Raises:
            RequestError, QueueFullError, EngineStoppedError: the engine refuses the prompts.
            ApiError: the engine failed, or time ran out, before a whole answer was ready.
        """
        call = await Call.start(
            self.engine,
            self._observers_of(choices),
            record,
            choices.requests,
            extra_key=body.prefix_cache_key,
            owner=caller_of(request.scope).owner,
            limits=self.limits,
            whole=not body.stream,
        )
        return await send_answer(request, body, call, choices, answer_format)


def size_of(rendered: RenderedChat) -> int:
    """The size of a conversation for ``off_loop``: with a mark never small, as a copy of the tokenizer may be made."""
    return max(len(rendered.marked), INLINE_SIZE + 1 if rendered.mark else 0)


class _SlowGrammar:
    """Observer of a choice: when its grammar is too slow while it is used, it is refused from then on."""

    def __init__(self, grammars: Grammars, requests: Sequence[ChoiceRequest], record: CallRecord, index: int) -> None:
        self._grammars, self._spec = grammars, requests[index].params.grammar

    def record(self, delta: OutputDelta) -> None:
        if delta.error_code == "grammar_too_complex" and self._spec is not None:
            self._grammars.refuse(self._spec)

    def record_abort(self, reason: AbortReason = "disconnect") -> None:
        """An abort says nothing about the grammar."""


def check_fits(tokenizer: Tokenizer, text: str, context_length: int, param: str = "prompt") -> None:
    """Check, without encoding it, that a text, in the field ``param``, can fit into the context.

    Raises:
        ApiError: 400; the text has more characters than ``context_length`` tokens can have.
    """
    most = tokenizer.most_characters(context_length)
    if most is not None and len(text) > most:
        message = (
            f"the {param} has {len(text)} characters, but at most {context_length - 1} tokens fit, and these "
            f"never have more than {most} characters: "
            "shorten it, or serve with a larger --context-length / --max-total-tokens"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
