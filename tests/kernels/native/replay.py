"""Native kernels that run in a program of their own (replay.cpp): those of a processor that an emulator has.

As a plugin of pytest (``-p tests.kernels.native.replay --native-program COMMAND``) it lets the tests of operators call
that program instead of a library in their process. Every call takes the arrays that it points into along, and brings
back those that changed; so operands and expected results are those of the tests, made from the references.
"""

from __future__ import annotations

import ctypes
import json
import shlex
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.levels import NativeUnavailableError

NUMBER, PLACE = -1, -2  # kinds of words; any other is the index of an array
C_TYPES = {
    None: "void",
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_double: "double",
    ctypes.c_void_p: "void*",
}
Run = Callable[["Function", Sequence[Any]], Any]


class Function:
    """Stands for a function of a ctypes library: its types can be set, and it can be called."""

    def __init__(self, name: str, run: Run) -> None:
        self.name, self._run = name, run
        self.argtypes: Sequence[Any] = ()
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        """Hand the arguments, as ctypes would take them, to ``run``."""
        return self._run(self, arguments)

    def declaration(self) -> str:
        """Its declaration in C, with every pointer as ``void*``."""
        arguments = ", ".join(C_TYPES.get(kind, "void*") for kind in self.argtypes)
        return f"{C_TYPES[self.restype]} {self.name}({arguments});"


class Functions:
    """Stands for a ctypes library. A function is made when it is asked for first; all calls go to ``run``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.made: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        if name.endswith("_replay"):
            raise AttributeError(f"{name}: captured steps do not run in another program")
        return self.made.setdefault(name, Function(name, self._run))


class Program:
    """A running replay.cpp, until ``close``."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lock = Lock()
        self.num_calls: Counter[str] = Counter()

    def run(self, function: Function, arguments: Sequence[Any]) -> Any:
        """Call a function, and write the arrays that it changed back into the memory of this process.

        Args:
            function: with its types; ``restype`` is None or an integer's.
            arguments: numbers, results of ``Tensor.data_ptr``, and ctypes structures of both.

        Raises:
            AssertionError: the program ended.
        """
        call = _Call(function, arguments)
        with self._lock:
            self.num_calls[function.name] += 1
            try:
                self._input.writelines(call.message())
                self._input.flush()
                result = self._read_word()
                for base, size in call.arrays:
                    if self._read_word():
                        self._read(memoryview((ctypes.c_char * size).from_address(base)).cast("B"))
            except (OSError, EOFError):
                status = self._process.wait()
                raise AssertionError(f"the program ended with status {status} in {function.name}") from None
        return None if function.restype is None else function.restype(result).value

    def _read(self, memory: memoryview) -> None:
        content = self._output.read(len(memory))
        if len(content) < len(memory):
            raise EOFError
        memory[:] = content

    def _read_word(self) -> int:
        word = bytearray(8)
        self._read(memoryview(word))
        return int.from_bytes(word, "little")

    def close(self) -> None:
        """End the program. It may have ended before."""
        self._output.close()
        with suppress(BrokenPipeError):
            self._input.close()
        self._process.wait(10)


class _Call:
    """The arguments of a call as words, and the arrays that they point into."""

    def __init__(self, function: Function, arguments: Sequence[Any]) -> None:
        self.arrays: list[tuple[int, int]] = []  # address and size of whole storages
        self._name, self._num_arguments = function.name, len(arguments)
        self._words: list[tuple[int, int]] = []  # kind and value
        fields: list[tuple[int, int]] = []  # of structures, behind the arguments
        for kind, value in zip(function.argtypes, arguments, strict=True):
            if isinstance(value, ctypes.Structure):
                self._words.append((PLACE, len(arguments) + len(fields)))
                fields += self._fields(value)
            else:
                self._words.append(self._word(kind, value))
        self._words += fields

    def _fields(self, structure: ctypes.Structure) -> Iterator[tuple[int, int]]:
        for name, kind in ((field[0], field[1]) for field in structure._fields_):
            value = getattr(structure, name)
            if isinstance(value, ctypes.Structure):
                yield from self._fields(value)
            else:
                yield self._word(kind, value)

    def _word(self, kind: Any, value: Any) -> tuple[int, int]:
        if kind is ctypes.c_double:
            return NUMBER, int.from_bytes(struct.pack("<d", value), "little")
        if kind is not ctypes.c_void_p:
            return NUMBER, value & (1 << 64) - 1
        address = value.value if isinstance(value, ctypes.c_void_p) else value
        if not address:
            return NUMBER, 0
        array = _STORAGES[address]
        if array not in self.arrays:
            self.arrays.append(array)
        return self.arrays.index(array), address - array[0]

    def message(self) -> list[bytes]:
        """What replay.cpp reads."""
        name, sizes = self._name.encode(), [size for _, size in self.arrays]
        head = [len(sizes), *sizes, len(self._words), self._num_arguments]
        words = b"".join(struct.pack("<qQ", *word) for word in self._words)
        contents = (ctypes.string_at(base, size) for base, size in self.arrays)
        return [struct.pack("<Q", len(name)), name, struct.pack(f"<{len(head)}Q", *head), words, *contents]


_STORAGES: dict[int, tuple[int, int]] = {}  # of every pointer to a tensor that was asked for: address and size
_data_ptr = Tensor.data_ptr


def data_ptr(x: Tensor) -> int:
    """``Tensor.data_ptr``, and remember the storage. Memory that is used again belongs to the tensor that came last."""
    pointer = _data_ptr(x)
    if pointer and x.is_cpu:
        storage = x.untyped_storage()
        _STORAGES[pointer] = storage.data_ptr(), storage.nbytes()
    return pointer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-program", required=True, help="the command of a program that calls native kernels")
    parser.addoption("--native-calls", type=Path, required=True, help="the file for how often each function was called")


def pytest_configure(config: pytest.Config) -> None:
    program = Program(shlex.split(config.getoption("--native-program")))
    functions = Functions(program.run)
    patch = pytest.MonkeyPatch()
    patch.setattr(Tensor, "data_ptr", data_ptr)

    def open_library(source: Path) -> Functions:
        if source.parent.name == "replay":
            raise NativeUnavailableError("captured steps do not run in another program")
        return functions

    patch.setattr(library, "open_library", open_library)

    def end() -> None:
        patch.undo()
        config.getoption("--native-calls").write_text(json.dumps(program.num_calls))
        program.close()

    config.add_cleanup(end)
