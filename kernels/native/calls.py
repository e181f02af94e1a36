"""Exported functions of native libraries, and the record of their calls that a captured step is made of."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, Protocol

_WORD = (1 << 64) - 1
_ONE_RECORDING = Lock()


class _Recording:
    """The thread whose calls are recorded, and what gets them."""

    recorder: Recorder | None = None
    thread = 0


class Recorder(Protocol):
    """Gets the calls of one thread."""

    def add_call(self, function: NativeFunction, arguments: Sequence[Any]) -> None:
        """Record a call that is about to be made."""


class NativeFunction:
    """One exported function. Inside ``recording`` its calls are made and recorded."""

    __slots__ = ("entry", "name", "unrecorded")

    def __init__(self, library: ctypes.CDLL, name: str, arguments: Sequence[Any], result: Any = None) -> None:
        """Declare a function.

        Args:
            library: exports it.
            name: of the function.
            arguments, result: their ctypes; None: it returns nothing.
        """
        function = getattr(library, name)
        function.argtypes, function.restype = [*arguments], result
        self.unrecorded, self.name = function, name  # a finalizer may run in a recording, and is no part of it
        replayable = getattr(library, f"{name}_replay", None)  # see replayable.h
        self.entry = None if replayable is None else ctypes.cast(replayable, ctypes.c_void_p).value

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        recorder = _Recording.recorder
        if recorder is not None and _Recording.thread == get_ident():
            recorder.add_call(self, arguments)
        return self.unrecorded(*arguments)

    def words(self, arguments: Sequence[Any]) -> list[int]:
        """The arguments as ``NAME_replay`` takes them."""
        types = self.unrecorded.argtypes
        return [_word(kind, argument) for kind, argument in zip(types, arguments, strict=True)]


def _word(kind: Any, argument: Any) -> int:
    if argument is None:
        return 0
    if isinstance(argument, ctypes.Structure | ctypes.Array):
        return ctypes.addressof(argument)
    if kind in (ctypes.c_float, ctypes.c_double):
        return int.from_bytes(struct.pack("<f" if kind is ctypes.c_float else "<d", argument), "little")
    number = argument.value if isinstance(argument, ctypes.c_void_p) else argument
    return int(number or 0) & _WORD


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record the native calls of this thread; a recording of another thread is waited for."""
    with _ONE_RECORDING:
        _Recording.thread, _Recording.recorder = get_ident(), recorder
        try:
            yield
        finally:
            _Recording.recorder = None
