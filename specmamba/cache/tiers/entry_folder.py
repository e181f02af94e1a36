"""The files of a folder of entries. Several processes may use one folder."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from specmamba.cache.tiers.codec import EntryError, Header, read_header
from specmamba.cache.tiers.entry_index import Name
from specmamba.errors import ConfigError

SECRET_FILE = "secret"
SECRET_BYTES = 32
_ENTRY = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.entry")
_TEMPORARY = re.compile(r"\.[0-9a-f-]+\.tmp")


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of the folder, by its name and its status."""

    name: Name
    nbytes: int
    used: int  # time of its last change in nanoseconds: entries are touched when they are used


class EntryFolder:
    """A folder of mode 0700 with a file of mode 0600 for each entry, and a secret for the hashes of prefixes.

    A file gets its name when it is complete. Until then its writer holds a lock on it, so that files whose writers were
    killed can be told from files that are being written. All methods but ``open`` may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count()

    @classmethod
    def open(cls, path: Path) -> tuple[EntryFolder, bytes]:
        """Make the folder if need be; returns it with its secret.

        Raises:
            ConfigError: it cannot be made or written, others may enter it, or its secret cannot be read.
        """
        folder = cls(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_private = not path.stat().st_mode & 0o077
            secret = folder._read_secret() if is_private else b""
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"--hicache-storage-dir {path}: the folder cannot be used: {reason}") from None
        if not is_private:  # it may be one that others need, so its mode is not changed here
            raise ConfigError(
                f"--hicache-storage-dir {path}: other users may enter this folder, and entries tell texts: run chmod "
                "700 on it, or name a folder that does not exist yet"
            )
        if len(secret) != SECRET_BYTES:
            raise ConfigError(
                f"--hicache-storage-dir {path}: its file {SECRET_FILE!r} is damaged, and no entry can be found without "
                "it: remove the folder"
            )
        return folder, secret

    def list(self) -> Iterator[EntryFile]:
        """Iterate over the files of entries, in no order."""
        with os.scandir(self.path) as files:
            for file in files:
                if (match := _ENTRY.fullmatch(file.name)) is None:
                    continue
                with suppress(FileNotFoundError):  # another process has removed it
                    status = file.stat(follow_symlinks=False)
                    key, fingerprint = bytes.fromhex(match[1]), bytes.fromhex(match[2])
                    yield EntryFile((fingerprint, key), status.st_size, status.st_mtime_ns)

    def described(self, name: Name) -> EntryFile:
        """Return an entry's file. Raises FileNotFoundError: there is none."""
        status = self.file(name).lstat()
        return EntryFile(name, status.st_size, status.st_mtime_ns)

    def file(self, name: Name) -> Path:
        """Return the path of an entry's file."""
        fingerprint, key = name
        return self.path / f"{key.hex()}-{fingerprint.hex()}.entry"

    @contextmanager
    def read(self, name: Name) -> Iterator[BufferedReader]:
        """Open an entry's file. Raises FileNotFoundError: it was removed."""
        descriptor = os.open(self.file(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            yield stream

    def header(self, name: Name) -> tuple[Header, int]:
        """Return an entry's header and the size of its file, both of what has the name now.

        Another process may have put another one in the place of the file that was listed.

        Raises:
            FileNotFoundError: it was removed.
            EntryError: damaged, which includes a size or a name that is not the header's, or of another format.
        """
        with self.read(name) as stream:
            header, nbytes = read_header(stream), os.fstat(stream.fileno()).st_size
        if (header.fingerprint, header.key) != name or header.nbytes != nbytes:
            raise EntryError("damaged", "its header does not fit the file")
        return header, nbytes

    def write(self, name: Name, pieces: Iterable[memoryview]) -> EntryFile:
        """Write an entry's file; it appears, complete, in the place of one of the same name if there is one."""
        temporary, descriptor = self._new_file()
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as stream:
                for piece in pieces:
                    _write_whole(stream.fileno(), piece)
                sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has none
                sync_data(stream.fileno())  # else a power failure may leave a name without its content
                status = os.fstat(stream.fileno())
                temporary.rename(self.file(name))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        return EntryFile(name, status.st_size, status.st_mtime_ns)

    def touch(self, name: Name) -> None:
        """Set the time of last use to now."""
        now = time.time_ns()  # a file server may have another clock
        os.utime(self.file(name), ns=(now, now))

    def remove(self, name: Name) -> None:
        """Remove an entry's file, if it is still there."""
        self.file(name).unlink(missing_ok=True)

    def changed(self) -> int:
        """Return the time at which a file was last added or removed."""
        return self.path.stat().st_mtime_ns

    def remove_leftovers(self) -> int:
        """Remove files that a killed process has begun to write; returns their number."""
        count = 0
        for file in list(self.path.iterdir()):
            if _TEMPORARY.fullmatch(file.name) is None:
                continue
            with suppress(OSError):
                count += _remove_unlocked(file)
        return count

    def _new_file(self) -> tuple[Path, int]:
        """Make a temporary file, locked until its descriptor is closed: what is no leftover is not removed as one.

        Another process may find it before it is locked, and remove it: then it has no name any more, and a new one is
        made.
        """
        while True:
            file = self.path / f".{os.getpid()}-{secrets.token_hex(4)}-{next(self._numbers)}.tmp"
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink > 0:
                    return file, descriptor
            except BaseException:
                os.close(descriptor)
                file.unlink(missing_ok=True)
                raise
            os.close(descriptor)

    def _read_secret(self) -> bytes:
        """Read the secret; the first process of a folder makes it, and of several at a time one."""
        file = self.path / SECRET_FILE
        if not file.exists():
            own, descriptor = self._new_file()
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(SECRET_BYTES))
                stream.flush()
                with suppress(FileExistsError):
                    os.link(own, file)  # as one step: unlike a rename it fails if another process was first
            own.unlink(missing_ok=True)
        with file.open("rb") as stream:
            return stream.read(SECRET_BYTES + 1)


def _write_whole(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def _remove_unlocked(file: Path) -> bool:
    """Remove a file unless its writer still lives; returns whether it was removed."""
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        file.unlink(missing_ok=True)
        return True
