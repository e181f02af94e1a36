"""Long prompts of 16-bit models with a decay for each key channel (KDA) in Triton, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.recurrent.records import make_state
from tests.kernels.recurrent.test_gated_delta_rule import Tokens
from tests.kernels.recurrent.test_kda_rule import make_tokens

pytest.importorskip("triton")
from specmamba.kernels.state_records import prefill
from tests.kernels.triton.recurrent.test_prefill_triton import Prompts, check_nan, own_errors

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("heads", "dtype", "part", "strong"),
    [
        ((1, 2, 16, 24), torch.float32, 2048, False),
        ((2, 2, 40, 70), torch.bfloat16, 6 * 128, True),
        ((1, 3, 7, 5), torch.float32, 1, True),
    ],
)
def test_rows_of_all_lengths(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    part: int,
    strong: bool,
    gpu_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All chunks at once, two, and one; several blocks of keys, and heads that share keys but not decays."""
    monkeypatch.setattr(prefill, "PART", part)
    case = Prompts(make_tokens(6, 199, heads, seed=1, strong=strong), heads, dtype)
    case.check(*case.run(gpu_device))


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("strong", [False, True])
def test_errors(strong: bool, gpu_device: str) -> None:
    """Decays from 0 to -3000, mixed, too: one side of a pair of tokens alone would be e^3000 times as large."""
    heads = 1, 2, 64, 32
    mine = own_errors(make_tokens(1, 200, heads, seed=3, strong=strong), make_state(1, heads, seed=4), gpu_device)
    print(mine)
    assert max(mine) < 2**-13


def test_a_strong_decay_takes_no_digits_from_weak_ones(gpu_device: str) -> None:
    """One token forgets all; the decays behind it are small, and differences of sums would have lost them."""
    heads = 1, 1, 32, 16
    tokens = make_tokens(1, 190, heads, seed=5)
    tokens.g.mul_(0.1)
    tokens.g[:, 3::64] = -3e6
    mine = own_errors(tokens, make_state(1, heads, seed=6), gpu_device)
    print(mine)
    assert max(mine) < 2**-13


def test_keys_that_repeat_and_large_steps(gpu_device: str) -> None:
    """Steps of up to 2 mirror the state at keys that repeat, of which little decays."""
    heads = 1, 1, 16, 16
    tokens = make_tokens(1, 135, heads, seed=7)
    tokens.k[:, ::2] = tokens.k[:, :1].clone()
    tokens.g.mul_(0.01)
    tokens.beta.add_(1)
    mine = own_errors(tokens, make_state(1, heads, seed=8), gpu_device)
    print(mine)
    assert max(mine) < 2**-12


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("field", Tokens._fields)
def test_nan_stays_in_its_row(field: str, gpu_device: str) -> None:
    check_nan(make_tokens(2, 129, (1, 1, 8, 8), seed=9), field, gpu_device)
