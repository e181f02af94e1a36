"""Long prompts of 16-bit models through the gated delta rule and SSD in Triton, against the float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.gated_delta_rule import reference
from tests.kernels.recurrent import strong_decay, test_kda_rule, test_ssd
from tests.kernels.recurrent.records import make_state
from tests.kernels.recurrent.test_gated_delta_rule import Tokens, make_tokens

pytest.importorskip("triton")
from specmamba.kernels.gated_delta_rule import (
    triton_channel_chunks,
    triton_channels,
    triton_chunks,
    triton_kernels,
    triton_ops,
)
from specmamba.kernels.ssd import triton_ops as ssd_ops
from specmamba.kernels.state_records import prefill, triton_prefill

pytestmark = pytest.mark.usefixtures("poisoned")

KERNELS = [
    (triton_prefill, "grams_kernel"),
    (triton_chunks, "systems_kernel"),
    (triton_chunks, "updates_kernel"),
    (triton_prefill, "states_kernel"),
    (triton_prefill, "outputs_kernel"),
    (triton_kernels, "extend_kernel"),
    (triton_channels, "channel_extend_kernel"),
    (triton_channel_chunks, "channel_products_kernel"),
]


class Prompts:
    """Rows of a pool: nothing, less than a chunk, whole chunks, more; the last row is padding."""

    lengths, slots = torch.tensor([197, 0, 1, 64, 130, 9]), torch.tensor([3, 6, 1, 2, 5, 0])

    def __init__(self, tokens: Tokens, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.tokens = tokens
        beyond = torch.arange(199) >= self.lengths[:, None]
        for x in self.tokens:
            x[beyond] = torch.nan
        self.states = make_state(7, heads, seed=2).to(dtype)
        self.states[[0, 4, 6]] = torch.nan

    def run(self, device: str) -> tuple[Tensor, Tensor]:
        states = self.states.to(device, copy=True)
        places = states, self.slots.to(device), self.lengths.to(device)
        out = triton_ops.extend_in_place(*(x.to(device) for x in self.tokens), *places, torch.bfloat16)
        return out.cpu(), states.cpu()

    def check(self, out: Tensor, states: Tensor) -> None:
        """Every row is the reference's, padding is zeros, and other slots keep their bits."""
        kept = torch.ones(7, dtype=torch.bool)
        for b in (0, 2, 3, 4):
            slot, length = int(self.slots[b]), int(self.lengths[b])
            kept[slot], row = False, Tokens(*(x[b : b + 1].double() for x in self.tokens))
            want, state = reference.extend(*row, self.states[slot][None].double(), self.lengths[b : b + 1])
            assert error(out[b, :length], want[0, :length]) < 2**-13
            assert error(states[slot], state[0]) < max(2**-13, torch.finfo(states.dtype).eps)
        kind = torch.int32 if states.dtype is torch.float32 else torch.int16
        assert torch.equal(states[kept].view(kind), self.states[kept].view(kind))
        padding = torch.arange(199) >= self.lengths.masked_fill(self.slots == 0, 0)[:, None]
        assert torch.equal(out[padding], torch.zeros_like(out[padding]))


def error(mine: Tensor, right: Tensor) -> float:
    """The largest difference, over the largest number."""
    return float((mine - right).abs().max() / right.abs().max())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("heads", "dtype", "part"),
    [
        ((1, 2, 16, 24), torch.float32, 2048),
        ((2, 2, 40, 70), torch.bfloat16, 6 * 128),
        ((1, 1, 7, 5), torch.float32, 1),
    ],
)
def test_rows_of_all_lengths(
    heads: tuple[int, int, int, int], dtype: torch.dtype, part: int, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks at once, two, and one: the last state of a part is the first of the next, and not rounded between."""
    monkeypatch.setattr(prefill, "PART", part)
    case = Prompts(make_tokens(6, 199, heads, seed=1)[0], heads, dtype)
    case.check(*case.run(gpu_device))


def plain_extend(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks of 64 in plain bfloat16: all operands of products are rounded, sums and the solution are float32.

    Of one key head and one value head, tokens [1, L, 1, ...], state [K, V].
    """
    outputs = []
    for start in range(0, tokens.q.shape[1], 64):
        q, k, v, g, beta = (x[0, start : start + 64, 0] for x in tokens)
        path = g.cumsum(0)
        decay = (path[:, None] - path[None]).exp().tril()
        system = torch.eye(len(g)) + (beta[:, None] * rounded(k, k.T) * decay).tril(-1)
        inverse = torch.linalg.inv(system)
        new = rounded(inverse, beta[:, None] * v)
        new -= rounded(rounded(inverse, (beta * path.exp())[:, None] * k), state)
        outputs.append(rounded(q * path.exp()[:, None], state) + rounded(rounded(q, k.T) * decay, new))
        state = state * path[-1].exp() + rounded((k * (path[-1] - path).exp()[:, None]).T, new)
    return torch.cat(outputs), state


def rounded(a: Tensor, b: Tensor) -> Tensor:
    """a b of operands in bfloat16."""
    return a.bfloat16().float() @ b.bfloat16().float()


def errors_of(tokens: Tokens, state: Tensor, device: str) -> tuple[list[float], list[float]]:
    """Of outputs and of the state: the kernels', and those of plain bfloat16. One key head, one value head."""
    want, wanted = reference.extend(*tokens.double(), state.double(), torch.tensor([tokens.q.shape[1]]))
    plain_out, plain_state = plain_extend(tokens, state[0, 0])
    return own_errors(tokens, state, device), [error(plain_out, want[0, :, 0]), error(plain_state, wanted[0, 0])]


def own_errors(tokens: Tokens, state: Tensor, device: str) -> list[float]:
    """Of outputs and of the state, of one row."""
    lengths = torch.tensor([tokens.q.shape[1]])
    want, wanted = reference.extend(*(x.double() for x in tokens), state.double(), lengths)
    states, slots = torch.cat([state, state]).to(device), torch.tensor([1]).to(device)
    there = [x.to(device) for x in tokens]
    out = triton_ops.extend_in_place(*there, states, slots, lengths.to(device), torch.bfloat16).cpu()
    return [error(out, want), error(states[1:].cpu(), wanted)]


def test_errors_are_far_below_those_of_plain_bfloat16(gpu_device: str) -> None:
    tokens, state = make_tokens(1, 200, (1, 1, 64, 32), seed=3)
    mine, plain = errors_of(tokens, state, gpu_device)
    print(mine, plain)
    assert max(mine) < 2**-13
    assert 16 * max(mine) < min(plain)


def test_strong_decays_lose_nothing(gpu_device: str) -> None:
    """From 0 to -3000, mixed: what lies between two tokens is a sum, where differences lose all digits."""
    tokens = strong_decay.make_tokens("gated_delta_rule", 1, 150, (1, 1, 32, 16), seed=4)
    mine, plain = errors_of(tokens, make_state(1, (1, 1, 32, 16), seed=5), gpu_device)
    print(mine, plain)
    assert max(mine) < 2**-13


def test_keys_that_repeat_and_large_steps(gpu_device: str) -> None:
    """Steps of up to 2 mirror the state at keys that repeat: powers of the system are then large, inverses are not."""
    tokens, state = make_tokens(1, 135, (1, 1, 16, 16), seed=6)
    tokens.k[:, ::2] = tokens.k[:, :1].clone()
    tokens.g.mul_(0.01)
    tokens.beta.add_(1)
    mine, plain = errors_of(tokens, state, gpu_device)
    print(mine, plain)
    assert max(mine) < 2**-12
    assert 4 * max(mine) < max(plain)


@pytest.mark.parametrize("field", Tokens._fields)
def test_nan_stays_in_its_row(field: str, gpu_device: str) -> None:
    check_nan(make_tokens(2, 129, (1, 1, 8, 8), seed=7)[0], field, gpu_device)


def check_nan(tokens: Tokens, field: str, device: str) -> None:
    """One in the second chunk of row 0: heads of 8 x 8."""
    getattr(tokens, field)[(0, 70, *[0] * (getattr(tokens, field).dim() - 2))] = torch.nan
    states, places = make_state(3, (1, 1, 8, 8), seed=8).to(device), (torch.tensor([2, 1]), torch.tensor([129, 129]))
    there, where = [x.to(device) for x in tokens], [x.to(device) for x in places]
    out = triton_ops.extend_in_place(*there, states, *where, torch.bfloat16)
    assert out[0, :64].isfinite().all()
    assert not out[0, 70].isfinite().all()
    assert states[2].isfinite().all() == (field == "q")
    assert out[1].isfinite().all()
    assert states[1].isfinite().all()


class Noted:
    """A kernel that is not run."""

    def __init__(self, kernel: Any, name: str, launched: list[str]) -> None:
        self.arg_names, self._name, self._launched = kernel.arg_names, name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self._launched.append(self._name)


LONG = [name for _, name in KERNELS[:5]]
BY_CHANNEL = {name: name for name in LONG} | {
    "grams_kernel": "channel_products_kernel",
    "extend_kernel": "channel_extend_kernel",
}


@pytest.mark.parametrize(
    ("num_tokens", "key_dim", "dtype", "launched"),
    [
        (128, 8, torch.bfloat16, ["extend_kernel"]),
        (129, 8, torch.bfloat16, LONG),
        (129, 8, torch.float16, LONG),
        (129, 8, torch.float32, ["extend_kernel"]),
        (129, 200, torch.bfloat16, ["extend_kernel"]),
        (4096, 8, torch.bfloat16, LONG * 2),
    ],
)
def test_the_shape_and_the_model_choose(
    num_tokens: int, key_dim: int, dtype: torch.dtype, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Noted(getattr(module, name), name, found))
    heads, one = (1, 1, key_dim, 8), torch.tensor([1])
    tokens, state = make_tokens(1, num_tokens, heads, seed=8)
    triton_ops.extend_in_place(*tokens, torch.cat([state, state]), one, one, dtype)
    assert found == launched
    found.clear()
    by_channel = test_kda_rule.make_tokens(1, num_tokens, heads, seed=9)
    triton_ops.extend_in_place(*by_channel, torch.cat([state, state]), one, one, dtype)
    assert found == [BY_CHANNEL[name] for name in launched]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("heads", "part", "is_strong"), [((2, 4, 40, 24), 256, False), ((1, 2, 16, 16), 2048, True)])
def test_prompts_of_mamba2(
    heads: tuple[int, int, int, int], part: int, is_strong: bool, gpu_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels, without systems: updates are inputs. Rows of a pool in bfloat16, in parts of a prompt."""
    monkeypatch.setattr(prefill, "PART", part)
    lengths, slots = torch.tensor([150, 0, 64, 3]), torch.tensor([3, 4, 1, 0])
    tokens = test_ssd.make_tokens(4, 151, heads, seed=10)
    if is_strong:
        tokens = strong_decay.make_tokens("ssd", 4, 151, heads, seed=10)
    beyond = torch.arange(151) >= lengths[:, None]
    for x in tokens:
        x[beyond] = torch.nan
    before = make_state(5, heads, seed=11).bfloat16()
    after = before.to(gpu_device, copy=True)
    there, places = [x.to(gpu_device) for x in tokens], [x.to(gpu_device) for x in (slots, lengths)]
    out = ssd_ops.extend_in_place(*there, after, *places, torch.bfloat16).cpu()
    for i in (0, 2):
        row = test_ssd.Tokens(*(x[i : i + 1, : lengths[i]] for x in tokens))
        want, state = test_ssd.whole_sequence(row, before[slots[i]][None].float())
        assert 0 < error(out[i, : lengths[i]], want[0]) < 2**-14
        assert error(after[slots[i]].cpu(), state[0]) < torch.finfo(torch.bfloat16).eps
    assert torch.equal(after[[0, 2, 4]].cpu(), before[[0, 2, 4]])
    assert (out[beyond | (slots == 0)[:, None]] == 0).all()


def test_short_prompts_of_mamba2_are_exact(gpu_device: str) -> None:
    tokens, state = test_ssd.make_tokens(1, 100, (1, 1, 8, 8), seed=12), make_state(2, (1, 1, 8, 8), seed=13)
    there, places = [x.to(gpu_device) for x in tokens], [torch.tensor([x]).to(gpu_device) for x in (1, 100)]
    exact, split = (
        ssd_ops.extend_in_place(*there, state.to(gpu_device, copy=True), *places, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact, split)
