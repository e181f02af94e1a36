"""Kimi Delta Attention against the plain PyTorch forms of flash-linear-attention: recurrent, and in chunks of 64.

Its file with these forms is loaded alone: the package itself imports Triton's kernels, which need a GPU's driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.gated_delta_rule import reference, torch_ops
from specmamba.kernels.state_records import TreePlacement
from specmamba.kernels.state_records import reference as records_reference
from specmamba.kernels.state_records import torch_ops as records_ops
from tests.kernels.recurrent.layer_case import RECORDS
from tests.kernels.recurrent.records import make_records, make_state
from tests.kernels.recurrent.run_case import RunCase
from tests.kernels.recurrent.test_kda_layer import HEADS, Case
from tests.kernels.recurrent.test_kda_rule import assert_close, make_tokens
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

FOLDER = os.environ.get("SPECMAMBA_TEST_FLA")  # that has the packages, where they are not installed
PACKAGES = "fla-core==0.6.0 einops"
FORMS = [(reference, records_reference), (torch_ops, records_ops)]
NODES = 6

pytestmark = pytest.mark.slow  # a part of .ci/run installs the packages beside the fast tests
each_heads = pytest.mark.parametrize("heads", HEADS)
each_form = pytest.mark.parametrize(("ops", "of_records"), FORMS, ids=["reference", "torch"])
each_strength = pytest.mark.parametrize("strong", [False, True], ids=["usual", "strong"])


class Naive:
    """Its two functions as operators of this package."""

    def __init__(self, module: ModuleType) -> None:
        self._recurrent, self._chunked = module.naive_recurrent_kda, module.naive_chunk_kda

    def run(self, tokens: tuple[Tensor, ...], state: Tensor, *, in_chunks: bool = False) -> tuple[Tensor, Tensor]:
        """Outputs and last states of whole rows; in chunks, multiples of 64 tokens."""
        form = self._chunked if in_chunks else self._recurrent
        out, after = form(*tokens, scale=1.0, initial_state=state, output_final_state=True)
        return out, after.to(state.dtype)

    def extend(self, *operands: Tensor) -> tuple[Tensor, Tensor]:
        """``reference.extend``."""
        *tokens, state, lengths = operands
        out, after = torch.full_like(tokens[2], torch.nan), state.clone()
        for b, length in enumerate(lengths.tolist()):
            row = tuple(x[b : b + 1, :length] for x in tokens)
            out[b, :length], after[b] = (x[0] for x in self.run(row, state[b : b + 1]))
        return out, after

    def tree_verify(self, *operands: Any) -> Tensor:
        """``reference.tree_verify``, each path by itself behind the folded records; no record is written."""
        *tokens, state, records, placement = operands
        state = records_reference.fold(state, *records, placement.num_pending)
        out = torch.empty_like(tokens[2])
        for b, node in torch.cartesian_prod(*map(torch.arange, out.shape[:2])).tolist():
            path = placement.ancestors[b, node].nonzero()[:, 0]
            out[b, node] = self.run(tuple(x[b : b + 1, path] for x in tokens), state[b : b + 1])[0][0, -1]
        return out


@pytest.fixture(scope="module")
def naive() -> Iterator[Naive]:
    with pytest.MonkeyPatch.context() as patch:
        if FOLDER is not None:
            patch.syspath_prepend(FOLDER)
        package = find_spec("fla")
        if package is None or find_spec("einops") is None:
            where = "SPECMAMBA_TEST_FLA=DIR names a folder that has them"
            pytest.skip(f"not installed: {PACKAGES} (pip install --no-deps {PACKAGES}; with --target DIR, {where})")
        assert package.submodule_search_locations
        file = Path(next(iter(package.submodule_search_locations)), "ops", "kda", "naive.py")
        spec = spec_from_file_location("fla_ops_kda_naive", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        yield Naive(module)


@each_strength
@each_heads
@each_form
def test_known_tokens(
    ops: ModuleType, of_records: ModuleType, heads: tuple[int, int, int, int], strong: bool, naive: Naive
) -> None:
    """Of several chunks and less than one; its recurrent form."""
    length, counts = 70, torch.tensor([70, 9, 1])
    tokens, state = make_tokens(3, length, heads, seed=1, strong=strong), make_state(3, heads, seed=2)
    out, after = ops.extend(*tokens, state, counts)
    want, wanted = naive.extend(*tokens, state, counts)
    written = torch.arange(length) < counts[:, None]
    assert_close([out[written], after], [want[written], wanted])


@each_heads
@each_form
def test_known_tokens_in_its_chunks(
    ops: ModuleType, of_records: ModuleType, heads: tuple[int, int, int, int], naive: Naive
) -> None:
    tokens, state = make_tokens(2, 128, heads, seed=3), make_state(2, heads, seed=4)
    got = ops.extend(*tokens, state, torch.tensor([128, 128]))
    assert_close(got, naive.run(tokens, state, in_chunks=True))


@each_strength
@each_heads
@each_form
def test_a_chain_behind_an_accepted_chain(
    ops: ModuleType, of_records: ModuleType, heads: tuple[int, int, int, int], strong: bool, naive: Naive
) -> None:
    """A verify, all of it accepted, a second one, and the fold of both are its recurrence over all tokens."""
    tokens, state = make_tokens(2, 2 * NODES, heads, seed=5, strong=strong), make_state(2, heads, seed=6)
    want, wanted = naive.run(tokens, state)
    none, mask = torch.zeros(2, dtype=torch.int64), mask_of(batch_of_parents(("chain", "chain"), NODES, seed=7))
    records = make_records(2, 2 * NODES, heads, none, 8, has_channels=True)
    outs = []
    for at in (0, NODES):
        placement = TreePlacement(none + at, at, mask)
        outs.append(ops.tree_verify(*tokens.at(at, at + NODES), state, records, placement))
    after = of_records.fold(state, *records, none + 2 * NODES)
    assert_close([torch.cat(outs, 1), after], [want, wanted])


@each_strength
@each_heads
@each_form
def test_paths_of_trees(
    ops: ModuleType, of_records: ModuleType, heads: tuple[int, int, int, int], strong: bool, naive: Naive
) -> None:
    tokens, state = make_tokens(len(SHAPES), NODES, heads, seed=9, strong=strong), make_state(5, heads, seed=10)
    num_pending = torch.tensor([0, 4, 1, 3, 2])
    records = make_records(len(SHAPES), 4 + NODES, heads, num_pending, 11, has_channels=True)
    placement = TreePlacement(num_pending, 4, mask_of(batch_of_parents(SHAPES, NODES, seed=12)))
    want = naive.tree_verify(*tokens, state, records, placement)
    assert_close([ops.tree_verify(*tokens, state, records, placement)], [want])


@pytest.mark.parametrize("bound", [None, -5.0])
@each_heads
def test_a_layer(
    form: str, heads: tuple[int, int, int, int], bound: float | None, naive: Naive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees and runs, native and in PyTorch: what the layer's reference gives where its rule is theirs."""
    monkeypatch.setattr(reference, "extend", naive.extend)
    monkeypatch.setattr(reference, "tree_verify", naive.tree_verify)
    case = Case(heads, NODES, [0, 6, 1, 3, 17], bound=bound)
    torch.testing.assert_close(case.run(form)[0].double(), case.wanted()[0], **RECORDS)
    for length in (9, 131):
        RunCase(Case(heads, length, [0, 0], shapes=("chain",), bound=bound), [length, length // 2]).check(form)
