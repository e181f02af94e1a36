"""Tree bookkeeping: torch_ops against the reference, exactly, and both against properties that need no reference."""

import pytest
import torch
from torch import Tensor

from specmamba.kernels.tree import native_ops, reference, torch_ops
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of, path_to
from tests.pairwise import pairwise

NODES = pytest.mark.parametrize("nodes", [1, 2, 3, 8, 17, 40])


def guesses(parents: Tensor, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """tokens and target_tokens [B, N]; a small vocabulary makes agreement, ties and repeated siblings common."""
    gen = torch.Generator().manual_seed(seed)
    tokens, target_tokens = torch.randint(vocabulary, (2, *parents.shape), generator=gen)
    return tokens, target_tokens


def accept(form: str, tokens: Tensor, parents: Tensor, mask: Tensor, target_tokens: Tensor) -> tuple[Tensor, ...]:
    if form == "native":
        return native_ops.accepted_path(tokens, parents, mask, target_tokens)
    return torch_ops.accepted_path(tokens, parents, mask, target_tokens)


@NODES
def test_ancestors_and_depth(form: str, nodes: int) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    before = parents.clone()
    mask = (native_ops if form == "native" else torch_ops).ancestors(parents)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, reference.ancestors(parents))
    assert torch.equal(mask, mask_of(parents))
    depth = torch_ops.depth(mask)
    assert depth.dtype == torch.int64
    assert torch.equal(depth, reference.depth(mask))
    for b, row in enumerate(parents.tolist()):
        assert depth[b].tolist() == [len(path_to(row, i)) - 1 for i in range(nodes)]
    assert torch.equal(parents, before)


def test_padding_between_nodes_is_its_own_ancestor_only() -> None:
    parents = torch.tensor([[-1, -1, 0, -1, 2]])
    want = torch.eye(5, dtype=torch.bool)
    want[2, 0] = want[4, 0] = want[4, 2] = True
    assert torch.equal(torch_ops.ancestors(parents)[0], want)
    assert torch_ops.depth(torch_ops.ancestors(parents)).tolist() == [[0, 0, 1, 0, 2]]


@NODES
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_conv_index(form: str, nodes: int, width: int) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    index = (native_ops if form == "native" else torch_ops).conv_index(parents, width)
    assert index.dtype == torch.int64
    assert index.shape == (*parents.shape, width)
    assert torch.equal(index, reference.conv_index(parents, width))
    for b, row in enumerate(parents.tolist()):
        for i in range(nodes):
            walk = list(range(-width, 0)) + path_to(row, i)
            assert index[b, i].tolist() == walk[-width:]


@pairwise(
    NODES,
    pytest.mark.parametrize("vocabulary", [1, 2, 5]),
    pytest.mark.parametrize("seed", range(3)),
)
def test_accepted_path_matches_reference(form: str, nodes: int, vocabulary: int, seed: int) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=seed)
    tokens, target_tokens = guesses(parents, vocabulary, seed)
    mask = mask_of(parents)
    before = [x.clone() for x in (tokens, parents, mask, target_tokens)]
    got = accept(form, tokens, parents, mask, target_tokens)
    want = reference.accepted_path(tokens, parents, mask, target_tokens)
    for name, got_x, want_x in zip(("path", "num_accepted", "path_tokens", "bonus"), got, want, strict=True):
        assert got_x.dtype == torch.int64, name
        assert torch.equal(got_x, want_x), name
    assert all(torch.equal(a, b) for a, b in zip(before, (tokens, parents, mask, target_tokens), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_accepted_path_says_what_the_target_would_have_said(seed: int) -> None:
    """Each accepted token is the target's choice at its parent, the bonus follows, and no longer path exists."""
    parents = batch_of_parents(SHAPES, 13, seed=seed)
    tokens, target_tokens = guesses(parents, 2, seed)
    path, num_accepted, path_tokens, bonus = torch_ops.accepted_path(tokens, parents, mask_of(parents), target_tokens)
    for b, row in enumerate(parents.tolist()):
        length = int(num_accepted[b])
        walk = path[b, : length + 1].tolist()
        assert walk == path_to(row, walk[-1])
        assert walk[0] == 0
        assert path[b, length:].unique().numel() == 1
        assert path_tokens[b, :length].tolist() == tokens[b, walk[1:]].tolist()
        assert path_tokens[b, : length + 1].tolist() == target_tokens[b, walk].tolist()
        assert bool((path_tokens[b, length:] == bonus[b]).all())
        for node in range(13):
            route = path_to(row, node)
            agreed = all(tokens[b, i] == target_tokens[b, row[i]] for i in route[1:])
            if route[0] == 0 and agreed:
                assert len(route) - 1 < length or (len(route) - 1 == length and node >= walk[-1])


def test_accepted_path_edges() -> None:
    chain = torch.tensor([[-1, 0, 1]] * 3)
    tokens = torch.tensor([[5, 6, 7]] * 3)
    # everything agrees; nothing agrees; agreement below a rejected node does not count
    target_tokens = torch.tensor([[6, 7, 8], [9, 7, 8], [6, 9, 8]])
    path, num_accepted, path_tokens, bonus = torch_ops.accepted_path(tokens, chain, mask_of(chain), target_tokens)
    assert num_accepted.tolist() == [2, 0, 1]
    assert bonus.tolist() == [8, 9, 9]
    assert path.tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 1]]
    assert path_tokens.tolist() == [[6, 7, 8, 8], [9, 9, 9, 9], [6, 9, 9, 9]]


def test_ties_go_to_the_lowest_node_and_padding_is_never_accepted() -> None:
    """All tokens agree everywhere; the last row hangs a chain under a padding node."""
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, -1, -1, -1, -1], [-1, -1, 1, 2, 3]])
    tokens, target_tokens = torch.ones(2, 3, 5, dtype=torch.int64)
    path, num_accepted, _, _ = torch_ops.accepted_path(tokens, parents, mask_of(parents), target_tokens)
    assert num_accepted.tolist() == [2, 0, 0]
    assert path.tolist() == [[0, 2, 3, 3, 3], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.usefixtures("needs_native")
def test_a_native_walk_takes_one_shape_for_all_rows_and_refuses_what_does_not_fit() -> None:
    parents = torch.arange(-1, 4).expand(3, -1)
    tokens = torch.tensor([[9, 1, 2, 3, 4], [9, 1, 2, 0, 4], [9, 0, 0, 0, 0]])
    choices = torch.tensor([[1, 2, 3, 4, 5]] * 3)
    path, num_accepted, path_tokens, bonus = native_ops.accepted_path(tokens, parents, mask_of(parents), choices)
    assert num_accepted.tolist() == [4, 2, 0]
    assert path.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert path_tokens.tolist() == [[1, 2, 3, 4, 5, 5], [1, 2, 3, 3, 3, 3], [1] * 6]
    assert bonus.tolist() == [5, 3, 1]
    for wrong in [(tokens[:2], parents, choices), (tokens, parents[:, :4], choices), (tokens, parents, choices.int())]:
        with pytest.raises(ValueError, match=r"shape|int64"):
            native_ops.accepted_path(*wrong[:2], mask_of(parents), wrong[2])


@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("parent", [2, 3, 1 << 40, -(1 << 40)])
def test_a_parent_behind_its_node_counts_as_none(parent: int) -> None:
    """Native code reads no memory of others for it, whatever it is."""
    tokens, targets = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    mask = mask_of(torch.tensor([[-1, 0, 1]]))
    for node, want in ((1, 0), (2, 1)):
        parents = torch.tensor([[-1, 0, 1]])
        parents[0, node] = parent
        _, num_accepted, _, _ = native_ops.accepted_path(tokens, parents, mask, targets)
        assert num_accepted.tolist() == [want]


@NODES
def test_moves_of_an_accepted_path(form: str, nodes: int) -> None:
    parents = batch_of_parents(SHAPES, nodes, seed=nodes)
    tokens, target_tokens = guesses(parents, 2, seed=nodes)
    path, num_accepted, _, _ = torch_ops.accepted_path(tokens, parents, mask_of(parents), target_tokens)
    num_pending, slots = torch.arange(len(parents)) % 4, torch.arange(parents.numel()).view_as(parents) + 5
    ops = native_ops if form == "native" else torch_ops
    for found, right in (
        (
            ops.commit_moves(path, num_accepted, 9, num_pending),
            reference.commit_moves(path, num_accepted, 9, num_pending),
        ),
        (ops.kv_moves(path, num_accepted, slots), reference.kv_moves(path, num_accepted, slots)),
    ):
        assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
