"""Log-probabilities in the shape of OpenAI's completions, and the names of tokens in them."""

from __future__ import annotations

from collections.abc import Sequence

from specmamba.core import TokenLogprob
from specmamba.models.tokenizer import Tokenizer
from specmamba.server.responses import CompletionLogprobs

# Stands for a token that the model holds to be impossible: JSON has no infinity.
LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """A log-probability as JSON can write it."""
    return max(logprob, LEAST_LOGPROB)


def token_string(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A name for a token: its text, ``bytes:\xe4`` where its bytes are none, ``token_id:7`` where it has no bytes."""
    data = tokenizer.token_bytes(token_id)
    if data is None:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], num_top: int
) -> CompletionLogprobs:
    """Of ``tokens``, each with its entry and as many of the likeliest. Offsets are 0: the caller sets them."""
    return CompletionLogprobs(
        tokens=[token_string(tokenizer, token) for token in tokens],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in logprobs],
        top_logprobs=[_top(tokenizer, entry, num_top) for entry in logprobs] if num_top else None,
        text_offset=[0] * len(tokens),
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Both, one after the other."""
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )


def _top(tokenizer: Tokenizer, entry: TokenLogprob | None, num_top: int) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    # the likeliest first, so that of two tokens with one name it is the one that stays
    for token, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
        top.setdefault(token_string(tokenizer, token), finite(logprob))
    return top
