"""Records a function on a CPU: its native calls, and the operators that PyTorch runs between them, as a tape."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from specmamba.cuda_graphs.arena import Arena
from specmamba.cuda_graphs.watch import reads_host
from specmamba.kernels.native.calls import NativeFunction, recording
from specmamba.kernels.replay import Tape, lower
from specmamba.kernels.replay.arrays import move_call
from specmamba.kernels.replay.tape import NativeCall, PythonCall

T = TypeVar("T")
EMPTY = frozenset(
    f"aten::{name}" for name in ("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
# results that depend on the shapes of arguments alone
FILLED = frozenset(
    f"aten::{name}"
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "arange.start_step")
)
_WORD_BYTES = 8


class NotRecordableError(Exception):
    """The function reads device values on the host, or calls native code that tapes do not know."""


class StepRecorder(TorchDispatchMode):
    """Runs a function once and makes a tape of it.

    What depends on no input is computed now and stays. Memory of other results comes from an arena, in which results
    that the function has dropped make room for later ones.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._calls: list[NativeCall | PythonCall | None] = []
        self._kept: list[Any] = []
        self._constants: dict[int, tuple[int, Tensor]] = {}  # by storage: place on the tape, and the tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by torch; its compiler, imported to say so, would take 2 s."""
        return False

    def record(self, function: Callable[[], T]) -> tuple[Tape, T]:
        """Run the function. Returns its tape, and its result, whose memory the tape writes.

        Raises:
            NotRecordableError: it cannot be recorded.
        """
        with recording(self), self:
            result = function()
        kept = [self._arena, *self._kept, *(x for _, x in self._constants.values())]
        return Tape([call for call in self._calls if call is not None], kept), result

    def add_call(self, function: NativeFunction, arguments: Sequence[Any]) -> None:
        """Record a native call. Constants that it may write are restored by every replay."""
        if function.entry is None:
            raise NotRecordableError(f"{function.name} has no form that tapes call")
        words = function.words(arguments)
        for word in [*words, *_words_of(arguments)]:
            self._restore(word)
        self._calls.append(NativeCall(function, words, ()))
        self._kept += [x for x in arguments if isinstance(x, ctypes.Structure | ctypes.Array)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if reads_host(name, args):
            raise NotRecordableError(f"{name} reads the device")
        if _decomposes(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in EMPTY:
            return self._arena.like(func(*args, **kwargs | {"device": "meta"}))
        if _is_view(func):
            return func(*args, **kwargs)
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = _tensors_in([*args, *kwargs.values()])
        written = _tensors_in(_written(func, args, kwargs)) if func._schema.is_mutable else []
        for x in written:
            self._restore(x.data_ptr())
        result = func(*args, **kwargs)
        storages = {_storage(x) for x in given}
        fresh = [x for x in _tensors_in([result]) if _storage(x) not in storages]
        if not written and not fresh:
            return result  # views
        if not written and (name in FILLED or all(_storage(x) in self._constants for x in given)):
            for x in fresh:
                self._constants[_storage(x)] = len(self._calls), x
                self._calls.append(None)
            return result
        if isinstance(result, Tensor):
            result = self._moved(result) if fresh else result
        else:
            result = tree_map_only(Tensor, lambda x: self._moved(x) if _storage(x) not in storages else x, result)
        self._emit(func, name, result, args, kwargs)
        return result

    def _emit(self, func: Any, name: str, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        calls = lower(name, result, args, kwargs)
        if calls is not None:
            self._calls += map(self._keep, calls)
            return

        def run() -> None:
            found = func(*args, **kwargs)
            for x, y in zip(tree_leaves(result), tree_leaves(found), strict=True):
                if isinstance(x, Tensor) and x is not y:
                    x.copy_(y)

        self._calls.append(PythonCall(name, run))

    def _keep(self, call: NativeCall) -> NativeCall:
        """Keep the call's operands, but for those in the arena, whose memory may be used again."""
        self._kept += [x for x in call.operands if not self._arena.owns(x)]
        return call._replace(operands=())

    def _moved(self, x: Tensor) -> Tensor:
        """x in the arena's memory."""
        moved = self._arena.like(x)
        moved.copy_(x)
        return moved

    def _restore(self, address: int) -> None:
        """Let replays begin with the present values of the constant at an address, if there is one."""
        for storage, (place, x) in self._constants.items():
            if storage <= address < storage + max(1, x.untyped_storage().nbytes()):
                del self._constants[storage]
                with torch._C._DisableTorchDispatch():  # the copy is no part of the record
                    self._calls[place] = self._keep(move_call(x, x.clone()))
                return


@cache
def _is_view(func: Any) -> bool:
    """Whether all results share the memory of an argument, and nothing is written: no call of its own on a tape."""
    results = [result.alias_info for result in func._schema.returns]
    return not func._schema.is_mutable and bool(results) and all(alias and not alias.is_write for alias in results)


@cache
def _decomposes(func: Any) -> bool:
    return bool(func._can_decompose())


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors_in(x)
    return found


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes."""
    schema = func._schema.arguments
    given = {argument.name: x for argument, x in zip(schema, args, strict=False)} | dict(kwargs)
    return [
        x
        for argument in schema
        if argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(given.get(argument.name))
    ]


def _words_of(arguments: Sequence[Any]) -> list[int]:
    """All words of the structures among the arguments: some are addresses."""
    words: list[int] = []
    for argument in arguments:
        if isinstance(argument, ctypes.Structure):
            data = bytes(argument)
            starts = range(0, len(data), _WORD_BYTES)
            words += [int.from_bytes(data[start : start + _WORD_BYTES], "little") for start in starts]
    return words
