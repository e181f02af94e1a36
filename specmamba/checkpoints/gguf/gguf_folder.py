"""What a checkpoint's folder has beside its weights, made from the metadata of a GGUF file."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from specmamba.checkpoints.files import GGUF_FILE
from specmamba.checkpoints.gguf.header import read_header, require_architecture
from specmamba.errors import CheckpointError
from specmamba.kernels.native import levels, library

SAMPLE_BYTES = 1 << 20  # of the file, for its digest
VERSION = "1"  # of what is written
ARCHITECTURES = ("qwen35", "qwen35moe", "lfm2")


def folder_of(file: Path) -> Path:
    """Find or make a folder with the config and the tokenizer of a GGUF file, and a link to the file.

    Raises:
        CheckpointError: the file is truncated or damaged, or the folder cannot be written.
        UnsupportedModelError: its architecture, or a type of its tensors, is not known.
    """
    folder = cache_folder() / _digest(file)
    if _stands_for(folder, file):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        advice = "XDG_CACHE_HOME names another place for it"
        raise CheckpointError(f"{folder.parent} cannot be written: {error.strerror}; {advice}") from None
    try:
        _write(file, made)
        if not _stands_for(folder, file):  # else another process has made it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    except OSError as error:
        if not _stands_for(folder, file):
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _stands_for(folder: Path, file: Path) -> bool:
    """Whether this folder has been made for a file."""
    return (folder / GGUF_FILE).resolve() == file.resolve() and (folder / "config.json").exists()


def cache_folder() -> Path:
    """Where such folders lie. Raises CheckpointError where others could have written them."""
    try:
        return library.cache_folder() / "gguf"
    except levels.NativeUnavailableError as error:
        raise CheckpointError(f"no config can be kept for a GGUF file: {error}") from None


def _digest(file: Path) -> str:
    """Of the place of a file, its size, and its header, which comes first."""
    status = file.stat()
    with file.open("rb") as opened:
        sample = opened.read(SAMPLE_BYTES)
    text = f"{VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(text + sample).hexdigest()[:32]


def _write(file: Path, folder: Path) -> None:
    """Write config, tokenizer and link."""
    from transformers.integrations.gguf.gguf_config_mapping import get_gguf_config

    header = read_header(file)
    require_architecture(file, header, ARCHITECTURES)
    metadata, architecture = header.metadata, header.architecture
    try:
        config: dict[str, Any] = get_gguf_config(metadata, tuple(header.tensors))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{file}: its metadata do not describe a {architecture} model: {error!r}") from None
    config["mtp_num_hidden_layers"] = metadata.get(f"{architecture}.nextn_predict_layers", 0)
    config["dtype"] = str(header.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(file, folder)
    (folder / GGUF_FILE).symlink_to(file.resolve())


def _write_tokenizer(file: Path, folder: Path) -> None:
    """Let transformers make the tokenizer, and save it."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    # What the metadata hold reaches several libraries, which raise exceptions of any type.
    except Exception as error:
        raise CheckpointError(f"{file}: no tokenizer can be made of its metadata: {error!r}") from error
