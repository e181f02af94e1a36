"""Reading messages: line by line, with several lines in one message, and with the history of earlier ones."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TextIO

from specmamba.errors import RequestError, SpecmambaError

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
MAX_CHARACTERS = 1 << 20  # of a message
MAX_ENTRIES, MAX_ENTRY, MAX_FILE_BYTES = 1000, 8192, 4 << 20  # of the history
ReadLine = Callable[[str], str]


class InputError(SpecmambaError):
    """What comes through a pipe is no text; where the next message begins is not known."""


def read_message(read_line: ReadLine) -> str:
    """Read one message, which goes on behind a line that ends with a backslash, and between triple quotes.

    Args:
        read_line: gives the next line without its end, for a prompt.

    Raises:
        EOFError: there is no further message.
        RequestError: it is too long.
    """
    line = read_line(PROMPT)
    if line.lstrip().startswith(QUOTES):
        lines = _lines(line.lstrip().removeprefix(QUOTES), read_line, _is_open, end=QUOTES)
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")
    lines = _lines(line, read_line, _goes_on, end="")
    return "\n".join([*(each[:-1] for each in lines[:-1]), lines[-1]])


def _goes_on(line: str) -> bool:
    """Whether a backslash ends the line that is not itself behind a backslash."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _is_open(line: str) -> bool:
    return not line.rstrip().endswith(QUOTES)


def _lines(first: str, read_line: ReadLine, goes_on: Callable[[str], bool], end: str) -> list[str]:
    """The lines of a message; ``end`` is the last one where the input ends in the middle of it.

    Raises:
        RequestError: they are too long together. All of them have been read.
    """
    lines, total = [first], len(first)
    while goes_on(lines[-1]):
        try:
            line = read_line(MORE)
        except EOFError:
            line = end
        total += len(line) + 1
        if total > MAX_CHARACTERS:
            lines.clear()  # the rest is read, so that it is not taken for messages
        lines.append(line)
    if total > MAX_CHARACTERS:
        raise RequestError(f"this message has more than {MAX_CHARACTERS} characters: send less")
    return lines


class PipeReader:
    """Reads the lines of a stream that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read_line(self, prompt: str) -> str:
        """As ``ReadLine``, without a prompt.

        Raises:
            RequestError: the line is too long; it is left out whole.
            InputError: the stream is no text in its encoding.
        """
        try:
            return self._line()
        except UnicodeDecodeError as error:
            raise InputError(no_text(error)) from None

    def _line(self) -> str:
        line = self._stream.readline(MAX_CHARACTERS + 1)
        if not line:
            raise EOFError
        if len(line) > MAX_CHARACTERS and not line.endswith("\n"):
            while (rest := self._stream.readline(MAX_CHARACTERS)) and not rest.endswith("\n"):
                pass
            raise RequestError(f"this line has more than {MAX_CHARACTERS} characters: send less")
        return line.rstrip("\r\n")


class LineEditor:
    """Reads from the terminal, with readline where Python has it; messages can be called up again."""

    def __init__(self, file: Path | None) -> None:
        """``file`` keeps messages for the next time; None: they are kept until the end only."""
        self._file = file
        self._readline = _readline()
        self._new: list[str] = []
        if self._readline is not None:
            self._readline.set_auto_history(False)  # a message of several lines is one entry
            for entry in read_history(file) if file is not None else ():
                self._call_up(entry)

    def read_line(self, prompt: str) -> str:
        """As ``ReadLine``. Raises KeyboardInterrupt for Ctrl-C, and RequestError for what is no text."""
        try:
            return input(prompt)
        except UnicodeDecodeError as error:
            raise RequestError(no_text(error)) from None

    def _call_up(self, entry: str) -> None:
        """Let the arrow keys call a message up, unless the locale has not all of its characters."""
        if self._readline is not None:
            with suppress(UnicodeEncodeError):
                self._readline.add_history(entry)

    def remember(self, message: str) -> None:
        """Add a message to the history."""
        is_entry = message.strip() and len(message) <= MAX_ENTRY and "\0" not in message
        if is_entry and message not in self._new[-1:]:
            self._new.append(message)
            self._call_up(message)

    def save(self) -> str | None:
        """Write the new messages behind those that the file has by now. Returns what went wrong, if anything did."""
        if self._file is None or not self._new:
            return None
        try:
            write_history(self._file, [*read_history(self._file), *self._new][-MAX_ENTRIES:])
        except OSError as error:
            return f"the history {self._file} cannot be written: {error.strerror}"
        return None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python that was built without it
        return None
    return readline


def no_text(error: UnicodeDecodeError) -> str:
    """A sentence about input that cannot be decoded."""
    byte = error.object[error.start]
    found = f"what is read is no text in {error.encoding}: there is the byte 0x{byte:02x}"
    return f"{found} (PYTHONIOENCODING chooses another encoding)"


def history_file() -> Path | None:
    """Where messages are kept, by the XDG base directory specification; None: this user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return base / "specmamba" / "chat_history.jsonl"


def read_history(file: Path) -> list[str]:
    """The messages of a file, the oldest first. A line that is none is left out; so is a file that is none."""
    entries = []
    with suppress(OSError, UnicodeDecodeError):
        if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
            return []
        for line in file.read_text("utf8").splitlines():
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str) and len(entry) <= MAX_ENTRY and "\0" not in entry:
                    entries.append(entry)
    return entries[-MAX_ENTRIES:]


def write_history(file: Path, entries: Sequence[str]) -> None:
    """Replace the file, at once and readable by its owner only. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = [json.dumps(entry) + "\n" for entry in entries]
    while sum(map(len, kept)) > MAX_FILE_BYTES:
        kept = kept[len(kept) // 2 :]
    handle, unfinished = tempfile.mkstemp(prefix=f"{file.name}-", dir=file.parent)  # with mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf8") as stream:
            stream.writelines(kept)
        os.replace(unfinished, file)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def is_interactive() -> bool:
    """Whether a person types, and sees what is printed."""
    return sys.stdin.isatty() and sys.stdout.isatty()
