"""Objects in a Mooncake Store: the few calls of its library that are used, and what their results mean."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, Protocol

from specmamba.cache.tiers.store.store_settings import StoreSettings
from specmamba.errors import ConfigError

CONNECT_S = 3.0  # to the master, at the start
RPC_TIMEOUT_MS = 5000  # of a question to the master; the library's own default is half a minute
# the library's codes:
_NO_SPACE = (-101, -200)  # no process lends memory to the store; no memory for the object, here or in the store
_NO_MASTER = (-900, -901)  # a call to the master has failed, or taken too long

StoreFault = Literal["unreachable", "store_full", "failed"]


class StoreError(Exception):
    """The store has not done what it was asked for. ``fault`` is the kind."""

    def __init__(self, fault: StoreFault, message: str) -> None:
        super().__init__(message)
        self.fault: StoreFault = fault


class StoreCalls(Protocol):
    """What is used of ``mooncake.store.MooncakeDistributedStore``. An object is written once, and never changed."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """For each object 1: it exists, 0: it does not, or a negative code."""
        ...

    def get_buffer(self, key: str) -> Any:
        """Return an object as a buffer that Python can look into; None: it is not there, or cannot be read."""
        ...

    def put_parts(self, key: str, *parts: memoryview) -> int:
        """Write an object; 0, also where it exists already, or a negative code."""
        ...

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object, with ``force`` also one that is being read; 0 or a negative code."""
        ...

    def close(self) -> int:
        """Leave the store."""
        ...


class ObjectStore:
    """Objects by name. Every method but ``close`` may raise StoreError; several threads may call."""

    def __init__(self, calls: StoreCalls, max_bytes: int) -> None:
        """``max_bytes``: of an object."""
        self._calls, self.max_bytes = calls, max_bytes

    def have(self, names: Sequence[str]) -> list[bool]:
        """Return which objects exist, and note that they are used."""
        found = self._calls.batch_is_exist(list(names)) if names else []
        if len(found) != len(names) or any(each not in (0, 1) for each in found):
            raise StoreError("unreachable", "the store does not say what it has")
        return [each == 1 for each in found]

    def get(self, name: str) -> memoryview | None:
        """Return an object; None: there is none."""
        if (buffer := self._calls.get_buffer(name)) is not None:
            return memoryview(buffer).cast("B")
        if self.have([name])[0]:
            raise StoreError("failed", "an object is there, but cannot be read")
        return None

    def put(self, name: str, *parts: memoryview) -> None:
        """Write an object, unless there is one of this name."""
        code = self._calls.put_parts(name, *parts)
        if code in _NO_SPACE:
            raise StoreError("store_full", "the store has no room")
        if code in _NO_MASTER:
            raise StoreError("unreachable", f"the master does not answer ({code})")
        if code:
            raise StoreError("failed", f"the store has not taken an object ({code})")

    def remove(self, *names: str) -> None:
        """Remove objects that exist, also those that others read."""
        for name in names:
            if self._calls.remove(name, force=True) in _NO_MASTER:
                raise StoreError("unreachable", "the master does not answer")

    def close(self) -> None:
        """Leave the store."""
        self._calls.close()


def require_store(settings: StoreSettings) -> None:
    """Raise ConfigError if the library is missing, or no master listens; this takes ``CONNECT_S`` at the most."""
    _library()
    try:
        socket.create_connection(settings.master, CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--hicache-storage-backend mooncake: no master is reached at {settings.master_server_address} ({error}): "
            "start mooncake_master, or correct master_server_address"
        ) from None


def open_store(settings: StoreSettings) -> ObjectStore:
    """Join a store. Raises ConfigError: the library is missing, or it does not work."""
    store = _library().MooncakeDistributedStore()
    code = store.setup(
        settings.local_hostname,
        settings.metadata_server,
        settings.global_segment_size,
        settings.local_buffer_size,
        settings.protocol,
        settings.device_name,
        settings.master_server_address,
    )
    if code:
        raise ConfigError(
            f"--hicache-storage-backend mooncake: the store at {settings.master_server_address} cannot be joined "
            f"(code {code}; the library's own lines say more)"
        )
    return ObjectStore(store, settings.local_buffer_size)


def _library() -> Any:
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(RPC_TIMEOUT_MS))
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", str(RPC_TIMEOUT_MS))
    try:
        return import_module("mooncake.store")
    except ImportError as error:  # the package, or a library of the system that it needs
        raise ConfigError(
            f"--hicache-storage-backend mooncake: its library cannot be loaded ({error}): pip install "
            "'specmamba[mooncake]', and the system's packages libibverbs1 and librdmacm1"
        ) from None
