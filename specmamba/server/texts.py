"""Texts to tokens for the routes: a large one holds up nobody, and one that cannot fit is not encoded at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specmamba.models.tokenizer import Tokenizer
from specmamba.server.errors import ApiError

T = TypeVar("T")

# Characters, or tokens. Handing fewer than the first to a thread would take longer than to work on them.
_SMALL, _LARGE = 1000, 65_536
# Large texts take tens of bytes of memory for each of their characters: only so many at a time, the others wait.
_FOR_LARGE = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large-texts")


async def off_loop(size: int, function: Callable[..., T], *args: object) -> T:
    """Call a function on ``size`` characters or tokens: at once where it has little to do, else on a thread."""
    if size <= _SMALL:
        return function(*args)
    pool = _FOR_LARGE if size > _LARGE else None
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)


def check_fits(tokenizer: Tokenizer, text: str, context_length: int) -> None:
    """Raises ApiError 400 for a text that is longer than ``context_length`` tokens can be."""
    most = tokenizer.most_characters(context_length)
    if most is not None and len(text) > most:
        message = (
            f"the prompt has {len(text)} characters, but at most {context_length - 1} tokens fit, and these "
            f"never have more than {most} characters: "
            "shorten it, or serve with a larger --context-length / --max-total-tokens"
        )
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


async def encode_prompt(tokenizer: Tokenizer, text: str, context_length: int, add_special_tokens: bool) -> list[int]:
    """The tokens of a text that the model is to continue.

    Raises:
        ApiError: 400; it cannot fit. (One that fits nearly may still turn out to be too long.)
        RequestError: it is not valid Unicode.
    """
    check_fits(tokenizer, text, context_length)
    return await off_loop(len(text), tokenizer.encode, text, add_special_tokens)
