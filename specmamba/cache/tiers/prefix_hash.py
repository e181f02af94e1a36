"""Keyed hashes of prefixes: what stands for a text where its tokens must not be stored."""

from __future__ import annotations

import hashlib
import json
from copy import copy

import numpy as np

from specmamba.cache.prefix.node import Tokens
from specmamba.cache.tiers.entry import DIGEST_BYTES

HEAD_TOKENS = 16  # the hash of so many tokens finds the entries of a text; shorter texts are not stored
GRID_TOKENS = 64  # a tier that cannot list its entries is asked for the hashes of every so many tokens


def grid_below(length: int) -> int:
    """Return the last length on the grid, ``length`` itself included."""
    return length // GRID_TOKENS * GRID_TOKENS


class PrefixHasher:
    """Hashes of ever longer beginnings of one text.

    They depend on a secret, the tenant and the salt too: without the secret a text cannot be compared with a hash, and
    tenants and salts find nothing of each other.
    """

    def __init__(self, secret: bytes, tenant: str | None, extra_key: str | None, tokens: Tokens) -> None:
        """``tokens`` [n] int64, below 2^31: the text, or as much of it as is known."""
        scope = json.dumps([tenant, extra_key]).encode()
        self._hash = hashlib.blake2b(key=secret, digest_size=DIGEST_BYTES, person=b"specmamba prefix")
        self._hash.update(len(scope).to_bytes(8, "little") + scope)
        self._start = self._hash.copy()
        self._tokens = np.ascontiguousarray(tokens, dtype="<i4")
        self._base = self._length = 0  # tokens before these, and tokens hashed so far

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole text."""
        return self._base + len(self._tokens)

    def restart(self) -> None:
        """Begin with the shortest beginnings again."""
        self._hash, self._length = self._start.copy(), self._base

    def digest(self, length: int) -> bytes:
        """Return the hash of the first ``length`` tokens.

        Raises:
            ValueError: the text is shorter, or a longer beginning was asked for before.
        """
        if not self._length <= length <= self.num_tokens:
            raise ValueError(f"the hash of {length} tokens cannot follow that of {self._length} of {self.num_tokens}")
        self._hash.update(self._tokens[self._length - self._base : length - self._base].data)
        self._length = length
        return self._hash.digest()

    def followed_by(self, tokens: Tokens) -> PrefixHasher:
        """The hasher of this whole text with ``tokens`` [n] int64 behind it, for beginnings that end in them."""
        self.digest(self.num_tokens)
        found = copy(self)
        found._base = found._length = self.num_tokens
        found._tokens = np.ascontiguousarray(tokens, dtype="<i4")
        found._start, found._hash = self._hash.copy(), self._hash.copy()
        return found
