"""What the generating routes answer, in OpenAI's shapes. The OpenAPI schema is made from these classes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from specmamba.core import OutputDelta

ChoiceT = TypeVar("ChoiceT", bound=BaseModel)

EndReason = Literal["stop", "length"]
ChatEndReason = Literal["stop", "length", "tool_calls"]
LeftOutWhenNone = Field(exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    """Where the prompt tokens came from."""

    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """Tokens of the reasoning, and what speculation did: drafted tokens that were accepted and rejected.

    With ``prediction`` the drafts are tokens of the given text where the answer agrees with it, and the drafter's
    elsewhere. Every accepted one is a token of the answer. A token of the text that was never drafted counts nowhere.
    """

    reasoning_tokens: Annotated[int, Field(description="up to the end of the reasoning, its marks included")] = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    accept_rule: Annotated[
        Literal["target", "rejection", "mixed"], Field(description="extension: the rule by which drafts were accepted")
    ] = "target"


class Usage(BaseModel):
    """The tokens of a call: each prompt once, and of all answers that were generated for it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, last_deltas: Sequence[OutputDelta], of_prompts: Sequence[OutputDelta] | None = None) -> Usage:
        """The usage of a call.

        Args:
            last_deltas: the newest delta of each request.
            of_prompts: the newest delta of one request for each prompt; by default every request has its own prompt.
        """
        of_prompts = last_deltas if of_prompts is None else of_prompts
        prompt = sum(delta.num_prompt_tokens for delta in of_prompts)
        completion = sum(delta.num_output_tokens for delta in last_deltas)
        accepted = sum(delta.spec.num_accepted_tokens for delta in last_deltas)
        rules = {delta.rule for delta in last_deltas}
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
                accept_rule="mixed" if len(rules) > 1 else next(iter(rules), "target"),
            ),
        )


class TokenPiece(BaseModel):
    """One token of an answer. The texts of all tokens, joined, are the answer before a stop string cuts it."""

    id: int
    text: Annotated[str, Field(description="empty in the middle of a character, and for tokens that do not show")]
    depth: Annotated[int, Field(description="how deep it stood in an accepted draft; 0: it was not drafted")]


class Answer(BaseModel, Generic[ChoiceT]):
    """What whole answers and chunks of both generating routes have in common."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | None = None


def new_head(call_id: str, model: str) -> dict[str, Any]:
    """The fields that all chunks of one answer share: its id, the time of its creation, the model."""
    return {"id": call_id, "created": int(time.time()), "model": model}


# ---- POST /v1/completions --------------------------------------------------------------------------------------------


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


class Completion(Answer[CompletionChoice]):
    """The answer to POST /v1/completions; streamed, each event carries one with a piece of the text."""

    object: Literal["text_completion"] = "text_completion"


# ---- POST /v1/chat/completions ---------------------------------------------------------------------------------------


class FunctionCall(BaseModel):
    """The function to call, and its arguments."""

    name: str
    arguments: Annotated[str, Field(description="a JSON object, written out; cut off where the answer is")]


class ToolCall(BaseModel):
    """A call that the model asks the client to make."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Field(description="null where there are only tool calls or reasoning")]
    refusal: None = None
    reasoning_content: Annotated[
        str | None, LeftOutWhenNone, Field(description="extension: what the model thought before (--reasoning-parser)")
    ] = None
    tool_calls: Annotated[list[ToolCall] | None, LeftOutWhenNone] = None


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a position. Natural logarithms; -9999 stands for impossible."""

    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer, tool calls included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer of the model."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEndReason | None
    tokens: Annotated[list[TokenPiece] | None, LeftOutWhenNone] = None


class ChatCompletion(Answer[ChatChoice]):
    """The answer to POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"


class FunctionCallDelta(BaseModel):
    """What a chunk adds to a call: the name first, then pieces of the arguments."""

    name: Annotated[str | None, LeftOutWhenNone] = None
    arguments: str


class ToolCallDelta(BaseModel):
    """The index of a call among those of its message, and what a chunk adds to it."""

    index: int
    id: Annotated[str | None, LeftOutWhenNone] = None
    type: Annotated[Literal["function"] | None, LeftOutWhenNone] = None
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Annotated[Literal["assistant"] | None, LeftOutWhenNone] = None
    content: Annotated[str | None, LeftOutWhenNone] = None
    reasoning_content: Annotated[str | None, LeftOutWhenNone] = None
    tool_calls: Annotated[list[ToolCallDelta] | None, LeftOutWhenNone] = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEndReason | None = None
    tokens: Annotated[list[TokenPiece] | None, LeftOutWhenNone] = None


class ChatCompletionChunk(Answer[ChatChunkChoice]):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
