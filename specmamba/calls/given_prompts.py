"""Prompts as Python callers write them: a text, token ids, or a mapping that has one of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from specmamba.errors import RequestError

Message = Mapping[str, Any]
# a text, token ids, or a mapping that has one of them as "prompt" or "prompt_token_ids", and perhaps a "cache_salt"
Prompt = str | Sequence[int] | Mapping[str, Any]
# one or several, with a single kind of sequence in it: else type checkers infer no type for a list of mappings
Prompts = str | Mapping[str, Any] | Sequence[int | Prompt]

_KINDS = ("prompt", "prompt_token_ids")
_FORMS = 'a prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt: ``content`` is its text or its token ids."""

    content: str | list[int]
    cache_salt: str | None = None

    def prefix_key(self, extra_key: str | None) -> str | None:
        """What cached prefixes are kept apart by: a key of the call, and the prompt's own salt."""
        return extra_key if self.cache_salt is None else json.dumps([self.cache_salt, extra_key])


def read_prompts(prompts: Prompts) -> list[GivenPrompt]:
    """Read one prompt or several.

    Raises:
        RequestError: one of them is no prompt, or a mapping with other keys than ``prompt`` or ``prompt_token_ids``,
            and ``cache_salt``.
    """
    if isinstance(prompts, str | Mapping):
        return [read_prompt(prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"{_FORMS}, not {prompts!r:.80}", "prompt")
    items: list[Any] = list(prompts)
    return [read_prompt(item) for item in ([items] if items and all(map(_is_token, items)) else items)]


def read_prompt(prompt: object) -> GivenPrompt:
    """Read one prompt. Raises RequestError as ``read_prompts``."""
    if not isinstance(prompt, Mapping):
        return GivenPrompt(_content(prompt))
    given = [kind for kind in _KINDS if kind in prompt]
    if others := [key for key in prompt if key not in (*_KINDS, "cache_salt")]:
        raise RequestError(f"a prompt has no {', '.join(map(repr, others))}: {_FORMS}, and cache_salt", "prompt")
    if len(given) != 1:
        raise RequestError(f"a prompt that is a mapping has one of 'prompt' and 'prompt_token_ids': {_FORMS}", "prompt")
    content = prompt[given[0]]
    if isinstance(content, str) != (given[0] == "prompt"):
        expected = "a text" if given[0] == "prompt" else "a list of token ids"
        raise RequestError(f"{given[0]!r} must be {expected}, not {content!r:.80}", "prompt")
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"'cache_salt' must be a text that is not empty, not {salt!r:.80}", "cache_salt")
    return GivenPrompt(_content(content), salt)


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list of conversations.

    Raises:
        RequestError: a conversation is no list of messages, or a message no mapping.
    """
    given: Any = [messages] if any(isinstance(item, Mapping) for item in messages) else list(messages)
    for one in given:
        if isinstance(one, str) or not all(isinstance(message, Mapping) for message in one):
            raise RequestError('a conversation is a list of messages like {"role": "user", "content": ...}', "messages")
    return given if messages else []


def _content(prompt: object) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    tokens: list[Any] | None = list(prompt) if isinstance(prompt, Iterable) else None
    if tokens is None or not all(map(_is_token, tokens)):
        raise RequestError(f"{_FORMS}, not {prompt!r:.80}", "prompt")
    return [int(token) for token in tokens]


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # includes the integers of NumPy
