"""Whether Triton kernels take some tensors."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def can_launch(*tensors: Tensor | None) -> bool:
    """Whether Triton runs on these tensors.

    They must be on one GPU, or on the CPU where the interpreter was asked for, and none may be float64, for which there
    are no kernels.

    ``SPECMAMBA_TRITON=0`` turns Triton off, for comparison with PyTorch. ``SPECMAMBA_TRITON=interpret`` together with
    ``TRITON_INTERPRET=1`` runs kernels on the CPU, line by line: for tests of whole steps, far too slow for more.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    return runs_on(device) and all(tensor.device == device and tensor.dtype != torch.float64 for tensor in given)


def runs_on(device: torch.device) -> bool:
    """Whether Triton runs on tensors of a device."""
    return _is_on() if device.type == "cuda" else is_interpreted() and device.type == "cpu"


@cache
def is_interpreted() -> bool:
    """Whether kernels on CPU tensors go through Triton's interpreter."""
    return _setting() == "interpret" and os.environ.get("TRITON_INTERPRET") == "1" and has_triton()


@cache
def has_triton() -> bool:
    """Whether Triton can be imported, which then contracts products and sums as the committed tables say.

    Triton 3.9 warns where nobody has said so, and 3.10 does not do it by itself any more.
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
