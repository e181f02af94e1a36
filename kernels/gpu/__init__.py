"""What the Triton forms of all operators share: where kernels run, and how one is compiled ahead of time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def can_launch(*tensors: Tensor | None) -> bool:
    """Whether Triton runs on these tensors.

    They must be on one GPU, or on the CPU where the interpreter was asked for, and none may be float64, for which there
    are no kernels.

    ``SPECMAMBA_TRITON=0`` turns Triton off, for comparison with PyTorch. ``SPECMAMBA_TRITON=interpret`` together with
    ``TRITON_INTERPRET=1`` runs kernels on the CPU, line by line: for tests of whole steps, far too slow for more.
    """
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


def runs_on(device: torch.device) -> bool:
    """Whether Triton runs on tensors of a device."""
    return _is_on() if device.type == "cuda" else is_interpreted() and device.type == "cpu"


@cache
def is_interpreted() -> bool:
    """Whether kernels on CPU tensors go through Triton's interpreter."""
    return _setting() == "interpret" and os.environ.get("TRITON_INTERPRET") == "1" and has_triton()


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


@cache
def _is_on() -> bool:
    return _setting() != "0" and has_triton()


def _setting() -> str:
    return os.environ.get("SPECMAMBA_TRITON", "")


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its machine code depends on, as a launch would have it.

    Every operator lists its own in ``tiles.py`` (``variants()``), one at least for each of its tile choices, made by
    the same functions that launches ask. ``specmamba.kernels.aot`` compiles them without a GPU.

    Triton makes other, better code where it finds that a pointer or an integer is a multiple of 16. What is compiled
    ahead of time takes this to be so for every pointer and for every argument with "stride" in its name, as it is at a
    real model's sizes, and for no other. Names in ``unaligned`` are exceptions: a stride over heads or taps, say; and
    so is what a kernel does not specialize, ever: numbers that change from call to call.
    """

    name: str  # unique within the operator: what tells it apart, for example "tree_verify bf16 N=16 K=128 V=128"
    kernel: Any  # the triton.jit function
    signature: Mapping[str, str]  # Triton's type of every argument in order: "*bf16", "*i64", "i32", "constexpr"
    constexprs: Mapping[str, Any]  # values of those that are constexpr
    num_warps: int
    num_stages: int
    unaligned: frozenset[str] = frozenset()

    def is_aligned(self, argument: str) -> bool:
        """Whether an argument is taken to be a multiple of 16 (a pointer: of 16 bytes)."""
        kind = self.signature[argument]
        can_be = kind.startswith("*") or (kind != "constexpr" and "stride" in argument)
        return can_be and argument not in self.unaligned
