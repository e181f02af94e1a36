"""An answer as a sequence of blocks, as APIs with typed content give it: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from specmamba.server.tools.parsing import CallArguments, CallBegin, Content, Event, Reasoning

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """Reasoning, text, or the arguments of a call, as far as it has come."""

    kind: BlockKind
    index: int  # among the blocks of the answer
    name: str = ""  # of the tool
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Change:
    """A block begins, gets a text, or ends."""

    kind: Literal["begin", "text", "end"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer, from its events."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def add(self, events: Iterable[Event]) -> list[Change]:
        """Read the next events."""
        changes: list[Change] = []
        for event in events:
            match event:
                case Reasoning(text):
                    self._add_text("reasoning", text, changes)
                case Content(text):
                    self._add_text("text", text, changes)
                case CallBegin(name):
                    self._begin(Block("call", len(self.all), name), changes)
                case CallArguments(text):
                    self._add_text("call", text, changes)
        return changes

    def end(self) -> list[Change]:
        """End the block that is open, if any."""
        was_open, self._is_open = self._is_open, False
        return [Change("end", self.all[-1])] if was_open else []

    def _add_text(self, kind: BlockKind, text: str, changes: list[Change]) -> None:
        if not text:
            return
        if not self._is_open or self.all[-1].kind != kind:
            self._begin(Block(kind, len(self.all)), changes)
        self.all[-1].pieces.append(text)
        changes.append(Change("text", self.all[-1], text))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        changes += self.end()
        self.all.append(block)
        self._is_open = True
        changes.append(Change("begin", block))
