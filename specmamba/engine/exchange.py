"""What crosses between the engine thread and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specmamba.core import FinishReason, OutputDelta, SamplingParams

if TYPE_CHECKING:
    from specmamba.grammar import CompiledGrammar
    from specmamba.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for the engine. ``on_delta`` is called on the engine thread, so it must be quick and never block."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    on_delta: Callable[[OutputDelta], None]
    extra_key: str | None = None  # cached prefixes are shared with requests of the same key only
    grammar: CompiledGrammar | None = None  # of ``params.grammar``


@dataclass(slots=True)
class OpenRequest:
    """A request that still owes its caller a last delta."""

    request: EngineRequest
    latest: OutputDelta

    @classmethod
    def just_added(cls, request: EngineRequest) -> OpenRequest:
        return cls(request, OutputDelta(request.request_id, (), "", len(request.prompt_token_ids), 0, 0))

    def last_delta(self, finish_reason: FinishReason, error: str) -> OutputDelta:
        """An end without news. What the engine had given before stays given."""
        return OutputDelta(
            request_id=self.latest.request_id,
            token_ids=(),
            text="",
            num_prompt_tokens=self.latest.num_prompt_tokens,
            num_cached_tokens=self.latest.num_cached_tokens,
            num_output_tokens=self.latest.num_output_tokens,
            finish_reason=finish_reason,
            error=error,
            spec=self.latest.spec,
        )


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """What does not change while an engine lives, and so may be read from any thread."""

    tokenizer: Tokenizer
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    description: dict[str, object]
