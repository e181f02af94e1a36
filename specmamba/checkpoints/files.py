"""The files of a checkpoint's folder, bounded before they are read."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from specmamba.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
GGUF_FILE = "model.gguf"  # a link, in a folder that was made for a GGUF file

# Several times the sizes in the largest published checkpoints.
MAX_TEXT_BYTES = 256 << 20  # tokenizer.json, vocabularies, merges
MAX_JSON_BYTES = 64 << 20  # configs and the index of the shards
MAX_JSON_VALUES = 1 << 23  # of one file; a list of three bytes takes 64 bytes of memory when it has been parsed
_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in ``file``, of ``max_bytes`` at the most.

    Raises:
        CheckpointError: the file is missing, unreadable or too large, or does not hold a JSON object.
    """
    try:
        require_file(file, max_bytes)
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}: it is not a complete checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} should hold a JSON object, but holds a {type(value).__name__}")
    return value


def require_file(file: Path, max_bytes: int | None = None) -> None:
    """Refuse pipes and devices, of which reading never ends, and files that are too large for their kind.

    Links are followed, because the hub's own cache consists of links.

    Raises:
        CheckpointError: it is not a regular file, or larger than ``max_bytes``.
        OSError: it does not exist, or its status cannot be read.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} cannot be read: it is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise CheckpointError(f"{file} has {status.st_size} bytes; {max_bytes} is the most that is read")


def require_bounded_folder(folder: Path) -> None:
    """Refuse folders with text files that are too large to be read or parsed as a whole. Raises CheckpointError."""
    for file in (file for pattern in _TEXT_FILES for file in folder.glob(pattern)):
        try:
            require_file(file, MAX_TEXT_BYTES)
            if file.suffix == ".json":
                _require_few_values(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def _require_few_values(file: Path) -> None:
    """Raise CheckpointError for a JSON file with too many lists, objects and elements of them."""
    text = file.read_bytes()
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > MAX_JSON_VALUES:
        raise CheckpointError(f"{file} has {count} values; {MAX_JSON_VALUES} are the most that is read")


def is_bare(folder: Path) -> bool:
    """Whether a folder has a config.json, and no weights in a format that is read or refused."""
    weights = ("*.safetensors", "*.gguf", *PICKLES)
    has_weights = (folder / INDEX_FILE).exists() or any(any(folder.glob(pattern)) for pattern in weights)
    return (folder / "config.json").exists() and not has_weights


def require_safetensors(folder: Path) -> None:
    """Raise CheckpointError for a folder without safetensors; the message names a GGUF or pickle file in it."""
    if any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE, GGUF_FILE)):
        return
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{folder} has no {SINGLE_FILE}, but GGUF files: name one of them, such as {ggufs[0]}")
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    refused = f"; {pickles[0]} is refused, since loading a pickle runs code from it" if pickles else ""
    raise CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{refused}: specmamba reads safetensors and GGUF only"
    )
