"""Where the answers of a conversation come from: what a model in this process and a server have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specmamba.errors import SpecmambaError
from specmamba.sampling_params import SamplingParams

Message = Mapping[str, str]
WHAT_TO_DO = "/reset begins a new conversation, /undo takes the last exchange back"


class AnswerError(SpecmambaError):
    """A message that got no answer, or not all of one. The conversation can go on."""

    status: int | None = None  # of a server's answer


class SourceGoneError(AnswerError):
    """No further message will get an answer."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what a model thinks before it answers, where the server tells it apart; no part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended, and what it took."""

    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, which the prefix cache spared
    num_output_tokens: int
    num_drafted: int | None  # tokens; None: the server does not say
    num_accepted: int | None
    rule: str | None = None  # by which drafts were accepted

    @property
    def num_steps(self) -> int:
        """Each verify step gives its own token beside the accepted ones."""
        return self.num_output_tokens - (self.num_accepted or 0)


Piece = str | Reasoning | AnswerEnd


class AnswerSource(Protocol):
    """Answers conversations, one at a time."""

    model: str
    context_length: int | None  # None: the server does not say

    def answer(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[Piece]:
        """Answer a conversation: pieces of text and of reasoning, and last an ``AnswerEnd``.

        Closing the generator, or Ctrl-C in it, aborts the answer and gives its memory back.

        Raises:
            AnswerError: the message cannot be answered; it says why and what to do.
        """

    def drafting(self) -> str:
        """A sentence about speculation: what drafts, how large, and why."""

    def close(self) -> None:
        """Free everything."""
