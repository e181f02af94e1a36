"""Decays of 0 to e^-3000, mixed as they come: what is behind a strong one is as exact as if it had not been there.

A log decay of -500 has no digits for 1e-6 beside it, so no form may add up whole paths and take differences.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="needs hypothesis, which images for GPUs have not")
from hypothesis import given, settings
from hypothesis import strategies as st

from specmamba.kernels.gated_delta_rule import reference as delta_reference
from specmamba.kernels.gated_delta_rule import torch_ops as delta_ops
from specmamba.kernels.ssd import reference as ssd_reference
from specmamba.kernels.ssd import torch_ops as ssd_ops
from specmamba.kernels.state_records import TreePlacement
from specmamba.kernels.state_records import native_ops as native_records
from specmamba.kernels.state_records import torch_ops as torch_records
from tests.exactness import why_not_native
from tests.kernels.recurrent import test_delta_net, test_mamba2, test_state_records
from tests.kernels.recurrent.records import HEADS, TOLERANCE, make_state
from tests.kernels.recurrent.run_case import RunCase
from tests.kernels.recurrent.strong_decay import DECAYS, make_tokens, mixed, pending_records
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

# Inputs that softplus makes such decays of, for a rate of -1000: from -8e-4 to -3000.
INPUTS = torch.tensor([-14.0, -11.0, -8.0, -6.0, 0.0, 3.0])
FORMS = ["torch"] + ["native"] * (why_not_native() is None)
each_tier = pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)], ids=["few", "many"])
each_recurrence = pytest.mark.parametrize("name", ["gated_delta_rule", "ssd"])
each_layer = pytest.mark.parametrize("layer", [test_delta_net, test_mamba2], ids=["delta_net", "mamba2"])
each_form = pytest.mark.parametrize("form", FORMS)

heads = st.sampled_from(HEADS)
pendings = st.lists(st.integers(0, 19), min_size=1, max_size=4)
seeds = st.integers(0, 1000)


def hold(count: int, check: Callable[..., None], **operands: st.SearchStrategy[Any]) -> None:
    """Check this many examples."""
    settings(max_examples=count)(given(**operands)(check))()


def assert_close(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, **TOLERANCE)


@each_tier
@each_recurrence
def test_known_tokens(name: str, count: int) -> None:
    reference, ops = (ssd_reference, ssd_ops) if name == "ssd" else (delta_reference, delta_ops)

    def check(of: tuple[int, int, int, int], length: int, seed: int) -> None:
        tokens, state = make_tokens(name, 2, length, of, seed), make_state(2, of, seed)
        lengths = torch.full((2,), length)
        want = reference.extend(*tokens.double(), state.double(), lengths)
        assert_close(ops.extend(*tokens, state, lengths), want)

    hold(count, check, of=heads, length=st.integers(1, 90), seed=seeds)


@each_tier
@each_recurrence
def test_trees(name: str, count: int) -> None:
    reference, ops = (ssd_reference, ssd_ops) if name == "ssd" else (delta_reference, delta_ops)

    def check(of: tuple[int, int, int, int], pending: list[int], nodes: int, shape: str, seed: int) -> None:
        offset, counts = max(pending), torch.tensor(pending)
        tokens, state = make_tokens(name, len(pending), nodes, of, seed), make_state(len(pending), of, seed)
        records = pending_records(offset + nodes, of, counts, seed)
        wanted, mask = records.clone(torch.float64), mask_of(batch_of_parents((shape,) * len(pending), nodes, seed))
        out = ops.tree_verify(*tokens, state, records, TreePlacement(counts, offset, mask))
        want = reference.tree_verify(*tokens.double(), state.double(), wanted, TreePlacement(counts, offset, mask))
        assert_close((out, *(x[:, offset:] for x in records)), (want, *(x[:, offset:] for x in wanted)))

    shapes = st.sampled_from(SHAPES)
    hold(count, check, of=heads, pending=pendings, nodes=st.integers(1, 17), shape=shapes, seed=seeds)


@each_tier
@each_form
def test_folds(form: str, count: int) -> None:
    def check(of: tuple[int, int, int, int], pending: list[int], seed: int) -> None:
        counts = torch.tensor(pending)
        state, records = make_state(len(pending), of, seed), pending_records(20, of, counts, seed)
        ops = native_records if form == "native" else torch_records
        want = test_state_records.token_by_token(state, records, counts)
        assert_close([ops.fold(state, *records, counts)], [want])

    hold(count, check, of=heads, pending=pendings, seed=seeds)


def decay_strongly(case: Any, seed: int) -> None:
    """Decays of a layer's case, and of the records that are pending in it."""
    case.weights.negative_a.fill_(-1000.0)
    case.weights.dt_bias.zero_()
    inputs = case.inputs.a if hasattr(case.inputs, "a") else case.inputs.dt
    inputs.copy_(mixed(INPUTS, inputs.shape, seed))
    decay = case.buffers.decay
    decay.copy_(torch.where(decay.isnan(), decay, mixed(DECAYS, decay.shape, seed)))


@each_tier
@each_form
@each_layer
def test_layers(layer: ModuleType, form: str, count: int) -> None:
    def check(of: tuple[int, int, int, int], pending: list[int], nodes: int, seed: int) -> None:
        torch.manual_seed(seed)
        case = layer.Case(of, nodes, pending)
        decay_strongly(case, seed)
        case.check(form)

    hold(count, check, of=heads, pending=pendings, nodes=st.integers(1, 17), seed=seeds)


@each_tier
@each_form
@each_layer
def test_layers_over_runs(layer: ModuleType, form: str, count: int) -> None:
    def check(of: tuple[int, int, int, int], length: int, seed: int) -> None:
        torch.manual_seed(seed)
        case = layer.Case(of, length, [0, 0], shapes=("chain",))
        decay_strongly(case, seed)
        RunCase(case, [length, length // 2]).check(form)

    hold(count, check, of=heads, length=st.integers(1, 90), seed=seeds)
