"""A conversation: its messages, its answers one after the other, and the figures of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from specmamba.errors import ConfigError
from specmamba.terminal.answer_source import WHAT_TO_DO, AnswerEnd, AnswerError, AnswerSource, Piece, Reasoning
from specmamba.terminal.chat_settings import ChatSettings
from specmamba.terminal.remote_source import request_fields

Show = Callable[[str | Reasoning], None]


@dataclass
class Answer:
    """An answer while it comes, and afterwards."""

    began_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    ended_at: float | None = None
    pieces: list[str] = field(default_factory=list)
    end: AnswerEnd | None = None  # None: it was stopped, or failed
    has_reasoning: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def seconds(self) -> float:
        return (self.ended_at or time.perf_counter()) - self.began_at


class ChatSession:
    """The messages of a conversation with one source of answers."""

    def __init__(self, source: AnswerSource, settings: ChatSettings, system: str | None = None) -> None:
        self.source = source
        self.settings = settings
        self.system = system
        self.answers: list[Answer] = []  # whole ones, of the whole session
        self._exchanges: list[tuple[str, str]] = []
        self._saved: set[Path] = set()

    @property
    def num_exchanges(self) -> int:
        """Messages that have an answer."""
        return len(self._exchanges)

    def messages(self, new: str | None = None) -> list[dict[str, str]]:
        """The conversation as chat templates and servers take it, a new message at its end."""
        turns = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self._exchanges:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return turns if new is None else [*turns, {"role": "user", "content": new}]

    def ask(self, text: str, show: Show) -> Answer:
        """Get the answer to a message. An answer that is stopped in the middle stays in the conversation as it is.

        Args:
            text: the message.
            show: gets pieces of the answer, and of the reasoning before it.

        Raises:
            AnswerError: there is no answer, or not all of it; the conversation is as before.
            KeyboardInterrupt: the person has stopped it, and the source has given its memory back.
        """
        answer = Answer()
        # closing aborts an answer that Ctrl-C has stopped outside of the generator
        stream = cast(Generator[Piece], self.source.answer(self.messages(text), self.settings.params))
        try:
            with closing(stream) as pieces:
                for piece in pieces:
                    self._take(answer, piece, show)
        except KeyboardInterrupt:
            if answer.text:
                self._exchanges.append((text, answer.text))
            raise
        answer.ended_at = time.perf_counter()
        self._exchanges.append((text, answer.text))
        self.answers.append(answer)
        return answer

    def _take(self, answer: Answer, piece: Piece, show: Show) -> None:
        if isinstance(piece, AnswerEnd):
            answer.end = piece
        elif piece:
            if answer.first_at is None:
                answer.first_at = time.perf_counter()
            if isinstance(piece, Reasoning):
                answer.has_reasoning = True
            else:
                answer.pieces.append(piece)
            show(piece)

    def retry(self, show: Show) -> Answer:
        """Answer the last message again; the old answer stays where the new one fails. Raises as ``ask``."""
        if not self._exchanges:
            raise AnswerError("there is no message to answer again")
        last = self._exchanges.pop()
        before = len(self._exchanges)
        try:
            return self.ask(last[0], show)
        finally:
            if len(self._exchanges) == before:
                self._exchanges.append(last)

    def undo(self) -> str:
        """Take the last message and its answer back. Returns the message. Raises AnswerError where there is none."""
        if not self._exchanges:
            raise AnswerError("there is nothing to take back")
        return self._exchanges.pop()[0]

    def reset(self) -> None:
        """Begin a new conversation under the same system message."""
        self._exchanges.clear()

    def save(self, file: Path) -> None:
        """Write the conversation as the body of a request to ``/v1/chat/completions``.

        Raises:
            ConfigError: the file exists and is not of this session, or cannot be written.
        """
        try:
            path = file.expanduser().absolute()
        except RuntimeError as error:  # of ~, where a user has no home
            raise ConfigError(f"{file} cannot be written: {error}") from None
        body = {"model": self.source.model, "messages": self.messages(), **request_fields(self.settings.params)}
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf8") as stream:
                stream.write(json.dumps(body, indent=2) + "\n")
        except FileExistsError:
            raise ConfigError(f"{file} exists: name another file") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
        except ValueError as error:  # a null character
            raise ConfigError(f"{str(file)!r} is no name of a file: {error}") from None
        self._saved.add(path)

    def cut_off(self, answer: Answer) -> str | None:
        """Why an answer ends before its time, and what to do; None: it does not."""
        end = answer.end
        if end is None or end.finish_reason != "length":
            return None
        where = "cut off in its reasoning, before the answer" if answer.has_reasoning and not answer.text else "cut off"
        if end.num_output_tokens and end.num_output_tokens < self.settings.params.max_tokens:
            return (
                f"{where}: the context is full ({end.num_prompt_tokens + end.num_output_tokens} tokens); {WHAT_TO_DO}"
            )
        return f"{where}: max_tokens is {self.settings.params.max_tokens}; /set max_tokens N allows more"
