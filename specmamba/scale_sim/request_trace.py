"""Requests to simulate: from a file, or made conversations.

A file is JSON lines in the format of Mooncake's published traces (FAST 2025), one request each:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

``timestamp`` is in milliseconds from the start. ``hash_ids`` name the blocks of the prompt, of ``block_size`` tokens
each, the last one perhaps shorter: equal ids are equal texts. Requests with a ``session_id`` come one after the other:
one without a ``timestamp`` arrives ``delay`` milliseconds (default 0) after the one before it has ended. A trace does
not say what was answered, so no prompt goes on from an output.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from specmamba.cache.prefix.node import Tokens
from specmamba.errors import ConfigError

MAX_TOKENS = 1 << 22  # of one request
MAX_ID = 1 << 40
MAX_MS = 10**12


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: what it reads and writes, and when it arrives."""

    prompt: Tokens  # [n >= 1]
    output: Tokens  # [m >= 1]
    arrival_s: float | None  # from the start; None: ``delay_s`` after the session's request before it has ended
    delay_s: float
    session: str | int | None


def read_trace(path: Path, block_size: int, limit: int | None) -> list[TraceRequest]:
    """Read the first ``limit`` requests of a file, all without a limit.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; the message names the line.
    """
    requests: list[TraceRequest] = []
    sessions: set[str | int] = set()
    fresh = count(-1, -1)  # tokens of outputs, which no prompt has
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) == limit:
                    break
                if line.strip():
                    try:
                        requests.append(_request(json.loads(line), block_size, fresh, sessions))
                    except (ValueError, TypeError, KeyError) as error:
                        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
                        raise ConfigError(f"{path}, line {number}: {reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    if not requests:
        raise ConfigError(f"--trace {path}: there is no request in it")
    return requests


def _request(
    fields: Mapping[str, Any], block_size: int, fresh: Iterator[int], sessions: set[str | int]
) -> TraceRequest:
    if not isinstance(fields, dict):
        raise TypeError("a request is a JSON object")
    num_input = _length(fields, "input_length")
    num_output = _length(fields, "output_length")
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < MAX_ID for each in ids):
        raise ValueError(f"hash_ids: integers from 0 to {MAX_ID} are wanted")
    if len(ids) != -(-num_input // block_size):
        raise ValueError(f"{len(ids)} hash_ids for {num_input} tokens in blocks of {block_size}")
    blocks = np.array(ids, dtype=np.int64)[:, None] * block_size + np.arange(block_size)
    session = fields.get("session_id")
    if session is not None and not isinstance(session, str | int):
        raise TypeError("session_id: a string or an integer is wanted")
    follows = session is not None and session in sessions and "timestamp" not in fields
    if session is not None:
        sessions.add(session)
    return TraceRequest(
        prompt=blocks.reshape(-1)[:num_input],
        output=np.fromiter((next(fresh) for _ in range(num_output)), dtype=np.int64, count=num_output),
        arrival_s=None if follows else _seconds(fields, "timestamp"),
        delay_s=_seconds(fields, "delay") if "delay" in fields else 0.0,
        session=session,
    )


def _length(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}: an integer from 1 to {MAX_TOKENS} is wanted")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if type(value) not in (int, float) or not 0 <= value <= MAX_MS:
        raise ValueError(f"{name}: milliseconds from 0 to {MAX_MS} are wanted")
    return float(value) / 1e3


@dataclass(frozen=True, slots=True)
class Conversations:
    """Sizes of made conversations, in tokens and seconds."""

    number: int
    turns: int
    per_second: float  # that begin, at random times (a Poisson process)
    think_s: float  # between an answer and the next turn
    system_tokens: int
    num_systems: int
    turn_tokens: int
    output_tokens: int


def make_conversations(sizes: Conversations, seed: int) -> list[TraceRequest]:
    """Make conversations: each begins with a system prompt, and each turn is all that was said and a new part.

    Lengths of turns and of answers are drawn between a half and three halves of their sizes. Equal arguments give equal
    requests.
    """
    draw, fresh, begins = random.Random(seed), count(), 0.0
    systems = [_new_tokens(fresh, sizes.system_tokens) for _ in range(sizes.num_systems)]
    requests: list[TraceRequest] = []
    for number in range(sizes.number):
        begins += draw.expovariate(sizes.per_second)
        said: Sequence[Tokens] = [draw.choice(systems)]
        for turn in range(sizes.turns):
            new, answer = (
                _new_tokens(fresh, max(1, round(size * draw.uniform(0.5, 1.5))))
                for size in (sizes.turn_tokens, sizes.output_tokens)
            )
            prompt = np.concatenate([*said, new])
            requests.append(TraceRequest(prompt, answer, None if turn else begins, sizes.think_s, number))
            said = [prompt, answer]
    return requests


def _new_tokens(fresh: Iterator[int], size: int) -> Tokens:
    first = next(fresh)
    for _ in range(size - 1):
        next(fresh)
    return np.arange(first, first + size, dtype=np.int64)
