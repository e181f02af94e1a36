"""Tree bookkeeping in Triton, against the reference, exactly."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specmamba.kernels import tree
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.tree import reference, torch_ops
from tests.kernels.test_tree import guesses
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

pytestmark = pytest.mark.usefixtures("poisoned")
NODES = pytest.mark.parametrize("nodes", [1, 2, 3, 8, 17, 64])


@pytest.fixture
def triton_ops(gpu_device: str) -> ModuleType:
    from specmamba.kernels.tree import triton_ops

    return triton_ops


@pytest.fixture(params=["torch_ops", "triton_ops"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    """Of what is new with the kernels, both forms."""
    if request.param == "torch_ops":
        return torch_ops
    request.getfixturevalue("gpu_device")
    from specmamba.kernels.tree import triton_ops

    return triton_ops


def strided(x: Tensor) -> Tensor:
    """The same numbers with others between the rows and behind the entries of each."""
    shape = *[2 * size for size in x.shape[:-1]], x.shape[-1] + 3
    wide = torch.full(shape, -77 if x.dtype != torch.bool else 1, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(size) if i else slice(None, None, 2) for i, size in enumerate(x.shape))]
    view.copy_(x)
    return view


def check(got: tuple[Tensor, ...] | Tensor, want: tuple[Tensor, ...] | Tensor) -> None:
    got, want = ((x,) if isinstance(x, Tensor) else x for x in (got, want))
    for got_x, want_x in zip(got, want, strict=True):
        assert got_x.dtype == want_x.dtype
        assert torch.equal(got_x.cpu(), want_x)


@pytest.mark.fast_cases(1)
@NODES
@pytest.mark.parametrize("layout", [torch.clone, strided], ids=["dense", "strided"])
def test_ancestors_and_depth(
    triton_ops: ModuleType, gpu_device: str, nodes: int, layout: Callable[[Tensor], Tensor]
) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    check(triton_ops.ancestors(layout(parents.to(gpu_device))), reference.ancestors(parents))
    mask = mask_of(parents)
    check(triton_ops.depth(layout(mask.to(gpu_device))), reference.depth(mask))


@pytest.mark.fast_cases(1)
@NODES
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_conv_index(triton_ops: ModuleType, gpu_device: str, nodes: int, width: int) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    check(triton_ops.conv_index(strided(parents.to(gpu_device)), width), reference.conv_index(parents, width))


@pytest.mark.fast_cases(1)
@NODES
@pytest.mark.parametrize("vocabulary", [1, 2, 5])
def test_accepted_path(triton_ops: ModuleType, gpu_device: str, nodes: int, vocabulary: int) -> None:
    layouts: list[Callable[[Tensor], Tensor]] = [torch.clone, strided]
    for seed, layout in enumerate(layouts):
        parents = batch_of_parents(SHAPES, nodes, seed=seed)
        tokens, targets = guesses(parents, vocabulary, seed)
        operands = tokens, parents, mask_of(parents), targets
        got = triton_ops.accepted_path(*(layout(x.to(gpu_device)) for x in operands))
        check(got, reference.accepted_path(*operands))


def test_ties_go_to_the_lowest_node_and_padding_is_never_accepted(triton_ops: ModuleType, gpu_device: str) -> None:
    """All tokens agree everywhere; the last row hangs a chain under a padding node."""
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, -1, -1, -1, -1], [-1, -1, 1, 2, 3]])
    tokens, targets = torch.ones(2, 3, 5, dtype=torch.int64).to(gpu_device)
    path, num_accepted, _, _ = triton_ops.accepted_path(
        tokens, parents.to(gpu_device), mask_of(parents).to(gpu_device), targets
    )
    assert num_accepted.tolist() == [2, 0, 0]
    assert path.tolist() == [[0, 2, 3, 3, 3], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("parent", [2, 3, 1 << 40, -(1 << 40)])
def test_a_parent_behind_its_node_counts_as_none(triton_ops: ModuleType, gpu_device: str, parent: int) -> None:
    """No walk is endless, and none leaves the tree."""
    wrong, right = (torch.tensor([[-1, 0, entry, 2]], device=gpu_device) for entry in (parent, -1))
    check(triton_ops.ancestors(wrong), triton_ops.ancestors(right).cpu())
    check(triton_ops.conv_index(wrong, 4), triton_ops.conv_index(right, 4).cpu())
    tokens = torch.zeros(2, 1, 4, dtype=torch.int64, device=gpu_device)
    assert triton_ops.accepted_path(tokens[0], wrong, triton_ops.ancestors(right), tokens[1])[1].tolist() == [1]


@NODES
def test_moves_match_the_reference(ops: ModuleType, gpu_device: str, nodes: int) -> None:
    gen = torch.Generator().manual_seed(nodes)
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    path, num_accepted, _, _ = reference.accepted_path(
        *guesses(parents, 1, 0)[:1], parents, mask_of(parents), guesses(parents, 1, 0)[1]
    )
    num_accepted = torch.minimum(num_accepted, torch.randint(nodes, num_accepted.shape, generator=gen))
    num_pending = torch.randint(9, num_accepted.shape, generator=gen)
    slots = torch.randint(1, 100, path.shape, generator=gen)
    operands = [x.to(gpu_device) for x in (strided(path), num_accepted, num_pending, strided(slots))]
    path_there, accepted_there, pending_there, slots_there = operands
    check(
        ops.commit_moves(path_there, accepted_there, 9, pending_there),
        reference.commit_moves(path, num_accepted, 9, num_pending),
    )
    check(ops.kv_moves(path_there, accepted_there, slots_there), reference.kv_moves(path, num_accepted, slots))


def test_moves_by_hand(ops: ModuleType, gpu_device: str) -> None:
    path, num_accepted = torch.tensor([[0, 2, 5, 5], [0, 0, 0, 0]]), torch.tensor([2, 0])
    slots = torch.tensor([[40, 41, 42, 43], [50, 51, 52, 53]])
    path, num_accepted, slots = (x.to(gpu_device) for x in (path, num_accepted, slots))
    source, target = ops.commit_moves(path, num_accepted, 7, torch.tensor([3, 0], device=gpu_device))
    assert source.tolist() == [[7, 9, 12, 7], [7, 7, 7, 7]]
    assert target.tolist() == [[3, 4, 5, 3], [0, 0, 0, 0]]
    source, target = ops.kv_moves(path.clamp(max=3), num_accepted, slots)
    assert source.tolist() == [[40, 42, 43, 0], [50, 0, 0, 0]]
    assert target.tolist() == [[40, 41, 42, 0], [50, 0, 0, 0]]


def test_nothing_waits_for_the_content_of_a_tensor() -> None:
    """The PyTorch forms run on tensors that have none: a CUDA graph can hold them."""
    parents = torch.empty(3, 5, dtype=torch.int64, device="meta")
    mask = torch_ops.ancestors(parents)
    torch_ops.conv_index(parents, 4)
    path, num_accepted, _, _ = torch_ops.accepted_path(parents, parents, mask, parents)
    moves = *torch_ops.commit_moves(path, num_accepted, 4, num_accepted), *torch_ops.kv_moves(path, num_accepted, path)
    assert all(x.shape == (3, 5) for x in (torch_ops.depth(mask), *moves))


@pytest.mark.usefixtures("launchable")
def test_triton_takes_trees_of_up_to_64_nodes() -> None:
    """Beyond, a node has more ancestors than an integer has bits."""
    for num_nodes in (tree.MAX_NODES, tree.MAX_NODES + 1):
        nodes = torch.zeros(1, num_nodes, dtype=torch.int64)
        for name in ("ancestors", "depth", "conv_index", "commit_moves", "kv_moves"):
            extra = {"commit_moves": 3, "kv_moves": 2, "conv_index": 1}.get(name, 0)
            form = operator_of(getattr(tree, name)).choose(nodes, *[nodes] * extra)
            assert (form == "triton") == (num_nodes <= tree.MAX_NODES)
    assert operator_of(tree.accepted_path).choose(*[torch.zeros(1, 3, dtype=torch.int64)] * 4) == "triton"
