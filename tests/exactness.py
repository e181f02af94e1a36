"""Compare texts that were computed in two ways: they are equal, or they part at a near tie.

Native products compute every row by itself. PyTorch's choose their algorithm by the number of rows and by the CPU, so
the last bits of a row depend on how many rows are computed with it; in float32 all products are PyTorch's. Where two
tokens are equally likely but for such bits, two correct runs may choose differently, and go on with different texts. On
which CPU and at which token this happens is chance, so a test that compares texts must be able to judge it.

- Greedy texts are judged by the logits that plain decoding computes along them (``acceptance.judge``): every token must
  be explained by logits that are off by 1e-3 at the most.
- Sampled texts depend on random numbers too. They are computed again with random numbers that are moved a little: a
  near tie is then decided as in the other run, and all tokens after it must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch
from torch import Tensor

from specmamba.engine.captured.graph_runner import StepGraphRunner
from specmamba.kernels import sampling
from specmamba.kernels.linear import native_ops
from specmamba.kernels.native.levels import NativeUnavailableError
from specmamba.kernels.native.library import open_library
from specmamba.kernels.native.tensors import FLOATS
from specmamba.measure.acceptance.judge import Judge

if TYPE_CHECKING:
    from specmamba import LLM

Tokens = tuple[int, ...]
T = TypeVar("T")

# How far a cumulative probability may be off: sums of 4,096 float32 in another order, and a residual distribution (what
# is left of the target's after the drafts') that has a small part of the mass and is scaled up to 1.
SHIFTS = tuple(sign * 2.0**-power for power in (21, 19, 18, 17, 16) for sign in (1, -1))


def why_not_native() -> str | None:
    """Why native kernels cannot be had here: a switch, a CPU without an instruction, no compiler. None: they can."""
    if native_ops.code() is not None:
        return None
    try:
        open_library(native_ops.SOURCE)
    except NativeUnavailableError as error:
        return str(error)
    return None


def rows_are_independent(dtype: torch.dtype) -> bool:
    """Whether products with weights of this type give the same bits for a row, whatever rows stand beside it."""
    return dtype in FLOATS and why_not_native() is None


def assert_same_greedy_texts(
    got: Sequence[Tokens],
    expected: Sequence[Tokens],
    prompts: Sequence[Sequence[int] | str],
    new_plain: Callable[[], AbstractContextManager[LLM]],
) -> None:
    """Fail unless the texts are equal, or part at near ties in float32.

    Args:
        got, expected: the texts, one per prompt.
        prompts: as text or as tokens.
        new_plain: an LLM of the same model in float32 that drafts nothing; called where texts differ.
    """
    assert len(got) == len(expected) == len(prompts)
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if tuple(a) != tuple(b)]
    if not different:
        return
    with new_plain() as plain:
        judge = Judge(plain.workbench.logits_along, torch.float32, 0.0)
        for i in different:
            prompt = prompts[i]
            tokens = plain.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            difference = judge.compare(i, tokens, 0, expected[i], got[i])
            assert difference is not None
            assert difference.kind == "near_tie", difference


def assert_same_sampled_texts(got: Sequence[T], expected: Sequence[T], again: Callable[[], Sequence[T]]) -> None:
    """Fail unless each text is the expected one, or the one of random numbers that are moved by at most 2^-16.

    Args:
        got, expected: the texts, and what else must be equal.
        again: computes ``expected`` once more; called where texts differ.
    """
    different = {i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b}
    for shift in SHIFTS:
        if not different:
            return
        with pytest.MonkeyPatch.context() as patch:
            run_directly(patch)
            patch.setattr(sampling, "uniform", _moved(sampling.uniform, shift))
            moved = again()
        different -= {i for i in different if got[i] == moved[i]}
    assert not different, [(got[i], expected[i]) for i in sorted(different)]


def run_directly(patch: pytest.MonkeyPatch) -> None:
    """Let no engine replay its steps: a replay does not call what a test puts in the place of a function."""
    patch.setattr(StepGraphRunner, "bucket", lambda *_: None)


def _moved(uniform: Callable[[Tensor, Tensor, int], Tensor], shift: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Random numbers in [0, 1) that are off by ``shift``."""

    def moved(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        return (uniform(seeds, positions, stream) + shift).clamp(0.0, 1.0 - 2.0**-24)

    return moved
