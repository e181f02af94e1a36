"""What the Triton forms of all operators share: where kernels run, and how one is compiled ahead of time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from specmamba.kernels.gpu.switch import FOLDING as FOLDING
from specmamba.kernels.gpu.switch import MULTIPLYING_CODES as MULTIPLYING_CODES
from specmamba.kernels.gpu.switch import SWITCH as SWITCH
from specmamba.kernels.gpu.switch import choice as choice

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8"}  # in signatures

_disabled: list[None] = []  # an entry for every ``disabled`` that is entered


def can_launch(*tensors: Tensor | None) -> bool:
    """Whether Triton runs on these tensors.

    They must be on one GPU, or on the CPU where the interpreter was asked for, and none may be float64, for which there
    are no kernels.

    ``SPECMAMBA_TRITON`` turns Triton off, as a whole or for some operators (``switch.py``; the dispatcher asks for the
    operator). ``SPECMAMBA_TRITON=interpret`` together with ``TRITON_INTERPRET=1`` runs kernels on the CPU, line by
    line: for tests of whole steps, far too slow for more.
    """
    if _disabled:
        return False
    first = None
    for tensor in tensors:
        if tensor is None:
            continue
        if first is None:
            if not (_is_on() if tensor.is_cuda else tensor.is_cpu and is_interpreted()):
                return False
            first = tensor
        elif tensor.device != first.device:
            return False
        if tensor.dtype is torch.float64:
            return False
    return first is not None


def can_launch_any(operators: Iterable[str], *tensors: Tensor | None) -> bool:
    """Whether one of these operators runs in Triton on these tensors: then a layer is not one call of native code."""
    return can_launch(*tensors) and any(map(is_chosen, operators))


def runs_on(device: torch.device, *operators: str) -> bool:
    """Whether Triton runs on tensors of a device, and each of these operators in it."""
    is_there = _is_on() if device.type == "cuda" else is_interpreted() and device.type == "cpu"
    return is_there and all(map(is_chosen, operators))


def is_chosen(operator: str) -> bool:
    """Whether ``SPECMAMBA_TRITON`` lets an operator (a folder of ``kernels``) run in Triton where that is possible."""
    return operator in choice().operators


def folds_in_verify(device: torch.device) -> bool:
    """Whether the verifies of recurrent layers fold pending records themselves: all their kernels must."""
    return runs_on(device, *FOLDING)


def multiplies_codes(device: torch.device) -> bool:
    """Whether products of quantized matrices take codes as they are laid out for Triton."""
    return runs_on(device, *MULTIPLYING_CODES)


@contextmanager
def disabled() -> Iterator[None]:
    """Run the forms in PyTorch inside of this, for comparison with Triton."""
    _disabled.append(None)
    try:
        yield
    finally:
        _disabled.pop()


@cache
def is_interpreted() -> bool:
    """Whether kernels on CPU tensors go through Triton's interpreter."""
    return choice().is_interpreted and os.environ.get("TRITON_INTERPRET") == "1" and has_triton()


@cache
def has_triton() -> bool:
    """Whether Triton can be imported. Makes it contract products and sums, as in the committed tables.

    Without this setting Triton 3.9 warns, and 3.10 does not contract.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return find_spec("triton") is not None


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n >= 1: blocks of Triton have such sizes."""
    return 1 << (n - 1).bit_length()


def num_blocks(size: int, block: int) -> int:
    """The number of blocks that cover ``size``."""
    return -(-size // block)


def dense(x: Tensor) -> Tensor:
    """x, copied only if neighbours in its last dimension are not neighbours in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@cache
def _is_on() -> bool:
    return bool(choice().operators) and has_triton()


class Tile(Protocol):
    """How a kernel is run; operators add their block sizes."""

    @property
    def num_warps(self) -> int:
        """Warps of a program."""

    @property
    def num_stages(self) -> int:
        """Iterations of a loop whose loads are in flight at once."""


def launch(kernel: Any, grid: tuple[int, ...], tile: Tile, constants: Mapping[str, Any], *arguments: Any) -> None:
    """Run a kernel: its arguments in order, then the values of its constexpr arguments by name."""
    kernel[grid](*arguments, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)


@dataclass(frozen=True)
class Registers:
    """The most registers that a thread may have: NVIDIA's assembler is told on GPUs of a compute capability.

    Without a limit it often takes more registers than a kernel needs, and sometimes spills some to fit more blocks than
    there will be.
    """

    most: int
    since: int = 0  # major number of the compute capability
    most_of_10: int | None = None  # from capability 10 on, where another number leaves no spills; None: ``most``

    def options(self, capability: int) -> dict[str, int]:
        """Options of a launch, and of a compilation, on an NVIDIA GPU of this major number."""
        if capability < self.since:
            return {}
        return {"maxnreg": self.most if capability < 10 or self.most_of_10 is None else self.most_of_10}


ROOM = 168  # registers of a thread with which three blocks of four warps, or twelve warps, run on one multiprocessor


def register_options(registers: Registers | None, device: torch.device) -> dict[str, int]:
    """Options of a launch on a device; none but on NVIDIA GPUs."""
    if registers is None or device.type != "cuda" or torch.version.hip is not None:
        return {}
    return registers.options(_capability(device))


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@dataclass(frozen=True)
class Work:
    """How often a variant's code runs for one head of one row, so that its instructions can be counted."""

    programs: int  # of one head of one row
    sizes: Mapping[str, int]  # values of the names in the ranges of its loops that are no constants of the variant


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its machine code depends on, as a launch would have it.

    Every operator lists its variants (``variants()`` in ``tiles.py`` or ``triton_ops.py``), at least one for each of
    its tile choices, made by the functions that launches use. ``specmamba.kernels.aot`` compiles them without a GPU.

    Triton generates other, better code where a pointer or an integer is a multiple of 16. Ahead-of-time compilation
    assumes this of every pointer and of every argument with "stride" in its name, as in a launch at a real model's
    sizes, and of no other argument. Exceptions are the names in ``unaligned`` (a stride over heads or taps, for
    example), and arguments that a kernel never specializes: numbers that change from call to call.
    """

    name: str  # unique within the operator, for example "tree_verify bf16 N=16 K=128 V=128"
    kernel: Any  # the triton.jit function
    signature: Mapping[str, str]  # Triton's type of every argument in order: "*bf16", "*i64", "i32", "constexpr"
    constexprs: Mapping[str, Any]  # values of those that are constexpr
    num_warps: int
    num_stages: int
    unaligned: frozenset[str] = frozenset()
    work: Work | None = None  # None: instructions are not counted
    registers: Registers | None = None  # None: as many as the assembler takes
    may_fuse: bool = True  # a product and a sum may be rounded once, together; False where bits are promised

    def is_aligned(self, argument: str) -> bool:
        """Whether an argument is assumed to be a multiple of 16 (a pointer: of 16 bytes)."""
        kind = self.signature[argument]
        can_be = kind.startswith("*") or (kind != "constexpr" and "stride" in argument)
        return can_be and argument not in self.unaligned

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        tile: Tile,
        unaligned: frozenset[str] = frozenset(),
        other: str = "i32",
    ) -> Variant:
        """A variant by argument names: arguments in ``constants`` are constexpr, those without a type are ``other``."""
        signature = {x: "constexpr" if x in constants else types.get(x, other) for x in kernel.arg_names}
        return cls(name, kernel, signature, constants, tile.num_warps, tile.num_stages, unaligned)
