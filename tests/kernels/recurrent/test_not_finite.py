"""What is not finite in one node, or in one row, and who feels it: both recurrences, every form."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specmamba.kernels import state_records
from specmamba.kernels.causal_conv1d import torch_ops as conv_ops
from specmamba.kernels.gated_delta_rule import reference as delta_reference
from specmamba.kernels.gated_delta_rule import torch_ops as delta_ops
from specmamba.kernels.ssd import reference as ssd_reference
from specmamba.kernels.ssd import torch_ops as ssd_ops
from specmamba.kernels.state_records import TreePlacement
from specmamba.kernels.state_records import native_ops as native_records
from specmamba.kernels.state_records import torch_ops as torch_records
from tests.kernels.recurrent import test_delta_net, test_gated_delta_rule, test_mamba2, test_ssd
from tests.kernels.recurrent.records import Records, make_records, make_state
from tests.kernels.trees import batch_of_parents, mask_of
from tests.pairwise import pairwise

HEADS = (2, 4, 16, 24)  # key head 0 serves value heads 0 and 1
SHAPES, NODES, HIT = ("binary", "binary", "star"), 7, 1  # of row 0; its children are nodes 3 and 4
PENDING = torch.tensor([2, 0, 3])
OFFSET = 3
NOT_FINITE = [torch.nan, torch.inf, -torch.inf]
SAME: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


class Recurrence(NamedTuple):
    reference: ModuleType
    torch_ops: ModuleType
    make_tokens: Callable[[int, int, int], Any]  # batch, length, seed -> the recurrence's inputs


RECURRENCES = {
    "delta": Recurrence(
        delta_reference, delta_ops, lambda *sizes: test_gated_delta_rule.make_tokens(*sizes[:2], HEADS, sizes[2])[0]
    ),
    "ssd": Recurrence(ssd_reference, ssd_ops, lambda *sizes: test_ssd.make_tokens(*sizes[:2], HEADS, sizes[2])),
}
each_field = pytest.mark.parametrize(
    ("kind", "field"),
    [("delta", field) for field in "qkvg"] + [("delta", "beta")] + [("ssd", field) for field in "cbug"],
)
each_form = pytest.mark.parametrize("form", ["reference", "torch_ops"])


def verify(
    ops: ModuleType, tokens: Any, records: Records, pending: Tensor = PENDING, offset: int = OFFSET
) -> tuple[Tensor, Records]:
    """Outputs and the records afterwards, which are not the ones that were given."""
    after, state = records.clone(), make_state(3, HEADS, seed=5)
    mask = mask_of(batch_of_parents(SHAPES, tokens.g.shape[1], seed=0))
    return ops.tree_verify(*tokens, state, after, TreePlacement(pending, offset, mask)), after


def spoilt(tokens: Any, field: str, place: tuple[int, ...], value: float) -> Any:
    """With one number of one token changed, that of the first head."""
    changed = getattr(tokens, field).clone()
    changed[(*place, *[0] * (changed.dim() - 2))] = value
    return tokens._replace(**{field: changed})


@pairwise(
    each_field,
    each_form,
    pytest.mark.parametrize("value", NOT_FINITE),
)
def test_a_node_is_felt_by_its_descendants_alone(form: str, kind: str, field: str, value: float) -> None:
    recurrence = RECURRENCES[kind]
    ops, tokens = getattr(recurrence, form), recurrence.make_tokens(3, NODES, 1)
    records = make_records(3, OFFSET + NODES, HEADS, PENDING, seed=2)
    want, wanted = verify(ops, tokens, records)
    out, left = verify(ops, spoilt(tokens, field, (0, HIT), value), records)

    below = mask_of(batch_of_parents(SHAPES, NODES, seed=0))[0, :, HIT]
    felt = torch.zeros(out.shape[:3], dtype=torch.bool)
    heads = [0, 1] if field in "qkcb" else [0]
    for node in [HIT] if field in "qc" else below.nonzero().flatten().tolist():
        felt[0, node, heads] = True
    assert torch.equal(~out.isfinite().all(-1), felt)
    torch.testing.assert_close(out[~felt], want[~felt], **SAME)
    others = ~below.repeat(3, 1)
    others[1:] = True
    for mine, clean in zip(left, wanted, strict=True):
        assert mine[:, : OFFSET + NODES].isfinite().all()
        torch.testing.assert_close(mine[:, OFFSET:][others], clean[:, OFFSET:][others], **SAME)


@each_field
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_root_without_drafts(kind: str, field: str, value: float) -> None:
    recurrence = RECURRENCES[kind]
    tokens, records = recurrence.make_tokens(3, 1, 1), make_records(3, OFFSET + 1, HEADS, PENDING, seed=2)
    want, _ = verify(recurrence.torch_ops, tokens, records)
    out, left = verify(recurrence.torch_ops, spoilt(tokens, field, (0, 0), value), records)
    assert not out[0, 0, 0].isfinite().all()
    assert torch.equal(out[1:], want[1:])
    assert all(x.isfinite().all() for x in left)


@each_field
@each_form
def test_a_rejected_node_leaves_nothing_behind(form: str, kind: str, field: str) -> None:
    """Only the roots are accepted: what the others left are holes before the next nodes, and behind what is folded."""
    recurrence = RECURRENCES[kind]
    ops, tokens, offset = getattr(recurrence, form), recurrence.make_tokens(3, NODES, 1), OFFSET + NODES
    records = make_records(3, offset + NODES, HEADS, PENDING, seed=2)
    _, clean = verify(ops, tokens, records)
    _, left = verify(ops, spoilt(tokens, field, (0, HIT), torch.nan), records)
    for x in (*clean, *left):
        for row, count in enumerate(PENDING.tolist()):
            x[row, count] = x[row, OFFSET]
    following = recurrence.make_tokens(3, NODES, 3)
    want, _ = verify(ops, following, clean, PENDING + 1, offset)
    out, _ = verify(ops, following, left, PENDING + 1, offset)
    torch.testing.assert_close(out, want, **SAME)
    state = make_state(3, HEADS, seed=5)
    want = torch_records.fold(state, *clean, PENDING + 1)
    torch.testing.assert_close(torch_records.fold(state, *left, PENDING + 1), want, **SAME)
    if native_records.code() is not None:
        torch.testing.assert_close(state_records.fold(state, *left, PENDING + 1), want, rtol=1e-5, atol=1e-5)


@each_field
@pytest.mark.parametrize("at", [0, 70, 129])
def test_a_known_token_is_felt_in_its_row_alone(kind: str, field: str, at: int) -> None:
    recurrence, counts = RECURRENCES[kind], torch.tensor([130, 130, 77])
    extend, tokens = recurrence.torch_ops.extend, recurrence.make_tokens(3, 130, 1)
    state = make_state(3, HEADS, seed=5)
    want, want_state = extend(*tokens, state, counts)
    out, after = extend(*spoilt(tokens, field, (1, at), torch.nan), state, counts)
    assert not out[1, at, 0].isfinite().all()
    for x, y in ((out[0], want[0]), (out[2, :77], want[2, :77]), (after[[0, 2]], want_state[[0, 2]])):
        torch.testing.assert_close(x, y, **SAME)
    assert after[1].isfinite().all() == (field in "qc")


@each_field
def test_padding_changes_no_other_row(kind: str, field: str) -> None:
    recurrence, counts = RECURRENCES[kind], torch.tensor([80, 66, 1])
    extend, tokens = recurrence.torch_ops.extend, recurrence.make_tokens(3, 80, 1)
    state = make_state(3, HEADS, seed=5)
    want, want_state = extend(*tokens, state, counts)
    for row in (1, 2):
        for at in (66, 79):
            tokens = spoilt(tokens, field, (row, at), torch.nan)
    out, after = extend(*tokens, state, counts)
    torch.testing.assert_close(after, want_state, **SAME)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(out[row, :count], want[row, :count], **SAME)


def test_a_convolution_of_known_tokens_stays_in_its_row() -> None:
    x, window, weight, lengths = torch.randn(3, 9, 5), torch.randn(3, 3, 5), torch.randn(5, 4), torch.tensor([9, 9, 4])
    want, want_window = conv_ops.extend(x, window, weight, lengths)
    x[1, 2, 3] = torch.nan
    y, after = conv_ops.extend(x, window, weight, lengths)
    felt = torch.zeros_like(y, dtype=torch.bool)
    felt[1, 2:6, 3] = True
    assert torch.equal(y.isnan(), felt)
    torch.testing.assert_close(y[~felt], want[~felt])
    assert torch.equal(after, want_window)


LAYERS: dict[str, Any] = {"delta_net": test_delta_net.Case, "mamba2": test_mamba2.Case}
CHANNELS = {"q or x": 0, "k": 40, "v or B": 100, "C": 159}


@pairwise(
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
    pytest.mark.parametrize(
        ("layer", "field", "channel"),
        [(layer, "mixed", channel) for layer in LAYERS for channel in CHANNELS.values()]
        + [("delta_net", field, 1) for field in ("gate", "a", "b")]
        + [("mamba2", "gate", 50), ("mamba2", "dt", 3)],
    ),
    pytest.mark.parametrize("value", NOT_FINITE),
)
def test_a_layer(form: str, layer: str, field: str, channel: int, value: float, dtype: torch.dtype) -> None:
    """As for the recurrence, through convolution, step sizes and norms; in native code bit for bit."""
    case = LAYERS[layer](HEADS, NODES, PENDING.tolist(), shapes=SHAPES, dtype=dtype)
    want, wanted = case.run(form)
    is_fine = (field, value) in {("a", -torch.inf), ("dt", -torch.inf), ("b", torch.inf), ("b", -torch.inf)}  # 0, or 1
    getattr(case.inputs, field)[0, HIT].view(-1)[channel] = value
    out, left = case.run(form)

    below = case.trees.ancestors[0, :, HIT]
    felt = torch.zeros(3, NODES, dtype=torch.bool)
    felt[0] = below if field != "gate" else torch.arange(NODES) == HIT
    bad = ~out.flatten(2).isfinite().all(-1)
    assert torch.equal(bad, felt & (not is_fine))
    others = torch.ones(3, NODES, dtype=torch.bool)
    others[0] = ~below
    nodes = slice(case.trees.node_offset, case.trees.node_offset + NODES)
    pairs = [(out, want)]
    for name in ("k", "u", "decay"):
        mine, clean = (getattr(x, name)[case.trees.rows, nodes] for x in (left, wanted))
        assert mine.isfinite().all()
        pairs.append((mine, clean))
    for mine, clean in pairs:
        if form == "native":
            assert torch.equal(mine[others], clean[others])
        else:
            torch.testing.assert_close(mine[others], clean[others], **SAME)
