"""Text to tokens and back: whole texts with ``Tokenizer``, one token at a time with ``Detokenizer``."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specmamba.errors import RequestError
from specmamba.models.text.infill import Infill
from specmamba.models.text.special_text import SpecialText
from specmamba.models.text.text_growth import growth
from specmamba.models.text.tokenizer_backend import (
    BackendError,
    TokenBytes,
    guarded,
    has_tokenizer,
    load_tokenizer,
    longest_token,
    parts,
)
from specmamba.sampling_params import THINK, THINK_END
from specmamba.templates.rendering import Conversation, RenderedChat, render

__all__ = ["Detokenizer", "Tokenizer", "has_tokenizer"]

logger = logging.getLogger("specmamba")

REPLACEMENT = "\ufffd"
# Texts above this many characters or tokens are encoded as batches of one: only batches let other threads run
# meanwhile.
_LONG = 4096
# Characters of a normalized text, for tokenizers that make texts longer. Each takes 330 bytes of memory where
# it becomes a token. Texts that do not grow are bounded by --max-request-bytes.
MAX_GROWN = 8 << 20
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Some checkpoints declare these special, but they are part of the answer.
ANSWER_TOKENS = frozenset({"<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", THINK, THINK_END})


class Tokenizer:
    """The tokenizer of a checkpoint folder. Safe to share between threads: nothing changes after construction.

    Raises:
        CheckpointError: the folder has no tokenizer, or one that cannot be loaded without running code from the folder,
            or one that makes texts much longer (``text_growth``).
    """

    has_text = True  # of tokens; False: texts are refused

    def __init__(self, folder: Path) -> None:
        loaded = load_tokenizer(folder)
        self._loaded = loaded
        # The backend is called directly: transformers' own encode() sets padding and truncation on it in every call,
        # which is not safe between threads.
        self._backend = loaded.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._special_ids = frozenset(
            i
            for i, token in loaded.added_tokens_decoder.items()
            if token.special and token.content not in ANSWER_TOKENS
        )
        self._special_text = SpecialText(self._backend, loaded.added_tokens_decoder, self._special_ids)
        self._growth = growth(parts(self._backend))
        vocab: dict[str, int] = self._backend.get_vocab()
        self._byte_ids = frozenset(i for token, i in vocab.items() if BYTE_TOKEN.fullmatch(token))
        self.infill = Infill.of(vocab)  # None: prompts with a gap are not possible
        self._bytes = TokenBytes(self._backend)
        self._longest_token = longest_token(self._backend)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, the added ones included. The model's embedding may have more rows."""
        return len(self._loaded)

    def token_ids(self) -> dict[str, int]:
        """All tokens, the added ones included, and their ids."""
        return dict(self._backend.get_vocab())

    @property
    def has_chat_template(self) -> bool:
        return bool(self._loaded.chat_template)

    def chat_template(self, with_tools: bool = False) -> str | None:
        """The Jinja template that renders a conversation; some checkpoints have another one for tools. None: none."""
        try:
            template: str = self._loaded.get_chat_template(tools=[] if with_tools else None)
        except ValueError:  # no template, or none for conversations without tools
            return None
        return template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a plain prompt, with the special tokens that the checkpoint's settings add.

        Raises:
            RequestError: the text is not valid Unicode (it has half of a surrogate pair), too long for a tokenizer that
                makes texts longer, or the tokenizer fails.
        """
        return self._encode(text, "prompt", add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens to text. Bytes that are not UTF-8 become U+FFFD; ids without a token are left out.

        Raises:
            RequestError: the tokenizer fails.
        """
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self._special_ids]
        ids = list(token_ids)
        try:
            if len(ids) > _LONG:
                texts: list[str] = guarded(self._backend.decode_batch, [ids], skip_special_tokens=False)
                return texts[0]
            text: str = guarded(self._backend.decode, ids, skip_special_tokens=False)
            return text
        except BackendError as error:
            logger.warning("the tokenizer cannot decode tokens: %s", error)
            raise RequestError(f"the tokenizer cannot decode these tokens: {error}") from error

    def require_text(self, what: str, param: str) -> None:
        """Check that texts can be read and written.

        Raises:
            RequestError: they cannot, as no tokenizer was read; ``what`` says what needs one.
        """

    def most_characters(self, num_tokens: int) -> int | None:
        """An upper bound of the characters of a text of so many tokens; None: no bound is known."""
        return None if self._longest_token is None else num_tokens * self._longest_token

    @property
    def is_byte_level(self) -> bool:
        """Whether a text is the bytes of its tokens, read as UTF-8."""
        return self._bytes.are_text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of one token inside a text, perhaps a part of a character; None: there is no such token."""
        return self._bytes.of(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        allow_special_tokens: bool = False,
    ) -> list[int]:
        """Render and encode a conversation in this process, up to the beginning of the assistant's answer.

        Raises:
            RequestError: as ``conversation``; the template refuses the messages or variables.
        """
        return self.encode_chat(render(self.conversation(messages, tools, variables, allow_special_tokens)))

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        allow_special_tokens: bool = False,
    ) -> Conversation:
        """A conversation, ready to be rendered.

        Args:
            messages: the turns, oldest first.
            tools: passed to the template.
            variables: read by the template alone (such as ``enable_thinking``).
            allow_special_tokens: whether special tokens that are written in the other arguments act as such. By default
                they are text.

        Raises:
            RequestError: the checkpoint has no chat template.
        """
        template = self.chat_template(with_tools=tools is not None)
        if template is None:
            raise RequestError("this model has no chat template: send a prompt to /v1/completions instead", "messages")
        conversation = Conversation(template, self._loaded.special_tokens_map, messages, tools, variables or {})
        return conversation if allow_special_tokens else self._special_text.marked(conversation)

    def encode_chat(self, rendered: RenderedChat) -> list[int]:
        """Encode a rendered conversation, which has the special tokens already. Those with a mark become text.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        special = self._special_text
        if not special.has_text(rendered):
            return self._encode(rendered.text, "messages", add_special_tokens=False)
        return special.real_ids(self._encode(special.signed(rendered), "messages", False, special.backend))

    def shown_bytes(self, token_ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        """The bytes of the tokens that ``decode`` does not leave out, of a byte-level vocabulary."""
        hidden, of = self._special_ids if skip_special_tokens else (), self._bytes.of
        return b"".join([of(token_id) or b"" for token_id in token_ids if token_id not in hidden])

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether ``decode`` leaves this token out."""
        if token_id in self._special_ids:
            return skip_special_tokens
        return self._bytes.of(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether this token is one byte of a vocabulary that spells unknown characters as ``<0xE4>``."""
        return token_id in self._byte_ids

    def _encode(self, text: str, param: str, add_special_tokens: bool, backend: Any = None) -> list[int]:
        backend = self._backend if backend is None else backend
        try:
            text.encode("utf8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode at character {error.start}", param) from None
        if self._growth > 1 and len(text) * self._growth > MAX_GROWN:
            most = int(MAX_GROWN / self._growth)
            raise RequestError(f"the text has {len(text)} characters; this tokenizer takes {most} at the most", param)
        options = {"add_special_tokens": add_special_tokens}
        try:
            if len(text) > _LONG:  # without offsets, which take most of the memory
                encoding: Any = guarded(backend.encode_batch_fast, [text], **options)[0]
            else:
                encoding = guarded(backend.encode, text, **options)
        except BackendError as error:
            logger.warning("the tokenizer cannot encode a text of %d characters: %s", len(text), error)
            raise RequestError(f"the tokenizer cannot encode this text: {error}", param) from error
        ids: list[int] = encoding.ids
        return ids


class Detokenizer:
    """Decodes one request token by token. The results of ``push`` and ``flush``, joined, are ``decode`` of all tokens.

    Of a byte-level vocabulary, the bytes of a token go through a UTF-8 decoder. Of others each push decodes a short
    window of the newest tokens, so its cost does not grow with the text. An incomplete character shows as one U+FFFD at
    the end of the window. Only that one is held back, so that invalid text neither slows the stream down nor stops it.
    (``DecodeStream`` of tokenizers holds back all text since the last valid character, and decodes all of it again with
    each token.)
    """

    # A character has at most four bytes and a token at least one, so the last four tokens determine where the next
    # character begins. The window is cut back to them whenever it has doubled.
    CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_final = 0  # characters of the window's text that were returned already
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None

    def push(self, token_id: int) -> str:
        """Add a token; gives the text that has become final, often that of one token, sometimes none."""
        if self._tokenizer.is_silent(token_id, self._skip_special_tokens):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id) or b"")
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""  # such bytes are decoded as a whole run, and one invalid byte changes the text of all
        text = self._final_text()
        new = text[self._num_final :]
        self._num_final = len(text)
        if len(self._window) >= 2 * self.CONTEXT:
            self._window = self._window[-self.CONTEXT :]
            self._num_final = len(self._final_text())
        return new

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens in order; gives what ``push`` gives for them, joined."""
        if self._utf8 is None:
            return "".join([self.push(token_id) for token_id in token_ids])
        return self._utf8.decode(self._tokenizer.shown_bytes(token_ids, self._skip_special_tokens))

    def flush(self) -> str:
        """The text that is still held back, after the last token."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        new = self._decode()[self._num_final :]
        self._num_final += len(new)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)

    def _final_text(self) -> str:
        return self._decode().removesuffix(REPLACEMENT)
