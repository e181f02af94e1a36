"""What the server answers, in OpenAI's shapes. The OpenAPI schema is made from these classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

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
    """The tokens of a call: each prompt once, and of all answers that were generated for it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, last_deltas: Sequence[OutputDelta], of_prompts: Sequence[OutputDelta] | None = None) -> Usage:
        """The usage of a call whose requests ended with these deltas; ``of_prompts`` has one for each prompt."""
        of_prompts = last_deltas if of_prompts is None else of_prompts
        prompt = sum(delta.num_prompt_tokens for delta in of_prompts)
        completion = sum(delta.num_output_tokens for delta in last_deltas)
        accepted = sum(delta.spec.num_accepted_tokens for delta in last_deltas)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(delta.num_cached_tokens for delta in of_prompts)
            ),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=sum(delta.spec.num_draft_tokens for delta in last_deltas) - accepted,
            ),
        )


class TokenPiece(BaseModel):
    """One token of an answer. The texts of all of them, joined, are the answer, before a stop string cuts it."""

    id: int
    text: Annotated[str, Field(description="empty in the middle of a character, and for tokens that do not show")]
    depth: Annotated[int, Field(description="how deep it stood in an accepted draft; 0: it was not drafted")]


class CompletionLogprobs(BaseModel):
    """Natural logarithms of the model's own distribution, token by token."""

    tokens: Annotated[list[str], Field(description=r"a token that is no text by itself is written bytes:\xe4")]
    token_logprobs: Annotated[list[float | None], Field(description="null: the first token of a prompt follows none")]
    top_logprobs: Annotated[
        list[dict[str, float] | None] | None,
        Field(description="the likeliest tokens in the place of each, and the token itself; null for logprobs 0"),
    ]
    text_offset: Annotated[list[int], Field(description="characters of the choice's text before each token")]


class CompletionChoice(BaseModel):
    """The text that continues one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: EndReason | None
    tokens: Annotated[list[TokenPiece] | None, LeftOutWhenNone] = None


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
    root: Annotated[str | None, Field(description="where its checkpoint and tokenizer are")] = None
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
