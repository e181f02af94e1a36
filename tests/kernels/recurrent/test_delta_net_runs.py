"""A gated delta net layer over runs of known tokens, part by part and in one native call, against its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specmamba.kernels import delta_net
from tests.kernels.recurrent.run_case import RunCase, check_a_row_alone, check_two_parts
from tests.kernels.recurrent.test_delta_net import HEADS, Case, each_dtype, needs_native
from tests.pairwise import pairwise

LENGTHS = [[1], [7, 3], [0, 5, 2], [63, 64], [65, 1], [130, 77]]


def make(
    heads: tuple[int, int, int, int],
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    width: int = 4,
    state_dtype: torch.dtype = torch.float32,
) -> RunCase:
    """Runs of these lengths, with two tokens of padding at the end."""
    layer = Case(heads, max(lengths) + 2, [0] * len(lengths), width=width, shapes=("chain",), dtype=dtype)
    return RunCase(layer, lengths, state_dtype)


@pairwise(each_dtype, pytest.mark.parametrize("heads", HEADS), pytest.mark.parametrize("lengths", LENGTHS))
def test_matches_reference(form: str, lengths: list[int], heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    make(heads, lengths, dtype).check(form)


@pytest.mark.parametrize("width", [1, 2, 6])
def test_convolution_widths(form: str, width: int) -> None:
    make(HEADS[1], [9, 2, 0], width=width).check(form)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_states_of_other_dtypes(form: str, state_dtype: torch.dtype) -> None:
    make(HEADS[1], [70, 3], state_dtype=state_dtype).check(form)


@pytest.mark.parametrize("factor", [0.0, 1e3])
def test_stable_at_any_decay(form: str, factor: float) -> None:
    """Nothing decays, or everything at once."""
    case = make(HEADS[1], [71, 40])
    case.weights.negative_a.mul_(factor)
    case.check(form)


@needs_native
@each_dtype
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    check_a_row_alone(make(HEADS[4], [70, 0, 133, 5], dtype))


@needs_native
@pytest.mark.parametrize("at", [1, 31, 64, 99])
def test_two_parts_equal_one(at: int) -> None:
    check_two_parts(make(HEADS[1], [100]), at, 100)


@needs_native
def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make(HEADS[1], [5, 3])
    other = make(HEADS[2], [5, 3])
    with pytest.raises(ValueError, match="states have another shape"):
        delta_net.extend(case.inputs, case.weights, replace(case.state, states=other.state.states))
    with pytest.raises(ValueError, match="windows have another shape"):
        delta_net.extend(case.inputs, case.weights, replace(case.state, windows=other.state.windows))
    with pytest.raises(ValueError, match="one entry per row"):
        delta_net.extend(case.inputs, case.weights, replace(case.state, lengths=torch.tensor([5])))
