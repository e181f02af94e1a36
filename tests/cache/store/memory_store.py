"""A store in memory with the calls of Mooncake's library that are used, and ways to make it fail."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MASTER_GONE = -900
NO_SPACE = -200


@dataclass
class StoreMemory:
    """The objects of a store, and what is wrong with it."""

    objects: dict[str, bytes] = field(default_factory=dict)
    max_bytes: int = 1 << 30
    is_away: bool = False
    answers: threading.Event = field(default_factory=threading.Event)  # cleared: every call waits
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.answers.set()

    def names(self, kind: str) -> list[str]:
        return sorted(name for name in self.objects if f"-{kind}-" in name)

    def flip(self, name: str, at: int) -> None:
        data = bytearray(self.objects[name])
        data[at] ^= 4
        self.objects[name] = bytes(data)


class MemoryStore:
    """``StoreCalls`` on memory, as one client of several; never closed twice."""

    def __init__(self, memory: StoreMemory) -> None:
        self._memory, self.is_open = memory, True

    def setup(self, *_given: Any) -> int:
        return 0

    def _call(self, name: str) -> bool:
        assert self.is_open
        assert self._memory.answers.wait(60)
        self._memory.calls[name] += 1
        return not self._memory.is_away

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        if not self._call("exist"):
            return [MASTER_GONE] * len(keys)
        return [int(key in self._memory.objects) for key in keys]

    def get_buffer(self, key: str) -> bytes | None:
        return self._memory.objects.get(key) if self._call("get") else None

    def put_parts(self, key: str, *parts: memoryview) -> int:
        if not self._call("put"):
            return MASTER_GONE
        data = b"".join(parts)
        if sum(map(len, self._memory.objects.values())) + len(data) > self._memory.max_bytes:
            return NO_SPACE
        self._memory.objects.setdefault(key, data)
        return 0

    def remove(self, key: str, force: bool = False) -> int:
        assert force
        if not self._call("remove"):
            return MASTER_GONE
        return 0 if self._memory.objects.pop(key, None) is not None else -704

    def close(self) -> int:
        assert self.is_open
        self.is_open = False
        return 0


def library_on(memory: StoreMemory) -> SimpleNamespace:
    """What stands for the module ``mooncake.store``."""
    return SimpleNamespace(MooncakeDistributedStore=lambda: MemoryStore(memory))
