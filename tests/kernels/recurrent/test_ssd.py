"""State space duality: the reference against transformers' Mamba2 mixer, torch_ops against the reference."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from specmamba.kernels import mamba2
from specmamba.kernels.ssd import reference, torch_ops
from specmamba.kernels.state_records import ExtendOperands, RowSet, TreePlacement
from specmamba.kernels.state_records import reference as records_reference
from specmamba.kernels.state_records import torch_ops as records_ops
from specmamba.layers.mamba2 import mix
from tests.kernels.recurrent.records import HEADS, TOLERANCE, Records, check_rounds, make_records, make_state
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of, path_to
from tests.pairwise import pairwise

LENGTHS = [1, 63, 64, 65, 500]


class Tokens(NamedTuple):
    """Inputs of T tokens per row, in the argument order of the op."""

    c: Tensor  # [B, T, G, S]
    b: Tensor  # [B, T, G, S]
    u: Tensor  # [B, T, H, P]
    g: Tensor  # [B, T, H]

    def at(self, start: int, stop: int) -> Tokens:
        return Tokens(*(x[:, start:stop].contiguous() for x in self))

    def double(self) -> Tokens:
        return Tokens(*(x.double() for x in self))


def make_tokens(batch: int, length: int, heads: tuple[int, int, int, int], seed: int) -> Tokens:
    """Random tokens as a model would produce them; heads are (G, H, S, P)."""
    (groups, num_heads, state_dim, head_dim), gen = heads, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    scale = state_dim**-0.5
    return Tokens(
        normal(batch, length, groups, state_dim) * scale,
        normal(batch, length, groups, state_dim) * scale,
        normal(batch, length, num_heads, head_dim),
        -torch.nn.functional.softplus(normal(batch, length, num_heads) - 1),
    )


def whole_sequence(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence in float64, all heads at once: the same as ``reference``, fast enough for long texts."""
    tokens, current, outputs = tokens.double(), state.double(), []
    c, b = (x.repeat_interleave(tokens.u.shape[2] // x.shape[2], 2) for x in (tokens.c, tokens.b))
    for t in range(tokens.g.shape[1]):
        added = b[:, t, :, :, None] * tokens.u[:, t, :, None]
        current = tokens.g[:, t, :, None, None].exp() * current + added
        outputs.append((c[:, t, :, :, None] * current).sum(2))
    return torch.stack(outputs, 1), current


class TestTransformers:
    """The reference, with the convolution's and the layer's composition, is the mixer of transformers."""

    @staticmethod
    def config(groups: int, **settings: Any) -> Mamba2Config:
        return Mamba2Config(
            **{"hidden_size": 24, "expand": 1, "num_heads": 4, "head_dim": 6, "n_groups": groups, "state_size": 5}
            | {"conv_kernel": 4, "num_hidden_layers": 1, "chunk_size": 16, "use_conv_bias": True}
            | settings
        )

    @staticmethod
    def mixer(config: Mamba2Config) -> Mamba2Mixer:
        """Its output projection is the identity."""
        mixer = Mamba2Mixer(config, 0).eval()
        for name, x in mixer.named_parameters():
            x.data.normal_(0.0, 0.5)
            if name == "out_proj.weight":
                torch.nn.init.eye_(x)
        return mixer

    @staticmethod
    def ours(mixer: Mamba2Mixer, x: Tensor, state: Tensor, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, state and window after tokens x [B, L, H]."""
        lengths = torch.full(x.shape[:1], x.shape[1])
        weights = mamba2.Weights(
            conv=mixer.conv1d.weight.squeeze(1),
            conv_bias=mixer.conv1d.bias,
            negative_a=-mixer.A_log.exp(),
            dt_bias=mixer.dt_bias,
            skip=mixer.D,
            norm=mixer.norm.weight,
            norm_eps=mixer.norm.variance_epsilon,
            norm_groups=mixer.n_groups,
            norm_before_gate=False,
            num_groups=mixer.n_groups,
            state_dim=mixer.ssm_state_size,
            head_dim=mixer.head_dim,
            dt_limit=mixer.time_step_limit,
        )

        states, windows, slots = state.clone(), window.clone(), RowSet.of(range(len(x)), x.device)
        sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        inputs = mamba2.Inputs(*mixer.in_proj(x).split(sizes, -1))
        out = mix(inputs, weights, ExtendOperands(states, windows, slots, lengths))
        return out, states, windows

    @pairwise(
        pytest.mark.parametrize("use_conv_bias", [False, True]),
        pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.9)]),
        pytest.mark.parametrize("groups", [1, 2, 4]),
    )
    @torch.no_grad()
    def test_the_mixer(self, groups: int, limit: tuple[float, float], use_conv_bias: bool) -> None:
        mixer = self.mixer(self.config(groups, time_step_limit=limit, use_conv_bias=use_conv_bias))
        x = torch.randn(2, 37, 24)
        state, window = torch.zeros(2, 4, 5, 6), torch.zeros(2, 3, mixer.conv_dim)
        out, _, _ = self.ours(mixer, x, state, window)
        torch.testing.assert_close(out, mixer(x), rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_state_and_window(self) -> None:
        """After a prompt and a step behind it, whose layouts are other ones there."""
        config = self.config(2)
        mixer, cache, x = self.mixer(config), DynamicCache(config=config), torch.randn(2, 20, 24)
        wanted = [mixer(x[:, :19], cache), mixer(x[:, 19:], cache)]
        state, window = torch.zeros(2, 4, 5, 6), torch.zeros(2, 3, mixer.conv_dim)
        first, state, window = self.ours(mixer, x[:, :19], state, window)
        second, state, window = self.ours(mixer, x[:, 19:], state, window)
        torch.testing.assert_close(torch.cat([first, second], 1), torch.cat(wanted, 1), rtol=1e-4, atol=1e-4)
        theirs = cache.get_recurrent_state(0, state_idx=0), cache.get_conv_state(0, state_idx=0)
        torch.testing.assert_close(state.transpose(2, 3), theirs[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(window.transpose(1, 2), theirs[1][..., -3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [[1], [7, 3], [0, 5, 2], [63, 64], [65, 1], [130, 77]])
def test_extend_matches_reference(lengths: list[int], heads: tuple[int, int, int, int], device: str) -> None:
    padded = max(lengths) + len(lengths) % 2
    tokens, state = make_tokens(len(lengths), padded, heads, padded), make_state(len(lengths), heads, padded + 1)
    counts = torch.tensor(lengths)
    beyond = torch.arange(padded) >= counts[:, None]
    for x in tokens:
        x[beyond] = torch.nan
    before = [x.clone() for x in (*tokens, state, counts)]
    operands = [x.to(device) for x in (*tokens, state, counts)]
    out, new_state = (x.cpu() for x in torch_ops.extend(*operands))
    want, want_state = reference.extend(*tokens.double(), state.double(), counts)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(out[i, :length].double(), want[i, :length], **TOLERANCE)
    torch.testing.assert_close(new_state.double(), want_state, **TOLERANCE)
    assert out.shape == tokens.u.shape
    assert out.dtype == new_state.dtype == torch.float32
    assert new_state.data_ptr() != operands[4].data_ptr()
    assert all(torch.equal(x.nan_to_num(9), y.cpu().nan_to_num(9)) for x, y in zip(before, operands, strict=True))


@pytest.mark.parametrize("has_state", [False, True], ids=["from_zero", "from_a_state"])
@pytest.mark.parametrize("length", LENGTHS)
def test_extend_of_any_length(length: int, has_state: bool) -> None:
    heads = (2, 4, 16, 24)
    tokens, state = make_tokens(2, length, heads, length), make_state(2, heads, seed=5) * has_state
    out, new_state = torch_ops.extend(*tokens, state, torch.tensor([length, length]))
    want, want_state = whole_sequence(tokens, state)
    torch.testing.assert_close(out.double(), want, **TOLERANCE)
    torch.testing.assert_close(new_state.double(), want_state, **TOLERANCE)


def test_the_fast_recurrence_is_the_reference() -> None:
    tokens, state = make_tokens(2, 9, HEADS[1], 3).double(), make_state(2, HEADS[1], 4).double()
    for x, y in zip(whole_sequence(tokens, state), reference.extend(*tokens, state, torch.tensor([9, 9])), strict=True):
        torch.testing.assert_close(x, y)
        assert y.dtype is torch.float64


@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -60.0])
def test_extend_is_stable_at_any_decay(decay: float) -> None:
    """No decay at all, and decay so strong that dividing by a cumulative product would overflow."""
    tokens, state = make_tokens(2, 71, HEADS[1], seed=3), make_state(2, HEADS[1], seed=4)
    tokens.g.fill_(decay)
    counts = torch.tensor([71, 40])
    out, new_state = torch_ops.extend(*tokens, state, counts)
    want, want_state = reference.extend(*tokens.double(), state.double(), counts)
    torch.testing.assert_close(out[0].double(), want[0], **TOLERANCE)
    torch.testing.assert_close(new_state.double(), want_state, **TOLERANCE)


@pytest.mark.parametrize("split", [1, 31, 64, 99])
def test_extend_in_two_parts_equals_one(split: int) -> None:
    tokens, state = make_tokens(2, 100, HEADS[1], seed=split), make_state(2, HEADS[1], seed=1)
    whole, whole_state = torch_ops.extend(*tokens, state, torch.full((2,), 100))
    first, middle = torch_ops.extend(*tokens.at(0, split), state, torch.full((2,), split))
    second, last = torch_ops.extend(*tokens.at(split, 100), middle, torch.full((2,), 100 - split))
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **TOLERANCE)
    torch.testing.assert_close(last, whole_state, **TOLERANCE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 33])
def test_tree_verify_matches_reference(nodes: int, heads: tuple[int, int, int, int], device: str) -> None:
    check_tree_verify(nodes, heads, node_offset=6, pending=[0, 6, 1, 3, 5], device=device)


@pytest.mark.parametrize("fill", range(18))
def test_tree_verify_at_every_fill_of_the_pending_list(fill: int) -> None:
    check_tree_verify(3, HEADS[1], node_offset=fill, pending=[fill, fill // 2, 0, fill, max(0, fill - 1)])


def check_tree_verify(
    nodes: int, heads: tuple[int, int, int, int], node_offset: int, pending: list[int], device: str = "cpu"
) -> None:
    batch, capacity, num_pending = len(SHAPES), node_offset + nodes + 3, torch.tensor(pending)
    tokens, state = make_tokens(batch, nodes, heads, seed=nodes), make_state(batch, heads, seed=nodes + 2)
    records = make_records(batch, capacity, heads, num_pending, seed=nodes + 1)
    written = slice(node_offset, node_offset + nodes)
    for x in records:
        x[:, written] = torch.nan  # the op must write these before it reads them
    got, want = Records(*(x.to(device, copy=True) for x in records)), records.clone(torch.float64)
    mask, checkpoint = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes)), state.to(device, copy=True)
    placement = TreePlacement(num_pending.to(device), node_offset, mask.to(device))
    out = torch_ops.tree_verify(*(x.to(device) for x in tokens), checkpoint, got, placement).cpu()
    want_out = reference.tree_verify(
        *tokens.double(), state.double(), want, TreePlacement(num_pending, node_offset, mask)
    )
    torch.testing.assert_close(out.double(), want_out, **TOLERANCE)
    got = Records(*(x.cpu() for x in got))
    outside = [j for j in range(capacity) if j not in range(node_offset, node_offset + nodes)]
    for got_x, want_x, before in zip(got, want, records, strict=True):
        torch.testing.assert_close(got_x[:, written].double(), want_x[:, written], **TOLERANCE)
        assert torch.equal(got_x[:, outside], before[:, outside])
    assert torch.equal(state, checkpoint.cpu())


@pytest.mark.parametrize("node_offset", [0, 1, 5])
@pytest.mark.parametrize("nodes", [1, 6])
def test_num_pending_none_means_every_record_before_the_nodes(nodes: int, node_offset: int) -> None:
    full = torch.full((2,), node_offset)
    tokens, state = make_tokens(2, nodes, HEADS[1], seed=21), make_state(2, HEADS[1], seed=22)
    mask = mask_of(batch_of_parents(("bushy", "padded"), nodes, seed=22))
    want = make_records(2, node_offset + nodes, HEADS[1], full, seed=23)
    for ops in (reference, torch_ops):
        got = want.clone()
        want_out = reference.tree_verify(*tokens, state, want, TreePlacement(full, node_offset, mask))
        out = ops.tree_verify(*tokens, state, got, TreePlacement(None, node_offset, mask))
        for x, y in zip((out, *got), (want_out, *want), strict=True):
            torch.testing.assert_close(x, y, **TOLERANCE)


@pytest.mark.parametrize("decay", [0.0, -60.0])
def test_tree_verify_is_stable_at_any_decay(decay: float) -> None:
    """Strong decay along a path makes off-path differences so large that their exponential overflows."""
    tokens, state = make_tokens(len(SHAPES), 7, HEADS[1], seed=31), make_state(len(SHAPES), HEADS[1], seed=32)
    tokens.g.fill_(decay)
    num_pending = torch.tensor([0, 3, 1, 2, 3])
    mask = mask_of(batch_of_parents(SHAPES, 7, seed=32))
    got = make_records(len(SHAPES), 10, HEADS[1], num_pending, seed=33)
    want = got.clone(torch.float64)
    out = torch_ops.tree_verify(*tokens, state, got, TreePlacement(num_pending, 3, mask))
    want_out = reference.tree_verify(*tokens.double(), state.double(), want, TreePlacement(num_pending, 3, mask))
    torch.testing.assert_close(out.double(), want_out, **TOLERANCE)


def test_siblings_do_not_mix() -> None:
    """Changing one leaf changes nothing at any other node: each record is final when it is written."""
    tokens, state = make_tokens(1, 9, HEADS[1], seed=5), make_state(1, HEADS[1], seed=6)
    mask = mask_of(batch_of_parents(("star",), 9, seed=0))
    none = torch.zeros(1, dtype=torch.int64)
    first = make_records(1, 9, HEADS[1], none, seed=6)
    second = first.clone()
    out = torch_ops.tree_verify(*tokens, state, first, TreePlacement(none, 0, mask))
    for x in tokens:
        x[:, 4] *= 0.5
    changed = torch_ops.tree_verify(*tokens, state, second, TreePlacement(none, 0, mask))
    others = [i for i in range(9) if i != 4]
    torch.testing.assert_close(out[:, others], changed[:, others], rtol=1e-6, atol=1e-6)
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x[:, others], y[:, others], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(out[:, 4], changed[:, 4])


@pairwise(
    pytest.mark.parametrize("ops", [reference, torch_ops], ids=["reference", "torch_ops"]),
    pytest.mark.parametrize("heads", HEADS),
    pytest.mark.parametrize("nodes", [1, 2, 7]),
)
def test_snapshots_match_the_recurrence_along_every_path(
    ops: ModuleType, nodes: int, heads: tuple[int, int, int, int]
) -> None:
    """Into a part of a larger buffer, whose rest stays as it is."""
    batch = len(SHAPES)
    tokens, state = make_tokens(batch, nodes, heads, seed=nodes), make_state(batch, heads, seed=nodes + 1)
    parents, before = batch_of_parents(SHAPES, nodes, seed=nodes), state.clone()
    buffer = torch.full((batch + 2, nodes + 3, *state.shape[1:]), torch.nan)
    snapshots = buffer[1:-1, :nodes]
    out = ops.tree_verify_snapshots(*tokens, state, snapshots, parents)
    for i, tree in enumerate(parents.tolist()):
        for node in range(nodes):
            path = Tokens(*(x[i : i + 1, path_to(tree, node)] for x in tokens))
            want, want_state = whole_sequence(path, state[i : i + 1])
            torch.testing.assert_close(out[i, node].double(), want[0, -1], **TOLERANCE)
            torch.testing.assert_close(snapshots[i, node].double(), want_state[0], **TOLERANCE)
    assert buffer[[0, -1]].isnan().all()
    assert buffer[:, nodes:].isnan().all()
    assert torch.equal(state, before)


@pytest.mark.parametrize("ops", [reference, torch_ops], ids=["reference", "torch_ops"])
def test_snapshots_of_chains(ops: ModuleType) -> None:
    """``parents`` None means chains."""
    tokens, state = make_tokens(3, 6, HEADS[2], seed=1), make_state(3, HEADS[2], seed=2)
    want, end = whole_sequence(tokens, state)
    snapshots = torch.full((3, 6, *state.shape[1:]), torch.nan)
    out = ops.tree_verify_snapshots(*tokens, state, snapshots, None)
    torch.testing.assert_close(out.double(), want, **TOLERANCE)
    torch.testing.assert_close(snapshots[:, -1].double(), end, **TOLERANCE)


@pytest.mark.parametrize("nodes", [1, 4, 9])
@pytest.mark.parametrize("heads", HEADS)
def test_snapshots_equal_records(nodes: int, heads: tuple[int, int, int, int], device: str) -> None:
    """The state after a node is the checkpoint folded over the records of its path."""
    batch = len(SHAPES)
    tokens, state = make_tokens(batch, nodes, heads, seed=nodes), make_state(batch, heads, seed=nodes + 1)
    parents, none = batch_of_parents(SHAPES, nodes, seed=nodes), torch.zeros(batch, dtype=torch.int64)
    records = make_records(batch, nodes, heads, none, seed=2)
    by_records = torch_ops.tree_verify(*tokens, state, records, TreePlacement(none, 0, mask_of(parents)))
    snapshots = torch.empty(batch, nodes, *state.shape[1:], device=device)
    there = (x.to(device) for x in (*tokens, state))
    by_snapshots = torch_ops.tree_verify_snapshots(*there, snapshots, parents.to(device))
    torch.testing.assert_close(by_records, by_snapshots.cpu(), **TOLERANCE)
    snapshots = snapshots.cpu()
    for i, tree in enumerate(parents.tolist()):
        for node in range(nodes):
            path = path_to(tree, node)
            of_path = (x[i : i + 1, path] for x in records)
            folded = records_ops.fold(state[i : i + 1], *of_path, torch.tensor([len(path)]))
            torch.testing.assert_close(folded[0], snapshots[i, node], **TOLERANCE)


@pytest.mark.parametrize(
    ("ops", "of_records"),
    [(reference, records_reference), (torch_ops, records_ops)],
    ids=["reference", "torch_ops"],
)
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_verify_and_commit_equal_the_recurrence(ops: ModuleType, of_records: ModuleType, seed: int) -> None:
    """Verify a random tree, accept a random path, fold when it is due, and go on: always equal to plain extend."""
    checkpoint = make_state(2, HEADS[1], seed)
    check_rounds(partial(make_tokens, 2), whole_sequence, ops, of_records, checkpoint, seed)
