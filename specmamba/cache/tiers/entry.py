"""Entries: what a cached prefix is outside of the pools, and the layout of its bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
DIGEST_BYTES = 32

Bytes = NDArray[np.uint8]
Buffers = tuple[tuple[Bytes, ...], tuple[Bytes, ...]]  # memory for an entry: an array for each token part, state part


@dataclass(frozen=True, slots=True)
class Part:
    """One array of an entry, in C order, in the bytes of this machine's pools (little-endian).

    ``shape`` of a part that has a row for each token is without the tokens, which come second: [layers, T, ...].
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part, or of one token of it."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class EntryLayout:
    """What the bytes of an entry mean: of which model they are, and their parts in order.

    Pages do not show in it: entries of pools with pages of any size are the same.
    """

    identity: Mapping[str, str]  # the weights, and whatever else changes the numbers: names and values
    token_parts: tuple[Part, ...]  # keys, values and their scales, of the target and the draft
    state_parts: tuple[Part, ...]  # recurrent states, convolution windows, features of the drafter

    @cached_property
    def description(self) -> bytes:
        """The layout as JSON, always the same for the same layout."""
        parts = {
            name: [[part.name, part.dtype, list(part.shape)] for part in group]
            for name, group in (("tokens", self.token_parts), ("state", self.state_parts))
        }
        whole = {"format": FORMAT_VERSION, "identity": dict(self.identity), **parts}
        return json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def fingerprint(self) -> bytes:
        """The digest of the layout. Entries are used by pools of the same fingerprint only."""
        return hashlib.sha256(self.description).digest()

    def new_buffers(self, num_tokens: int) -> Buffers:
        """Allocate memory for an entry of this many tokens."""
        tokens = tuple(np.empty(part.nbytes * num_tokens, dtype=np.uint8) for part in self.token_parts)
        return tokens, tuple(np.empty(part.nbytes, dtype=np.uint8) for part in self.state_parts)

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes of KV and state of an entry of this many tokens."""
        return num_tokens * self.token_bytes + self.state_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, in all parts."""
        return sum(part.nbytes for part in self.token_parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, in all parts."""
        return sum(part.nbytes for part in self.state_parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment of a text, as it leaves the pools: KV of tokens [start, end), and the state after ``end`` tokens.

    The tokens themselves are not in it. ``key`` and ``parent`` are keyed hashes (``PrefixHasher``) of the text's first
    ``end`` and ``start`` tokens, so an entry and those it continues are a chain. A first segment continues nothing: its
    ``start`` is 0, and its ``parent`` is the hash of the text's first ``HEAD_TOKENS`` tokens.
    """

    layout: EntryLayout
    key: bytes
    parent: bytes
    start: int
    end: int
    tokens: tuple[Bytes, ...]  # one for each token part: the bytes of [layers, end - start, ...]
    state: tuple[Bytes, ...] | None  # one for each state part; None: only KV was read
    grid: bytes = b""  # hash of the text up to ``grid_below(end)``, for tiers that cannot list entries; empty: unknown

    @property
    def nbytes(self) -> int:
        """Bytes of KV and state."""
        return sum(part.nbytes for part in (*self.tokens, *(self.state or ())))
