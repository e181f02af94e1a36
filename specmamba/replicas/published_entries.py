"""What the server knows of prefixes in tiers: entries without content, as replicas publish them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmamba.cache.tiers.entry_index import Change, EntryIndex, Stored
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier_writer import MIN_GAIN

Line = Sequence[Any]  # key, and of an entry that has come also parent, start and end


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """What texts are compared with in the tiers of a replica; replicas of one folder have the same."""

    secret: bytes  # key of the hashes
    fingerprint: bytes  # of the layout of entries

    @classmethod
    def of(cls, said: Mapping[str, str] | None) -> TierIdentity | None:
        """What a replica says; None: it has no tiers."""
        return None if said is None else cls(bytes.fromhex(said["secret"]), bytes.fromhex(said["fingerprint"]))

    def message(self) -> dict[str, str]:
        """The same as values of JSON."""
        return {"secret": self.secret.hex(), "fingerprint": self.fingerprint.hex()}


class PublishedEntries:
    """The entries of one tier: of a replica's host memory, or of a folder that several may use."""

    def __init__(self, identity: TierIdentity) -> None:
        """``identity``: of the replicas that use it."""
        self.identity = identity
        self._index = EntryIndex()

    def __len__(self) -> int:
        return len(self._index)

    def update(self, lines: Iterable[Line]) -> None:
        """Take in what has come and gone, as ``lines_of`` wrote it."""
        for line in lines:
            key = bytes.fromhex(line[0])
            if len(line) == 1:
                self._index.remove((self.identity.fingerprint, key))
            else:
                parent, start, end = bytes.fromhex(line[1]), int(line[2]), int(line[3])
                self._index.add(Stored(self.identity.fingerprint, key, parent, start, end, 0, 0, 0, 0))

    def find(self, text: PrefixHasher) -> list[Stored]:
        """The entries that together hold the longest beginning of a text, the first segment first."""
        text.restart()
        return self._index.find(self.identity.fingerprint, text)


def lines_of(changes: Iterable[Change]) -> list[Line]:
    """Changes of a tier as values of JSON."""
    return [
        [name[1].hex()] if entry is None else [name[1].hex(), entry.parent.hex(), entry.start, entry.end]
        for name, entry in changes
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """What a replica has of a prompt, in tokens that need not be computed."""

    in_pools: int = 0
    in_tiers: int = 0  # with what tiers have; as many as in the pools, or more
    keys: tuple[bytes, ...] = ()  # of the entries of a folder that hold them

    def or_chain(self, chain: Sequence[Stored], is_folder: bool) -> Found:
        """The better of this and a chain of a tier: one that adds little to the pools is not loaded."""
        end = chain[-1].end if chain else 0
        if end - self.in_pools < MIN_GAIN or end <= self.in_tiers:
            return self
        return Found(self.in_pools, end, tuple(entry.key for entry in chain) if is_folder else ())
