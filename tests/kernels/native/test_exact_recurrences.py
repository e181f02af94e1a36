"""Exact recurrences in native code: near the reference, and the same bits for a token in a run, a tree or a fold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels import state_records
from specmamba.kernels.state_records import Buffers, Trees
from specmamba.kernels.tree import reference as tree
from tests.kernels.recurrent import test_delta_net, test_kda_layer, test_mamba2
from tests.kernels.recurrent.layer_case import LayerCase, operands_of, values
from tests.kernels.recurrent.run_case import RunCase, copied_state
from tests.kernels.trees import mask_of

pytestmark = pytest.mark.usefixtures("needs_native")

LAYERS: dict[str, Callable[..., LayerCase]] = {
    "KDA": test_kda_layer.Case,
    "Mamba2": test_mamba2.Case,
    "delta net": test_delta_net.Case,
}
HEADS = [(1, 2, 128, 128), (1, 3, 7, 5), (2, 4, 16, 24), (3, 3, 40, 72)]
each_layer = pytest.mark.parametrize("layer", LAYERS)
each_heads = pytest.mark.parametrize("heads", HEADS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
PATH = [0, 2, 3, 5]  # of the tree below: what is accepted; the others are wrong guesses
PARENTS = [-1, 0, 0, 2, 3, 3, 1]


def exact_run(layer: str, heads: tuple[int, int, int, int], lengths: list[int], dtype: torch.dtype) -> RunCase:
    longest = max(lengths) + 2
    case = RunCase(LAYERS[layer](heads, longest, [0] * len(lengths), shapes=("chain",), dtype=dtype), lengths)
    case.state = replace(case.state, is_exact=True)
    return case


@each_layer
@each_heads
@each_dtype
def test_trees_match_the_reference(layer: str, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    case = LAYERS[layer](heads, 7, [0, 6, 1, 3, 5], dtype=dtype)
    case.buffers = replace(case.buffers, is_exact=True)
    case.check("native")


@each_layer
@each_heads
@each_dtype
def test_runs_match_the_reference(layer: str, heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    exact_run(layer, heads, [70, 0, 3], dtype).check("native")


@pytest.mark.fast_cases(24)
@each_layer
@each_heads
@each_dtype
@pytest.mark.parametrize("folded", [4, 12, 99])
def test_bits_do_not_depend_on_how_tokens_are_run(
    layer: str, heads: tuple[int, int, int, int], dtype: torch.dtype, folded: int
) -> None:
    """In one run, in two, and as paths of trees that are folded when so many records are pending."""
    length = 70
    case = exact_run(layer, heads, [length], dtype)
    whole, after = case.run()
    first, middle = case.part(slice(0, 1), slice(0, 23), [23]).run()
    rest = case.part(slice(0, 1), slice(23, length), [length - 23])
    rest.state = replace(rest.state, states=middle.states, windows=middle.windows)
    second, end = rest.run()
    assert torch.equal(torch.cat([first, second], 1), whole[:, :length])
    walk, outputs = Walk(case), []
    for at in range(0, length - len(PATH), len(PATH)):
        walk.fold(folded)
        outputs.append(walk.verify(at))
    walk.fold(1)
    walked = torch.cat(outputs, 1)
    assert torch.equal(walked, whole[:, : walked.shape[1]])
    last = case.part(slice(0, 1), slice(walked.shape[1], length), [length - walked.shape[1]])
    last.state = replace(last.state, states=walk.buffers.states, windows=walk.windows)
    tail, walked_end = last.run()
    assert torch.equal(tail, whole[:, walked.shape[1] : length])
    for other in (end, walked_end):
        assert torch.equal(other.states.nan_to_num(9.0), after.states.nan_to_num(9.0))
        assert torch.equal(other.windows.nan_to_num(9.0), after.windows.nan_to_num(9.0))


class Walk:
    """Tokens of a run as paths of draft trees, whose other nodes have inputs of other tokens."""

    def __init__(self, case: RunCase) -> None:
        self.case, self.pending, capacity = case, 0, 128
        state = copied_state(case.state)
        slot, self.windows = state.slots.rows[0], state.windows
        channels, width = case.weights.conv.shape
        inputs = torch.zeros(1, width - 1 + capacity, channels, dtype=state.windows.dtype)
        inputs[0, : width - 1] = state.windows[slot]
        self.buffers = Buffers(state.states, inputs, *empty_records(case, capacity), is_exact=True)
        self.slots, self.width = torch.tensor([slot]), width

    def verify(self, at: int) -> Tensor:
        """Outputs of the tokens from ``at`` on, which become pending."""
        nodes, parents, width = len(PARENTS), torch.tensor([PARENTS]), self.width
        tokens = [(at + 31 + node) % 70 for node in range(nodes)]
        for i, node in enumerate(PATH):
            tokens[node] = at + i
        offset = self.pending + 1  # a hole behind the pending records, as in a batch
        relative = tree.conv_index(parents, width)
        index = relative + width - 1 + torch.where(relative >= 0, offset, self.pending)
        pending = torch.tensor([self.pending])
        trees = Trees(torch.zeros(1, dtype=torch.int64), self.slots, index, pending, offset, mask_of(parents))
        inputs = type(self.case.inputs)(*(x[:, tokens].contiguous() for x in values(self.case.inputs)))
        assert self.case.operators.can_fuse(operands_of(self.buffers, trees), inputs, self.case.weights)
        out: Tensor = self.case.operators.tree_verify(inputs, self.case.weights, self.buffers, trees)
        source = torch.tensor(PATH) + offset
        target = torch.arange(len(PATH)) + self.pending
        for buffer in (self.buffers.k, self.buffers.u, self.buffers.decay):
            buffer[0, target] = buffer[0, source]
        self.buffers.conv_inputs[0, target + width - 1] = self.buffers.conv_inputs[0, source + width - 1]
        self.pending += len(PATH)
        return out[:, PATH]

    def fold(self, least: int) -> None:
        """Fold if so many records are pending; first into another tensor, which gives the same bits."""
        if self.pending < least:
            return
        b, slot, count = self.buffers, self.slots, torch.tensor([self.pending])
        given = b.states[slot], b.k, b.u, b.decay, count
        materialized = state_records.fold_exactly(*given)
        of_layers = (x[None] for x in (b.states, b.conv_inputs, b.k, b.u, b.decay, self.windows))
        states, conv_inputs, k, u, decay, windows = of_layers
        whole = Buffers(states, conv_inputs, k, u, decay, windows, is_exact=True)
        state_records.fold_rows(whole, torch.tensor([0]), slot, count)
        assert torch.equal(materialized, b.states[slot])
        self.pending = 0


def empty_records(case: RunCase, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """k, u and decays of one row for a run's heads, all zeros."""
    hv, key_dim, value_dim = case.state.states.shape[1:]
    hk = (case.weights.conv.shape[0] - hv * value_dim) // (2 * key_dim)
    of_decay = (hv, key_dim) if case.weights.dt_bias.dim() == 2 else (hv,)
    sizes = (hk, key_dim), (hv, value_dim), of_decay
    k, u, decay = (torch.zeros(1, capacity, *size) for size in sizes)
    return k, u, decay


def test_without_the_flag_bits_differ() -> None:
    """So the comparison finds other orders of sums."""
    case = exact_run("delta net", HEADS[0], [70], torch.float32)
    exact, _ = case.run()
    case.state = replace(case.state, is_exact=False)
    usual, _ = case.run()
    assert not torch.equal(exact, usual)


def test_other_forms_refuse() -> None:
    case = exact_run("Mamba2", HEADS[1], [3], torch.float32)
    with pytest.raises(RuntimeError, match="native code"):
        case.run("torch")
    b, count = Walk(case).buffers, torch.tensor([1])
    with pytest.raises(RuntimeError, match="native code"):
        state_records.fold_exactly(b.states[:1].double(), b.k, b.u, b.decay, count)
