"""Answers of POST /v1/messages, whole or as typed events, from the pieces of a chat's only choice."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel

from specmamba.core import OutputDelta
from specmamba.models.text.tokenizer import Detokenizer, Tokenizer
from specmamba.server.api.answer_blocks import Block, Blocks, Change
from specmamba.server.api.parsed_choice import ChatOptions, ParsedChoice, with_reasoning
from specmamba.server.api.responses import Usage
from specmamba.server.http.error_answers import ApiError
from specmamba.server.http.message_errors import MessageError
from specmamba.server.messages_api.message_events import (
    BlockDelta,
    BlockPiece,
    BlockStart,
    BlockStop,
    MessageAnswer,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    OutputTextBlock,
    OutputThinking,
    OutputToolUse,
    Ping,
    StopReason,
)
from specmamba.server.tools.formats import can_be_written, read_json


class StopFinder:
    """Finds which stop sequence has ended an answer: the text of its tokens still has it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], hidden: Collection[int]) -> None:
        """``hidden``: tokens that end the answer and have no text."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops, self._hidden = stops, hidden
        self._tail = ""

    def read(self, delta: OutputDelta) -> str | None:
        """The stop sequence that ends the answer with this piece, if any."""
        if not self._stops:
            return None
        new = "".join(self._detokenizer.push(token) for token in delta.token_ids if token not in self._hidden)
        text = self._tail + new
        longest = max(map(len, self._stops))
        self._tail = text[-longest:]
        if delta.finish_reason != "stop" or (delta.token_ids and delta.token_ids[-1] in self._hidden):
            return None
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


class MessageFormat:
    """``AnswerFormat`` of messages; each has one choice."""

    has_named_events = True
    text_chunk = None

    def __init__(
        self, call_id: str, model: str, tokenizer: Tokenizer, options: ChatOptions, prompt_size: int, stops: StopFinder
    ) -> None:
        """``prompt_size``: in tokens."""
        self._id, self._model, self._prompt_size = call_id, model, prompt_size
        self._choice = ParsedChoice(options, tokenizer)
        self._blocks = Blocks()
        self._ids: list[str] = []  # of calls, by block
        self._stops = stops
        self._stop_sequence: str | None = None
        self._is_cut_off = False

    def whole(self, outputs: Sequence[OutputDelta], usage: Usage) -> MessageAnswer:
        (output,) = outputs
        self._read(output)
        return self._message(self._content(), self._end(), MessageUsage.of(self.counted(usage)))

    def opening(self, num_choices: int) -> Sequence[BaseModel]:
        usage = MessageUsage(input_tokens=self._prompt_size)
        return [MessageStart(message=self._message([], None, usage)), Ping()]

    def chunks(self, index: int, delta: OutputDelta) -> Sequence[BaseModel]:
        return [self._event(change) for change in self._read(delta)]

    def counted(self, usage: Usage) -> Usage:
        return with_reasoning(usage, [self._choice])

    def closing(self, usage: Usage) -> Sequence[BaseModel]:
        return [MessageDelta(delta=self._end(), usage=MessageUsage.of(self.counted(usage))), MessageStop()]

    def failure(self, error: ApiError) -> BaseModel:
        return MessageError.of(error.status, error.detail.message)

    def _read(self, delta: OutputDelta) -> list[Change]:
        changes = self._blocks.add(self._choice.read(delta))
        self._stop_sequence = self._stops.read(delta)
        if delta.finish_reason is not None:
            self._is_cut_off = delta.finish_reason == "length"
            changes += self._blocks.end()
        self._ids += [f"toolu_{uuid.uuid4().hex[:24]}" for _ in self._blocks.all[len(self._ids) :]]
        return changes

    def _content(self) -> list[OutputBlock]:
        return [self._block(block, block.text) for block in self._blocks.all]

    def _end(self) -> MessageEnd:
        reason: StopReason = "end_turn"
        if self._is_cut_off:
            reason = "max_tokens"
        elif self._stop_sequence is not None:
            reason = "stop_sequence"
        elif any(isinstance(block, OutputToolUse) for block in self._content()):
            reason = "tool_use"
        return MessageEnd(stop_reason=reason, stop_sequence=self._stop_sequence)

    def _message(self, content: list[OutputBlock], end: MessageEnd | None, usage: MessageUsage) -> MessageAnswer:
        reason, sequence = (None, None) if end is None else (end.stop_reason, end.stop_sequence)
        return MessageAnswer(
            id=self._id, model=self._model, content=content, stop_reason=reason, stop_sequence=sequence, usage=usage
        )

    def _block(self, block: Block, text: str) -> OutputBlock:
        """A block with this text. Arguments that are no JSON object must not become a call: they are text."""
        if block.kind == "reasoning":
            return OutputThinking(thinking=text)
        if block.kind == "call" and (values := _arguments(text)) is not None:
            return OutputToolUse(id=self._ids[block.index], name=block.name, input=values)
        return OutputTextBlock(text=text)

    def _event(self, change: Change) -> BaseModel:
        block = change.block
        if change.kind == "begin":
            is_call = block.kind == "call"
            return BlockStart(index=block.index, content_block=self._block(block, "{}" if is_call else ""))
        if change.kind == "end":
            return BlockStop(index=block.index)
        if block.kind == "call":
            piece = BlockPiece(type="input_json_delta", partial_json=change.text)
        elif block.kind == "reasoning":
            piece = BlockPiece(type="thinking_delta", thinking=change.text)
        else:
            piece = BlockPiece(type="text_delta", text=change.text)
        return BlockDelta(index=block.index, delta=piece)


def _arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None: they are no JSON object that an answer can have as a value."""
    try:
        values = read_json(text or "{}")
    except ValueError:
        return None
    return values if isinstance(values, dict) and can_be_written(values) else None
