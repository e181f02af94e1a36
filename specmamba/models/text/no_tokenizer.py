"""What stands in the place of a tokenizer where none is read: tokens have numbers and no texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specmamba.errors import RequestError
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.templates.rendering import Conversation, RenderedChat


class NoTokenizer(Tokenizer):
    """The tokenizer of ``--skip-tokenizer-init``: it refuses texts by name, and every token of an answer is silent."""

    has_text = False
    infill = None

    def __init__(self) -> None:
        """Nothing is read."""

    @property
    def vocab_size(self) -> int:
        return 0

    def token_ids(self) -> dict[str, int]:
        return {}

    @property
    def has_chat_template(self) -> bool:
        return False

    def chat_template(self, with_tools: bool = False) -> None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> NoReturn:
        self.require_text("a prompt that is a text", "prompt")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if token_ids:
            self.require_text("the text of tokens", "tokens")
        return ""

    def require_text(self, what: str, param: str) -> NoReturn:
        raise RequestError(
            f"{what} needs the model's tokenizer, which --skip-tokenizer-init leaves out: send token ids to "
            "/v1/completions",
            param,
        )

    def most_characters(self, num_tokens: int) -> None:
        return None

    @property
    def is_byte_level(self) -> bool:
        return False

    def token_bytes(self, token_id: int) -> None:
        return None

    def apply_chat_template(self, *args: object, **named: object) -> NoReturn:
        self.require_text("a conversation", "messages")

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        allow_special_tokens: bool = False,
    ) -> Conversation:
        self.require_text("a conversation", "messages")

    def encode_chat(self, rendered: RenderedChat) -> NoReturn:
        self.require_text("a conversation", "messages")

    def shown_bytes(self, token_ids: Sequence[int], skip_special_tokens: bool) -> bytes:
        return b""

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        return True

    def is_byte(self, token_id: int) -> bool:
        return False
