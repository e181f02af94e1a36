"""What a decode server asks a prefill server for, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specmamba.transfer.peer_link import LinkError


@dataclass(frozen=True, slots=True)
class Source:
    """Where the prompt of a request is, or will be."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a decode server asks for: KV of tokens [start, end) of a prompt, and the state after it."""

    room: int
    text: str  # the hash of the first ``end`` tokens under the key that the servers share, in hex
    layout: str  # the fingerprint, in hex
    start: int
    end: int
    wait_s: float  # how long the answer is waited for

    def message(self) -> dict[str, Any]:
        """It as a message of a link."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Wanted:
        """Read a message. Raises LinkError: it is none."""
        fields = {"room": int, "text": str, "layout": str, "start": int, "end": int, "wait_s": float}
        given: dict[str, Any] = {name: message.get(name) for name in fields}
        if not all(isinstance(given[name], kind) for name, kind in fields.items()):
            raise LinkError("damaged")
        return cls(**given)
