"""What the server answers, in OpenAI's shapes. The OpenAPI schema is made from these classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specmamba.core import OutputDelta

EndReason = Literal["stop", "length"]
LeftOutWhenNone = Field(exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    """Where the prompt tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """What speculation did: drafted tokens that the model agreed with, and those it did not."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """The tokens of a call, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, last_deltas: Sequence[OutputDelta]) -> Usage:
        """The usage of a call whose requests ended with these deltas."""
        prompt = sum(delta.num_prompt_tokens for delta in last_deltas)
        completion = sum(delta.num_output_tokens for delta in last_deltas)
        accepted = sum(delta.spec.num_accepted_tokens for delta in last_deltas)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(delta.num_cached_tokens for delta in last_deltas)
            ),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=sum(delta.spec.num_draft_tokens for delta in last_deltas) - accepted,
            ),
        )


class CompletionChoice(BaseModel):
    """The text that continues one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: EndReason | None


class Completion(BaseModel):
    """The answer to POST /v1/completions; streamed, each event carries one with a piece of the text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that can be named in requests."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specmamba"
    max_model_len: int


class ModelList(BaseModel):
    """The models that can be named in requests."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Whether the engine runs."""

    status: Literal["ok", "draining"]


class ServerInfo(BaseModel):
    """What runs here and how it is doing."""

    version: str
    uptime_seconds: float
    served_model_names: list[str]
    context_length: int
    engine: dict[str, Any]
    stats: dict[str, Any]


class CacheReport(BaseModel):
    """The prefix cache: its settings, what is in it now, and what has happened since the start."""

    enabled: bool
    strategy: Literal["no_buffer", "extra_buffer"]
    track_interval: Annotated[int | None, Field(description="generated tokens between two states; null: none left")]
    policy: Annotated[Literal["lru", "flops"], Field(description="what is evicted first")]
    page_size: int

    hit_rate: Annotated[float, Field(description="hit_tokens / query_tokens; 0 before the first request")]
    query_tokens: Annotated[int, Field(description="tokens of admitted requests that a hit could have spared")]
    hit_tokens: Annotated[int, Field(description="those that one did spare")]
    misses: Annotated[dict[str, int], Field(description="requests by why their hit was not longer")]

    num_nodes: int
    num_tombstones: Annotated[int, Field(description="nodes with KV and without a state")]
    num_salts: Annotated[int, Field(description="trees that share nothing")]
    num_tokens: Annotated[int, Field(description="tokens in the tree")]
    num_locked_tokens: Annotated[int, Field(description="those that running requests stand on")]
    num_states: int
    inserted_tokens: int
    evicted_tokens: int
    evicted_states: int
    duplicate_states: Annotated[int, Field(description="states that were offered for a place that had one")]

    num_pages: Annotated[int, Field(description="of the whole KV pool, requests' included; so are the figures below")]
    num_free_pages: int
    num_evictable_pages: int
    num_state_slots: int
    num_free_state_slots: int
    num_evictable_states: int


class Flushed(BaseModel):
    """What a flush of the prefix cache did."""

    success: Literal[True] = True
    flushed_tokens: int


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail
