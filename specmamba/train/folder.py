"""The folder of a run: what cannot be written is an error of ``--out``, and a start that fails leaves nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specmamba.errors import ConfigError


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Around everything that is written below ``out``, or read back from there.

    Raises:
        ConfigError: the disk is full, or the folder cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out: {error.filename or out}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"--out: {out}: {error}") from None


@contextmanager
def beginning(out: Path) -> Iterator[None]:
    """Make sure, around the start of a run, that its folder is there and can be written.

    If the start fails, folders that were made for it and are empty are removed.

    Raises:
        ConfigError: it cannot be made or written.
    """
    made = [folder for folder in (out, *out.parents) if not _is_there(folder)]
    try:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _is_there(folder: Path) -> bool:
    """Something that cannot even be looked for counts as there: it is not ours."""
    try:
        return folder.exists()
    except OSError:
        return True
