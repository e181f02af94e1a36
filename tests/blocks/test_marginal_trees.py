"""Trees over marginals: the ones that a best-first search finds, and drafts that are drawn for them."""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree
from specmamba.draft.blocks.marginal_trees import chain_of, marginal_trees
from specmamba.draft.heads.children import ChildPicker, Children
from specmamba.sampling_params import SamplingBatch, SamplingParams

CPU = torch.device("cpu")
SHAPES = [(1, 4, 5), (2, 3, 9), (4, 3, 9), (6, 1, 5), (7, 4, 16), (15, 4, 12), (3, 8, 33)]


def batch_of(size: int, params: list[SamplingParams] | None = None, rejects: bool = False) -> Batch:
    roots = torch.arange(size) + 90
    given = params or [SamplingParams(temperature=0.0)] * size
    sampling = SamplingBatch.of(given, list(range(size)), CPU, rules=["rejection" if rejects else "target"] * size)
    return Batch(tuple(range(1, size + 1)), torch.arange(1, size + 1), roots, roots, 200, sampling)


def children_of(logits: Tensor, k: int) -> Children:
    """The likeliest children of D nodes, from logits [B, D, V]."""
    return ChildPicker(draws=False).pick(logits, k, batch_of(len(logits)), 0)


def best_first(logits: Tensor, num_steps: int, k: int, max_nodes: int) -> dict[tuple[int, ...], float]:
    """Paths of tokens and their log probabilities, from logits [D, V]: the likeliest node that is left, one by one."""
    logp = logits.double().log_softmax(-1)
    likeliest = logp.topk(k, -1)
    found: dict[tuple[int, ...], float] = {}
    left: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while left and len(found) < max_nodes:
        value, path = heapq.heappop(left)
        found[path] = -value
        if len(path) < num_steps:
            for rank in range(k):
                token = int(likeliest.indices[len(path), rank])
                heapq.heappush(left, (value - float(logp[len(path), token]), (*path, token)))
    del found[()]
    return found


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.shape.parents[row].tolist()[1:], 1):
        assert 0 <= parent < node
        paths.append((*paths[parent], int(tree.tokens[row, node])))
    return paths[1:]


@pytest.mark.parametrize(("num_steps", "topk", "max_nodes"), SHAPES)
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_the_tree_is_that_of_a_best_first_search(num_steps: int, topk: int, max_nodes: int, sharpness: float) -> None:
    logits = sharpness * torch.randn(3, num_steps, 50, generator=torch.Generator().manual_seed(topk))
    trees = marginal_trees(num_steps, topk, max_nodes, CPU)
    tree = trees.best(batch_of(3), children_of(logits, topk))
    assert tree.tokens.shape == (3, max_nodes)
    assert tree.draft_probs is None
    for row in range(3):
        expected, paths = best_first(logits[row], num_steps, topk, max_nodes), paths_of(tree, row)
        assert len(set(paths)) == max_nodes - 1
        values = sorted(
            math.fsum(float(logits[row].double().log_softmax(-1)[i, t]) for i, t in enumerate(p)) for p in paths
        )
        # ties of float32 may be decided otherwise, which costs nothing
        assert values == pytest.approx(sorted(expected.values()), abs=1e-5)
        assert len(set(paths) & set(expected)) >= max_nodes - 2


def test_impossible_children_become_padding() -> None:
    """After filters a distribution may have fewer tokens than a node may have children."""
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0)]
    batch = batch_of(2, params, rejects=True)
    children = ChildPicker(draws=True).pick(logits, 3, batch, 0)
    tree = marginal_trees(3, 3, 8, CPU).best(batch, children)
    likeliest = logits[0].argmax(-1).tolist()
    parents = tree.shape.parents[0].tolist()
    assert sum(parent >= 0 for parent in parents) == 3  # the only chain that there is
    chain = [node for node, parent in enumerate(parents) if parent >= 0]
    assert tree.tokens[0, chain].tolist() == likeliest
    assert [parents[node] for node in chain] == [0, *chain[:-1]]
    assert (tree.shape.parents[1, 1:] >= 0).all()


def test_drawn_children_stand_before_the_distributions_that_they_were_drawn_from() -> None:
    logits = torch.randn(4, 5, 30, generator=torch.Generator().manual_seed(7))
    batch = batch_of(4, [SamplingParams(temperature=0.8)] * 4, rejects=True)
    children = ChildPicker(draws=True).pick(logits, 3, batch, 0)
    tree = marginal_trees(5, 3, 12, CPU).best(batch, children)
    probs = (logits / 0.8).softmax(-1)
    assert tree.draft_probs is not None
    for row in range(4):
        parents, depth = tree.shape.parents[row].tolist(), tree.shape.depth[row].tolist()
        for node in {parent for parent in parents if parent >= 0}:
            torch.testing.assert_close(tree.draft_probs[row, node], probs[row, depth[node]])
            own = [int(tree.tokens[row, child]) for child, parent in enumerate(parents) if parent == node]
            assert own == children.tokens[row, depth[node], : len(own)].tolist()
            assert len(set(own)) == len(own)
    chain = chain_of(batch, *ChildPicker(draws=True).pick_one(logits, batch, 0))
    assert chain.draft_probs is not None
    torch.testing.assert_close(chain.draft_probs[:, :5], probs)


def test_which_nodes_are_kept_does_not_depend_on_what_was_drawn() -> None:
    logits = torch.randn(1, 4, 30, generator=torch.Generator().manual_seed(7)).expand(64, -1, -1).contiguous()
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(64)]
    batch = batch_of(64, params, rejects=True)
    tree = marginal_trees(4, 4, 10, CPU).best(batch, ChildPicker(draws=True).pick(logits, 4, batch, 0))
    assert (tree.shape.parents == tree.shape.parents[0]).all()
    assert len(tree.tokens[:, 1].unique()) > 5
