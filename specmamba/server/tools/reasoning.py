"""The reasoning of a model, which stands between ``<think>`` and ``</think>`` in front of its answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specmamba.models.text.tokenizer import Detokenizer, Tokenizer
from specmamba.sampling_params import THINK, THINK_END, ReasoningStart
from specmamba.server.tools.parsing import (
    MAX_SPACE,
    AnswerParser,
    Event,
    Reasoning,
    length_of_partial,
    without_space_at_end,
)

ParserName = Literal["auto", "qwen3", "nemotron", "none"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its reasoning, if it does."""

    parser: Literal["qwen3", "nemotron", "none"]

    @classmethod
    def of(cls, name: ParserName, tokenizer: Tokenizer) -> ReasoningFormat:
        """The format that ``--reasoning-parser`` names; ``auto``: as the chat template or the vocabulary says."""
        if name != "auto":
            return cls(name)
        if not tokenizer.has_chat_template:
            return cls("none")
        templates = [tokenizer.chat_template(with_tools) or "" for with_tools in (False, True)]
        return cls("qwen3" if any(THINK in text for text in templates) or THINK in tokenizer.token_ids() else "none")

    def start(self, prompt: str) -> ReasoningStart:
        """Whether an answer to a prompt begins with reasoning.

        The prompt may open it (``<think>`` at its end) or leave it out (``</think>`` at its end). Otherwise ``qwen3``
        reads the opening mark from the answer; for ``nemotron`` the answer begins with reasoning, with the mark or
        without.
        """
        end = prompt.rstrip()
        if self.parser == "none" or end.endswith(THINK_END):
            return "none"
        return "open" if self.parser == "nemotron" or end.endswith(THINK) else "optional"


class ReasonedAnswer:
    """``AnswerParser`` of an answer with reasoning in front; another parser reads what follows it.

    White space around the marks belongs to neither. Without the closing mark all is reasoning, and nothing is given to
    the other parser.
    """

    def __init__(self, answer: AnswerParser, start: Literal["open", "optional"]) -> None:
        self._answer = answer
        self._is_open = start == "open"
        self._place: Literal["before", "inside", "behind", "answer"] = "before"
        self._held = ""  # possible beginning of a mark, and the white space before it
        self._has_said = False
        self.num_read = 0  # characters up to the end of the reasoning so far, its marks included

    @property
    def has_ended(self) -> bool:
        """Whether no further character belongs to the reasoning."""
        return self._place in ("behind", "answer")

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._place == "before":
            text = self._read_opening(text)
        if self._place == "inside":
            text = self._read_reasoning(text, events)
        if self._place == "behind":
            text = text.lstrip()
            self._place = "answer" if text else "behind"
        if self._place == "answer" and text:
            events += self._answer.push(text)
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._place == "before" and not self._is_open:
            return [*(self._answer.push(held) if held else ()), *self._answer.finish()]
        if not self.has_ended:
            self.num_read += len(held)
            said = held.strip() if self._place == "before" else held.rstrip()
            return [Reasoning(said)] if said else []
        return self._answer.finish()

    def _read_opening(self, text: str) -> str:
        """Leave ``<think>`` out; the text behind it, or "" while it is incomplete."""
        text, self._held = self._held + text, ""
        bare = text.lstrip()
        space = len(text) - len(bare)
        if bare.startswith(THINK) and space <= MAX_SPACE:
            self._place = "inside"
            self.num_read = space + len(THINK)
            return bare[len(THINK) :]
        if THINK.startswith(bare) and space <= MAX_SPACE:
            self._held = text
            return ""
        if not self._is_open:
            self._place = "answer"
            return text
        self._place = "inside"
        self.num_read = space
        return bare

    def _read_reasoning(self, text: str, events: list[Event]) -> str:
        """Read up to the closing mark; the text behind it."""
        new, self._held = self._held + text, ""
        if not self._has_said:
            self.num_read += len(new) - len(new.lstrip())
            new = new.lstrip()
        at = new.find(THINK_END)
        if at >= 0:
            said, rest = without_space_at_end(new[:at]), new[at + len(THINK_END) :]
            self._place = "behind"
        else:
            said, rest = without_space_at_end(new[: len(new) - length_of_partial(new, THINK_END)]), ""
            self._held = new[len(said) :]
        self.num_read += len(new) - len(rest) - len(self._held)
        if said:
            self._has_said = True
            events.append(Reasoning(said))
        return rest


class ReasoningTokens:
    """Counts the tokens of the reasoning of one answer, those of its marks included."""

    def __init__(self, tokenizer: Tokenizer, answer: ReasonedAnswer) -> None:
        """``answer`` reads each text before this reads its tokens."""
        self._detokenizer = Detokenizer(tokenizer)
        self._answer = answer
        self._length = 0  # characters of the tokens so far
        self._ahead: deque[int] = deque()  # where tokens begin whose text has not been parsed yet
        self._is_done = False
        self.number = 0

    def read(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Count new tokens; the last ones belong to a reasoning that has not ended."""
        if self._is_done:
            return
        for token in token_ids:
            self._ahead.append(self._length)
            self._length += len(self._detokenizer.push(token))
        while self._ahead and self._ahead[0] < self._answer.num_read:
            self._ahead.popleft()
            self.number += 1
        self._is_done = self._answer.has_ended
        if not self._is_done and is_last and self._answer.num_read:
            self.number += len(self._ahead)
