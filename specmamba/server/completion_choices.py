"""The choices of a completion, written piece by piece: text, what is echoed, log-probabilities, tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from specmamba.core import OutputDelta, TokenLogprob
from specmamba.models.tokenizer import Tokenizer
from specmamba.server.logprobs import completion_logprobs, joined
from specmamba.server.protocol import CompletionRequest
from specmamba.server.responses import CompletionChoice, CompletionLogprobs, EndReason, TokenPiece
from specmamba.server.token_pieces import TokenPieces, prompt_offsets


def end_reason(delta: OutputDelta) -> EndReason | None:
    """The reason as OpenAI knows it; "abort" and "error" have become errors before they get here."""
    return delta.finish_reason if delta.finish_reason in ("stop", "length") else None


class EchoedPrompt:
    """A prompt that stands in front of its answers: as it was sent, or what its tokens say, special ones included."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | Sequence[int], tokens: Sequence[int]) -> None:
        self._tokenizer, self._prompt, self._tokens = tokenizer, prompt, tokens

    @cached_property
    def text(self) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        return self._tokenizer.decode(self._prompt, skip_special_tokens=False)

    @cached_property
    def _offsets(self) -> list[int]:
        return prompt_offsets(self._tokenizer, self._tokens, self.text)

    def logprobs(self, entries: Sequence[TokenLogprob | None], num_top: int) -> CompletionLogprobs:
        """Of the prompt's tokens; the first one has none."""
        written = completion_logprobs(self._tokenizer, self._tokens, entries, num_top)
        return written.model_copy(update={"text_offset": self._offsets})


class ChoiceWriter:
    """Writes one choice from the deltas of its request, which come in order: all at once, or a chunk for each."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, hidden: Collection[int], echo: EchoedPrompt | None
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = body.logprobs
        self._with_tokens = bool(body.return_tokens)
        self._echo = echo
        self._pieces = TokenPieces(tokenizer, hidden)
        self._length = 0  # characters written, those of an echo included
        self._offset = 0  # of the next token; ahead of the length while text is held back

    def write_text(self, delta: OutputDelta) -> str | None:
        """The next piece where it is text and nothing else; None: ``write`` has to write it."""
        has_more = self._with_tokens or self._num_top is not None or self._echo is not None
        return None if has_more or delta.finish_reason is not None else delta.text

    def write(self, index: int, delta: OutputDelta) -> CompletionChoice:
        """The next piece of the choice."""
        echo, self._echo = self._echo, None
        text = delta.text
        if echo is not None:
            text, self._offset = echo.text + text, len(echo.text)
        self._length += len(text)
        needs_pieces = self._with_tokens or self._num_top is not None
        pieces = self._pieces.push(delta) if needs_pieces else []
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(delta, pieces, echo),
            finish_reason=end_reason(delta),
            tokens=pieces if self._with_tokens else None,
        )

    def _logprobs(
        self, delta: OutputDelta, pieces: Sequence[TokenPiece], echo: EchoedPrompt | None
    ) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        written = completion_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, self._num_top)
        written.text_offset = self._offsets(pieces, delta.finish_reason is not None)
        if echo is None:
            return written
        return joined(echo.logprobs(delta.prompt_logprobs or (), self._num_top), written)

    def _offsets(self, pieces: Sequence[TokenPiece], is_last: bool) -> list[int]:
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(piece.text)
        # what a stop string cut off has no place in the text
        return [min(offset, self._length) for offset in offsets] if is_last else offsets
