"""The bodies of generating requests: the shared fields, and those of POST /v1/completions.

Each field works or is refused by name; the description of the few that change nothing says so. Fields that a later
version will support are declared with the values that ask for nothing: supporting one means widening its type here.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specmamba.sampling_params import (
    MAX_STOP_IDS,
    GrammarSpec,
    MinP,
    NumChoices,
    NumLogprobs,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from specmamba.server.api.structured import StructuredRequest
from specmamba.server.http.fields import (
    LogitBias,
    MessageContent,
    Prompt,
    Speculation,
    Stop,
    StrictModel,
    TokenId,
    only,
)
from specmamba.server.http.handoff_fields import HandoffRequest

NoEffect = Field(description="accepted; changes nothing")
NotYet = Field(description="not supported yet: only the values that ask for nothing")
CacheKey = Annotated[str, Field(min_length=1, max_length=256)]


def cache_key_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Return the two as one text, different for every pair; None without both."""
    return None if cache_salt is None and extra_key is None else json.dumps([cache_salt, extra_key])


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: Annotated[bool | None, Field(description="end with a chunk that carries the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="extension: every chunk carries the usage so far")
    ] = None
    include_obfuscation: Annotated[Literal[False] | None, only(False), NotYet] = None


class Prediction(StrictModel):
    """A text that the answer is expected to repeat for the most part."""

    type: Literal["content"]
    content: MessageContent

    @property
    def text(self) -> str:
        """The text, its parts joined."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class GenerationRequest(StructuredRequest, HandoffRequest):
    """The fields that completions and chat share. null stands for the default everywhere, as it does at OpenAI's."""

    model: Annotated[str | None, Field(description="a name listed by /v1/models; none: the served model")] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="new tokens at the most")] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[
        Seed | None,
        Field(description="the same seed gives the same answer, but for rounding; choice i of a prompt takes seed + i"),
    ] = None
    n: Annotated[NumChoices | None, Field(description="choices for each prompt (see --max-choices)")] = None
    logit_bias: Annotated[
        LogitBias | None, Field(description="added to the logits of tokens, by token id: -100 bans, 100 forces")
    ] = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # extensions of OpenAI's interface
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_IDS)] = None
    speculative: Annotated[
        Speculation | None, Field(description="extension: false decodes plainly, without drafts")
    ] = None
    return_tokens: Annotated[
        bool | None, Field(description="extension: list the tokens of a choice, and how deep they were drafted")
    ] = None
    cache_salt: Annotated[
        CacheKey | None,
        Field(description="extension: cached prefixes are shared with requests of the same salt only; keep it secret"),
    ] = None
    extra_key: Annotated[
        CacheKey | None, Field(description="extension: separates cached prefixes as cache_salt does, and further")
    ] = None

    prediction: Annotated[
        Prediction | None,
        Field(description="a text that most of the answer repeats: drafts are taken from it where the two agree"),
    ] = None
    user: Annotated[str | None, NoEffect] = None
    metadata: Annotated[dict[str, Any] | None, NoEffect] = None

    # SGLang's router puts these into every request that it passes on
    no_stop_trim: Annotated[Literal[False] | None, only(False), NotYet] = None
    skip_special_tokens: Annotated[Literal[True] | None, only(True), NotYet] = None
    return_hidden_states: Annotated[Literal[False] | None, only(False), NotYet] = None

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
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def prefix_cache_key(self) -> str | None:
        """``cache_salt`` and ``extra_key`` as one text."""
        return cache_key_of(self.cache_salt, self.extra_key)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to list for each new token; None: no log probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to list for each token of the prompt; None: no log probabilities."""
        return None

    @property
    def logprobs_field(self) -> str:
        """The name of the field that makes an answer list log probabilities, for messages."""
        return "logprobs"

    def sampling_params(self, max_tokens: int, grammar: GrammarSpec | None = None) -> SamplingParams:
        """The sampling parameters of one choice; fields that it does not set have the defaults of ``SamplingParams``.

        Args:
            max_tokens: new tokens at most.
            grammar: restricts the text of the answer.

        Raises:
            pydantic.ValidationError: a value exceeds a limit that only ``SamplingParams`` checks.
        """
        # a prediction has another shape here, and the service encodes it
        named = {name: getattr(self, name, None) for name in SamplingParams.model_fields if name != "prediction"}
        named |= {"max_tokens": max_tokens, "grammar": grammar}
        named["n"] = None  # each choice is a request of its own
        named |= {"logprobs": self.num_logprobs, "prompt_logprobs": self.num_prompt_logprobs}
        chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}
        return SamplingParams.model_validate({name: value for name, value in chosen.items() if value is not None})


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[
        int | None, Field(ge=0, description="new tokens at the most; 0 with echo: the prompt alone, to score it")
    ] = None
    best_of: Annotated[
        NumChoices | None,
        Field(description="answers to generate for each prompt; the n with the likeliest tokens are given"),
    ] = None
    echo: Annotated[bool | None, Field(description="put the prompt in front of the answer")] = None
    logprobs: Annotated[
        NumLogprobs | None,
        Field(description="log-probabilities of the tokens and of so many likeliest ones; with echo the prompt's too"),
    ] = None
    suffix: Annotated[
        str | None,
        Field(description="what follows the answer, for models that fill gaps: the answer stands between the two"),
    ] = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "0 is only allowed with echo", {"field": "max_tokens"})
        if self.suffix and self.echo:
            raise PydanticCustomError("suffix", "does not go together with echo", {"field": "suffix"})
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise PydanticCustomError("best_of", "must not be less than n", {"field": "best_of"})
        if self.stream and self.num_asked > (self.n or 1):
            raise PydanticCustomError("best_of", "more than n answers cannot be streamed", {"field": "best_of"})
        return self

    @property
    def num_asked(self) -> int:
        """Answers to generate for each prompt."""
        return self.best_of or self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        # choices of best_of are compared by their log probabilities
        return 0 if self.logprobs is None and self.num_asked > (self.n or 1) else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def logprobs_field(self) -> str:
        return "best_of" if self.logprobs is None else "logprobs"
