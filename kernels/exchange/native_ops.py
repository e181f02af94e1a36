"""Exchanges over shared memory (native.cpp), as one process makes them. There is no other form. See README.md."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.live import live_count
from specmamba.kernels.native.tensors import require

SOURCE = Path(__file__).parent / "native.cpp"
SUMMED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = ("all_reduce", "all_gather", "broadcast", "message")  # in the order of native.cpp


class RankGoneError(RuntimeError):
    """Another process has ended, or does not go on: the exchange fails."""


class Count(NamedTuple):
    """Exchanges of one kind since the start."""

    calls: int
    nbytes: int  # of this process's operands; of parts that are joined, those of the widest part
    seconds: float  # in them, with the time in which this process waits for the others


class Exchange:
    """One of several processes that make the same calls in the same order, each from one thread at a time.

    Calls are recorded by tapes. Any of them fails where another process has ended.
    """

    def __init__(self, file: int, rank: int, size: int, links: Sequence[int]) -> None:
        """Join.

        Args:
            file: descriptor of ``num_bytes(size)`` bytes of memory, zeros when the first process joins.
            rank, size: of this process, and how many there are.
            links: descriptors of sockets that other processes close when they end; kept open by the caller.

        Raises:
            OSError: the memory cannot be mapped.
        """
        self._native = library.required(code())
        of_links = (c_int * max(1, len(links)))(*links)
        self._handle: int | None = self._native.exchange_open(file, rank, size, of_links, len(links))
        if not self._handle:
            raise OSError("memory that ranks share cannot be mapped")
        self.rank, self.size = rank, size
        self._widths: dict[tuple[int, ...], ctypes.Array[c_int64]] = {}
        self._closing = Lock()  # guards the handle against ``end`` from another thread

    def sum(self, x: Tensor) -> Tensor:
        """Add up the tensors of all processes, in the order of their ranks, in float32, rounded to x's dtype once.

        Args:
            x: [..., n], contiguous, float32, bfloat16 or float16; overwritten.

        Returns:
            x: the same bits in every process.

        Raises:
            RankGoneError: another process has ended.
        """
        require(x.is_contiguous() and x.is_cpu and x.dtype in SUMMED, "sums take contiguous floats of the CPU")
        width = x.shape[-1] if x.dim() else 1
        rows = x.numel() // max(1, width)
        arguments = x.data_ptr(), rows, width, live_count(x.shape, rows), SUMMED[x.dtype]
        self._done(self._native.exchange_sum(self._handle, *arguments))
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Join the parts of all processes along the last dimension.

        Args:
            x: [..., widths[rank]], on the CPU.
            widths: of the parts of all processes.

        Returns:
            [..., sum(widths)].

        Raises:
            RankGoneError: another process has ended.
        """
        require(x.is_cpu and x.shape[-1] == widths[self.rank], "a part has another width")
        x, key = x.contiguous(), (x.element_size(), *widths)
        if key not in self._widths:
            self._widths[key] = (c_int64 * len(widths))(*(width * x.element_size() for width in widths))
        of_all = self._widths[key]
        joined = torch.empty((*x.shape[:-1], sum(widths)), dtype=x.dtype)
        rows = joined.numel() // max(1, joined.shape[-1])  # this part may have no columns
        arguments = x.data_ptr(), joined.data_ptr(), rows, of_all, max(of_all), live_count(x.shape, rows)
        self._done(self._native.exchange_gather(self._handle, *arguments))
        return joined

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x, contiguous and on the CPU, with that of rank 0; gives x. Raises RankGoneError."""
        require(x.is_contiguous() and x.is_cpu, "what is told to others is contiguous, and on the CPU")
        self._done(self._native.exchange_broadcast(self._handle, x.data_ptr(), x.nbytes))
        return x

    def tell(self, message: bytes) -> None:
        """Send a message of rank 0 to all others. Raises RankGoneError."""
        self._done(self._native.exchange_tell(self._handle, message, len(message)))

    def told(self, milliseconds: int) -> bytes | None:
        """The next message of rank 0; None: there was none in this time. Raises RankGoneError."""
        length = self._native.exchange_next_length(self._handle, milliseconds)
        if length == -1:
            return None
        self._done(length >= 0)
        message = ctypes.create_string_buffer(length)
        self._done(self._native.exchange_receive(self._handle, message, length))
        return message.raw

    def counts(self) -> dict[str, Count]:
        """What was exchanged so far, by kind: "all_reduce", "all_gather", "broadcast", "message"."""
        found = (c_int64 * (3 * len(KINDS)))()
        self._native.exchange_counts(self._handle, found)
        rows = (found[i : i + 3] for i in range(0, len(found), 3))
        return {
            kind: Count(calls, nbytes, 1e-9 * each) for kind, (calls, nbytes, each) in zip(KINDS, rows, strict=True)
        }

    def end(self) -> None:
        """Let all exchanges of all processes fail, those that wait included; any thread may call this."""
        with self._closing:
            if self._handle:
                self._native.exchange_end(self._handle)

    def close(self) -> None:
        """Give the memory back; no exchange runs then or later."""
        with self._closing:
            handle, self._handle = self._handle, None
            if handle:
                self._native.exchange_close(handle)

    @staticmethod
    def _done(is_done: int) -> None:
        if not is_done:
            raise RankGoneError("another rank has ended, and exchanges with it cannot go on")


def is_available() -> bool:
    """Whether native code runs here."""
    return code() is not None


def num_bytes(size: int) -> int:
    """Bytes of the memory of so many processes; 0: they are too many."""
    return int(library.required(code()).exchange_num_bytes(size))


@cache
def code() -> ctypes.CDLL | None:
    """The library of exchanges, or None where native code cannot run."""
    on_tensor: list[Any] = [c_void_p, c_void_p]
    signatures: dict[str, list[Any]] = {
        "exchange_num_bytes": [c_int],
        "exchange_open": [c_int, c_int, c_int, c_void_p, c_int],
        "exchange_close": [c_void_p],
        "exchange_end": [c_void_p],
        "exchange_counts": on_tensor,
        "exchange_sum": [*on_tensor, c_int64, c_int64, c_void_p, c_int],
        "exchange_gather": [*on_tensor, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
        "exchange_broadcast": [*on_tensor, c_int64],
        "exchange_tell": [*on_tensor, c_int64],
        "exchange_next_length": [c_void_p, c_int64],
        "exchange_receive": [*on_tensor, c_int64],
    }
    results: dict[str, Any] = dict.fromkeys(("exchange_sum", "exchange_gather", "exchange_broadcast"), c_int)
    results |= dict.fromkeys(("exchange_tell", "exchange_receive"), c_int)
    results |= {"exchange_open": c_void_p} | dict.fromkeys(("exchange_num_bytes", "exchange_next_length"), c_int64)
    return library.load_functions(SOURCE, signatures, results)
