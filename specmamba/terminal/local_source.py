"""Answers of a model in this process."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, cast

from specmamba.chat_config import ChatConfig
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.errors import ConfigError, EngineStoppedError, PromptTooLongError, RequestError
from specmamba.llm import LLM
from specmamba.sampling_params import SamplingParams
from specmamba.terminal.answer_source import WHAT_TO_DO, AnswerEnd, AnswerError, Message, SourceGoneError


class LocalSource:
    """``AnswerSource`` of the engine's flags."""

    def __init__(self, config: ChatConfig) -> None:
        """Load the model.

        Raises:
            SpecmambaError: as ``LLM``; or the model has no chat template.
        """
        given = config.model_fields_set - {"model"}
        flags: dict[str, Any] = {name: getattr(config, name) for name in EngineConfig.model_fields if name in given}
        self._llm = LLM(config.model, **flags)
        engine = self._llm.engine
        if self._llm.get_tokenizer().chat_template() is None:
            self._llm.close()
            raise ConfigError(
                "this model has no chat template: it continues texts, which specmamba generate does (a model for "
                "conversations has a template in tokenizer_config.json or chat_template.jinja)"
            )
        self.model = str(engine.describe()["model"])
        self.context_length: int | None = engine.context_length

    def answer(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str | AnswerEnd]:
        """As ``AnswerSource.answer``."""
        try:
            prompt = self._llm.get_tokenizer().apply_chat_template(messages)
            # closed here, so that the slot is free when the caller goes on
            with closing(cast(Generator[OutputDelta], self._llm.stream(prompt, params))) as deltas:
                for delta in deltas:
                    if delta.finish_reason == "error":
                        raise AnswerError(str(delta.error))
                    yield delta.text
                    if delta.finish_reason is not None:
                        yield _end(delta)
        except PromptTooLongError as error:
            raise AnswerError(
                f"the context is full: this conversation has {error.num_prompt_tokens} tokens, and at most "
                f"{error.max_prompt_tokens} leave room for an answer; {WHAT_TO_DO}"
            ) from None
        except RequestError as error:
            raise AnswerError(str(error)) from None
        except EngineStoppedError as error:
            raise SourceGoneError(str(error)) from None

    def drafting(self) -> str:
        """As ``AnswerSource.drafting``."""
        engine = self._llm.engine
        plan, sizing = engine.draft_plan, engine.stats().sizing
        if plan.algorithm == "none":
            return "off: nothing drafts (specmamba info says what could)"
        if sizing is None:
            return f"{plan.algorithm}, always {plan.num_steps} deep, {plan.max_nodes} nodes with the root"
        return f"{plan.algorithm} ({sizing.reason})"

    def close(self) -> None:
        """As ``AnswerSource.close``."""
        self._llm.close()


def _end(delta: OutputDelta) -> AnswerEnd:
    return AnswerEnd(
        delta.finish_reason or "abort",
        delta.num_prompt_tokens,
        delta.num_cached_tokens,
        delta.num_output_tokens,
        delta.spec.num_draft_tokens,
        delta.spec.num_accepted_tokens,
        delta.rule,
    )
