"""Answers of POST /v1/responses, whole or as typed events, from the pieces of a chat's only choice."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from specmamba.core import OutputDelta
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.server.api.answer_blocks import Block, Blocks, Change
from specmamba.server.api.parsed_choice import ChatOptions, ParsedChoice, with_reasoning
from specmamba.server.api.responses import Usage, new_head
from specmamba.server.http.error_answers import ApiError
from specmamba.server.responses_api.response_fields import ResponseRequest
from specmamba.server.responses_api.response_items import (
    ArgumentsEvent,
    IncompleteDetails,
    ItemEvent,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartEvent,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    TextEvent,
)

_NOT_REPEATED: dict[str, Any] = {
    "instructions": None,
    "tools": [],
    "text": {"format": {"type": "text"}},
    "metadata": {},
}
_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseFormat:
    """``AnswerFormat`` of responses; each has one choice."""

    has_named_events = True
    text_chunk = None  # events are numbered, so that none is written from a template

    def __init__(
        self, call_id: str, model: str, tokenizer: Tokenizer, options: ChatOptions, body: ResponseRequest
    ) -> None:
        head = new_head(call_id, model)
        self._fields = {"id": call_id, "created_at": head["created"], "model": model, **_fields_of(body)}
        self._choice = ParsedChoice(options, tokenizer)
        self._blocks = Blocks()
        self._ids: list[str] = []  # of the items, by block
        self._calls: list[str] = []  # ids of calls, by block
        self._num_events = 0
        self._is_cut_off = False

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> ResponseObject:
        (output,) = outputs
        self._read(output)
        return self._ended(usage)

    def opening(self, num_choices: int) -> Sequence[BaseModel]:
        response = self._response("in_progress")
        return [
            ResponseEvent(type="response.created", sequence_number=self._next(), response=response),
            ResponseEvent(type="response.in_progress", sequence_number=self._next(), response=response),
        ]

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[BaseModel]:
        return [event for change in self._read(delta) for event in self._events(change)]

    def counted(self, usage: Usage) -> Usage:
        return with_reasoning(usage, [self._choice])

    def closing(self, usage: Usage) -> Sequence[BaseModel]:
        response = self._ended(usage)
        name: Literal["response.incomplete", "response.completed"]
        name = "response.incomplete" if self._is_cut_off else "response.completed"
        return [ResponseEvent(type=name, sequence_number=self._next(), response=response)]

    def failure(self, error: ApiError) -> BaseModel:
        """The last event. It does not repeat the client's JSON: writing it may be what has failed."""
        response = self._response("failed", **_NOT_REPEATED)
        response.error = ResponseFailure(code=error.detail.code or "server_error", message=error.detail.message)
        return ResponseEvent(type="response.failed", sequence_number=self._next(), response=response)

    def _read(self, delta: OutputDelta) -> list[Change]:
        changes = self._blocks.add(self._choice.read(delta))
        if delta.finish_reason is not None:
            self._is_cut_off = delta.finish_reason == "length"
            changes += self._blocks.end()
        for block in self._blocks.all[len(self._ids) :]:
            self._ids.append(f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}")
            self._calls.append(f"call_{uuid.uuid4().hex[:24]}")
        return changes

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], **fields: Any
    ) -> ResponseObject:
        last = len(self._blocks.all) - 1
        is_whole = status == "completed"
        items = [
            self._item(block, "completed" if is_whole or block.index < last else "incomplete")
            for block in self._blocks.all
        ]
        return ResponseObject(status=status, output=items, **{**self._fields, **fields})

    def _ended(self, usage: Usage) -> ResponseObject:
        response = self._response("incomplete" if self._is_cut_off else "completed")
        response.incomplete_details = IncompleteDetails() if self._is_cut_off else None
        response.usage = ResponseUsage.of(self.counted(usage))
        return response

    def _item(self, block: Block, status: ItemStatus, *, is_empty: bool = False) -> OutputItem:
        own, text = self._ids[block.index], "" if is_empty else block.text
        if block.kind == "call":
            call_id = self._calls[block.index]
            return OutputCall(id=own, status=status, call_id=call_id, name=block.name, arguments=text)
        if block.kind == "reasoning":
            return OutputReasoning(id=own, status=status, content=[] if is_empty else [ReasoningText(text=text)])
        return OutputMessage(id=own, status=status, content=[] if is_empty else [OutputText(text=text)])

    def _events(self, change: Change) -> list[BaseModel]:
        block = change.block
        place: dict[str, Any] = {"item_id": self._ids[block.index], "output_index": block.index}
        if change.kind == "begin":
            return self._begin(block, place)
        if change.kind == "end":
            return self._end(block, place)
        number = self._next()
        if block.kind == "call":
            name: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
            return [ArgumentsEvent(type=name, sequence_number=number, delta=change.text, **place)]
        if block.kind == "reasoning":
            reasoning: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
            return [TextEvent(type=reasoning, sequence_number=number, delta=change.text, **place)]
        text: Literal["response.output_text.delta"] = "response.output_text.delta"
        return [TextEvent(type=text, sequence_number=number, delta=change.text, logprobs=[], **place)]

    def _begin(self, block: Block, place: dict[str, Any]) -> list[BaseModel]:
        item = self._item(block, "in_progress", is_empty=True)
        added: list[BaseModel] = [
            ItemEvent(
                type="response.output_item.added", sequence_number=self._next(), output_index=block.index, item=item
            )
        ]
        if block.kind != "call":
            part = _part(block, "")
            added.append(
                PartEvent(type="response.content_part.added", sequence_number=self._next(), part=part, **place)
            )
        return added

    def _end(self, block: Block, place: dict[str, Any]) -> list[BaseModel]:
        text, ended = block.text, list[BaseModel]()
        if block.kind == "call":
            ended.append(
                ArgumentsEvent(
                    type="response.function_call_arguments.done",
                    sequence_number=self._next(),
                    name=block.name,
                    arguments=text,
                    **place,
                )
            )
        else:
            name: Literal["response.output_text.done", "response.reasoning_text.done"]
            is_text = block.kind == "text"
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            logprobs: list[Any] | None = [] if is_text else None
            ended += [
                TextEvent(type=name, sequence_number=self._next(), text=text, logprobs=logprobs, **place),
                PartEvent(
                    type="response.content_part.done", sequence_number=self._next(), part=_part(block, text), **place
                ),
            ]
        is_last = block.index == len(self._blocks.all) - 1
        item = self._item(block, "incomplete" if self._is_cut_off and is_last else "completed")
        ended.append(
            ItemEvent(
                type="response.output_item.done", sequence_number=self._next(), output_index=block.index, item=item
            )
        )
        return ended


def _part(block: Block, text: str) -> OutputText | ReasoningText:
    return OutputText(text=text) if block.kind == "text" else ReasoningText(text=text)


def _fields_of(body: ResponseRequest) -> dict[str, Any]:
    """The fields of a request that its response repeats."""
    choice = "auto" if body.tool_choice is None else body.tool_choice
    wanted = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
        "reasoning": {"effort": effort, "summary": None},
        "metadata": body.metadata or {},
    }
