"""What the flags and the environment say of a Mooncake Store, under the names that SGLang has for them."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmamba.errors import ConfigError

EXTRA_FLAG = "--hicache-storage-backend-extra-config"
KEY_FLAG = "--hicache-storage-key-file"
MIN_KEY = 16  # characters
# names in the JSON of the flag, the environment's, and defaults; None: it must be given
_NAMES: dict[str, tuple[str, Any]] = {
    "master_server_address": ("MOONCAKE_MASTER", None),
    "local_hostname": ("MOONCAKE_LOCAL_HOSTNAME", "localhost"),
    "metadata_server": ("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
    "protocol": ("MOONCAKE_PROTOCOL", "tcp"),
    "device_name": ("MOONCAKE_DEVICE", ""),
    "global_segment_size": ("MOONCAKE_GLOBAL_SEGMENT_SIZE", 0),
    "local_buffer_size": ("MOONCAKE_LOCAL_BUFFER_SIZE", 256 << 20),
}
_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store is reached, and what this process lends to it."""

    master_server_address: str  # host:port
    local_hostname: str  # by which other machines reach this one
    metadata_server: str
    protocol: str
    device_name: str
    global_segment_size: int  # bytes of this process's memory that become the store's; they go with the process
    local_buffer_size: int  # bytes through which objects are read and written

    @classmethod
    def of(cls, extra_config: str | None, environment: Mapping[str, str] = os.environ) -> StoreSettings:
        """Read the JSON of the flag, then the environment.

        Raises:
            ConfigError: it is no JSON object, has unknown names or values, or does not name the master.
        """
        given = _json_object(extra_config)
        if unknown := sorted(given.keys() - _NAMES.keys()):
            raise ConfigError(f"{EXTRA_FLAG}: it has {', '.join(unknown)}; there are {', '.join(_NAMES)}")
        values: dict[str, Any] = {}
        for name, (variable, default) in _NAMES.items():
            value = given.get(name, environment.get(variable, default))
            if value is None:
                raise ConfigError(
                    f"--hicache-storage-backend mooncake: where is its master? Give it as {name} in {EXTRA_FLAG}, or "
                    f"as {variable}: host:port"
                )
            values[name] = _size(name, value) if name.endswith("_size") else _text(name, value)
        settings = cls(**values)
        if not settings.local_buffer_size:
            raise ConfigError(f"{EXTRA_FLAG}: local_buffer_size is 0, but entries are read and written through it")
        _ = settings.master
        return settings

    @property
    def master(self) -> tuple[str, int]:
        """Host and port of the master. Raises ConfigError: the address is none."""
        host, _, port = self.master_server_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{EXTRA_FLAG}: master_server_address {self.master_server_address!r} is not host:port")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """What servers that share a store derive from the key that they share."""

    texts: bytes  # for the hashes of texts
    entries: bytes  # for the signatures of entries

    @classmethod
    def read(cls, file: Path) -> StoreKeys:
        """Read the file of the key. Raises ConfigError: it cannot be read, or is too short."""
        try:
            key = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{KEY_FLAG} {file}: it cannot be read: {error.strerror}") from None
        if len(key) < MIN_KEY:
            raise ConfigError(f"{KEY_FLAG} {file}: a key has {MIN_KEY} characters or more")
        texts, entries = (hmac.digest(key, b"specmamba " + of, hashlib.sha256) for of in (b"texts", b"entries"))
        return cls(texts, entries)


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{EXTRA_FLAG}: this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{EXTRA_FLAG}: give a JSON object")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{EXTRA_FLAG}: {name} is a text, not {value!r}")
    return value


def _size(name: str, value: object) -> int:
    """Read bytes as a number, or with a unit: "4gb"."""
    match = re.fullmatch(r"(\d{1,18})\s*([a-z]{0,2})", str(value).lower()) if isinstance(value, int | str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{EXTRA_FLAG}: {name} {value!r} is no size: give bytes, or a number of mb or gb")
    return int(match[1]) * _UNITS[match[2]]
