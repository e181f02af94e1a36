"""What clients may send. Each field works or is refused by name; the few that change nothing by nature say so.

Fields that a later version will support are declared with the values that ask for nothing: supporting one means
widening its type here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specmamba.core import (
    MAX_STOP_IDS,
    MinP,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from specmamba.server.fields import Prompt, Stop, StrictModel, TokenId, only

NoEffect = Field(description="accepted; changes nothing")
NotYet = Field(description="not supported yet: only the values that ask for nothing")
CacheKey = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: Annotated[bool | None, Field(description="end with a chunk that carries the usage")] = None
    include_obfuscation: Annotated[Literal[False] | None, only(False), NotYet] = None


class GenerationRequest(StrictModel):
    """The fields that completions and chat share. null stands for the default everywhere, as it does at OpenAI's."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="new tokens at the most")] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # extensions of OpenAI's interface
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_IDS)] = None
    ignore_eos: Annotated[
        bool | None, Field(description="extension: go on after the model's own end-of-text token")
    ] = None
    cache_salt: Annotated[
        CacheKey | None,
        Field(description="extension: cached prefixes are shared with requests of the same salt only; keep it secret"),
    ] = None
    extra_key: Annotated[
        CacheKey | None, Field(description="extension: separates cached prefixes as cache_salt does, and further")
    ] = None

    user: Annotated[str | None, NoEffect] = None
    metadata: Annotated[dict[str, Any] | None, NoEffect] = None
    n: Annotated[Literal[1] | None, only(1), NotYet] = None
    logit_bias: Annotated[dict[str, Any] | None, only({}), NotYet] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", 'only allowed together with "stream": true', {"field": "stream_options"}
            )
        return self

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def prefix_cache_key(self) -> str | None:
        """Salt and key as one text, which no other pair of them has; None where there is neither."""
        if self.cache_salt is None and self.extra_key is None:
            return None
        return json.dumps([self.cache_salt, self.extra_key])

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """How the engine is to sample; what the request leaves open takes the default of ``SamplingParams``.

        Raises:
            pydantic.ValidationError: a limit that only ``SamplingParams`` knows is passed.
        """
        named = {name: getattr(self, name, None) for name in SamplingParams.model_fields if name != "max_tokens"}
        chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams.model_validate({"max_tokens": max_tokens, **chosen})


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt
    best_of: Annotated[Literal[1] | None, only(1), NotYet] = None
    echo: Annotated[Literal[False] | None, only(False), NotYet] = None
    logprobs: Annotated[None, only(), NotYet] = None
    suffix: Annotated[Literal[""] | None, only(""), NotYet] = None
