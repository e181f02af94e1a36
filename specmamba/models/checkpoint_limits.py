"""What a checkpoint's files may ask for before anything of them is believed: sizes, counts, and being files at all."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specmamba.errors import CheckpointError

# Several times what the largest published checkpoints have.
MAX_TEXT_BYTES = 256 << 20  # tokenizer.json, vocabularies, merges
MAX_JSON_BYTES = 64 << 20  # configs and the index of the shards
MAX_HEADER_BYTES = 64 << 20  # of a safetensors file; the format's library has a limit of its own, 100 MB
MAX_TENSORS = 500_000  # of a file
MAX_LAYERS = 10_000
_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def require_file(file: Path, max_bytes: int | None = None) -> None:
    """Refuse pipes and devices, which would be read for ever, and files that are too large to be what they claim.

    Links are followed: the hub's own cache consists of them.

    Raises:
        CheckpointError: it is no regular file, or larger than ``max_bytes``.
        OSError: it is not there, or cannot be looked at.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise CheckpointError(f"{file} has {status.st_size} bytes; {max_bytes} is the most that is read")


def require_bounded_folder(folder: Path) -> None:
    """Look at the files that are read as a whole, by whatever library. Raises CheckpointError."""
    for file in (file for pattern in _TEXT_FILES for file in folder.glob(pattern)):
        try:
            require_file(file, MAX_TEXT_BYTES)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def require_bounded_header(file: Path) -> None:
    """Look at the length that a safetensors file gives its header, before memory is taken for it.

    Raises:
        CheckpointError: it is no regular file, or its header is too long.
        OSError: it cannot be read.
    """
    require_file(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file: its header would have {length} bytes; "
            f"{MAX_HEADER_BYTES} is the most that is read"
        )


def require_bounded_layers(file: Path, raw: dict[str, Any]) -> None:
    """Refuse a config with more layers than any model: lists of that length are made of it before it is checked.

    Raises:
        CheckpointError: the message names the field.
    """
    for name, value in _fields(raw):
        if "layers" in name and isinstance(value, int) and value > MAX_LAYERS:
            raise CheckpointError(f"{file}: {name} is {value}; {MAX_LAYERS} layers are the most that is read")


def _fields(value: object) -> Iterator[tuple[str, object]]:
    """Every field of nested objects."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, dict):
            yield from current.items()
            waiting.extend(current.values())
        elif isinstance(current, list):
            waiting.extend(current)
