"""From acceptance and costs to the tree of each batch size.

The dynamic program proposes the best tree for every number of nodes, depth limit and limit on ranks (1: chains). A
candidate's acceptance length is walked on recorded text that it was not searched on: trees searched on one half of the
texts run along the other half, and the other way round. What is chosen is the highest acceptance length per millisecond
of a step; of equals the smallest tree, and drafting nothing at all is a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from specmamba.trees import StaticTree, TreeFile
from specmamba.tune.costs import BatchCost, StepCost
from specmamba.tune.search import Acceptance, Ranks, Walk, best_trees, walk

ROOT = StaticTree(parents=(-1,), ranks=(0,))


@dataclass(frozen=True)
class Candidate:
    """A tree, searched on all texts."""

    tree: StaticTree
    accept_length: float  # to be expected on other text: of trees of the same limits, each on what it was not made from
    accept_length_seen: float  # on the recorded text itself


@dataclass(frozen=True)
class Choice:
    """The tree for a batch size, and what is predicted of it."""

    batch_size: int
    candidate: Candidate
    cost: StepCost
    plain_ms: float
    speeds: Mapping[int, float]  # tokens per second of the best tree of each number of nodes

    @property
    def tree(self) -> StaticTree:
        return self.candidate.tree

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size * self.candidate.accept_length / self.cost.total * 1e3

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.candidate.accept_length * self.plain_ms / self.cost.total


def candidates(texts: Sequence[Ranks], max_nodes: int, max_depth: int, max_rank: int) -> list[Candidate]:
    """All trees worth a look, the smallest first.

    Args:
        texts: recorded ranks of two texts or more.
        max_nodes: nodes of a tree at the most, the root counted.
        max_depth: of the deepest node.
        max_rank: ranks of a child, from 0 up to below this.
    """
    halves = [texts[0::2], texts[1::2]]
    odds = [Acceptance.of(part, max_rank).odds for part in (texts, *halves)]
    found: dict[StaticTree, Candidate] = {ROOT: Candidate(ROOT, 1.0, 1.0)}
    walks: dict[tuple[StaticTree, int], Walk] = {}
    rank_limits = sorted({2**i for i in range(max_rank.bit_length()) if 2**i < max_rank} | {max_rank})
    for depth, ranks in product(range(1, max_depth + 1), rank_limits):
        whole, *by_half = (best_trees(table[:depth, :ranks], max_nodes) for table in odds)
        for nodes, tree in whole.items():
            if tree in found:
                continue
            for half in (0, 1):
                key = by_half[half][nodes], 1 - half
                walks[key] = walks.get(key) or walk(by_half[half][nodes], halves[1 - half])
            unseen = walks[by_half[0][nodes], 1] + walks[by_half[1][nodes], 0]
            found[tree] = Candidate(tree, unseen.accept_length, walk(tree, texts).accept_length)
    return sorted(found.values(), key=lambda candidate: candidate.tree.num_nodes)


def choose(batch_size: int, options: Sequence[Candidate], cost: BatchCost) -> Choice:
    """The candidate of the most tokens per second.

    Args:
        batch_size: requests that decode together.
        options: the smallest tree first.
        cost: of this batch size.
    """
    costs = [cost.step(option.tree) for option in options]
    rates = [option.accept_length / own.total for option, own in zip(options, costs, strict=True)]
    speeds: dict[int, float] = {}
    for option, rate in zip(options, rates, strict=True):
        nodes = option.tree.num_nodes
        speeds[nodes] = max(speeds.get(nodes, 0.0), rate * batch_size * 1e3)
    best = rates.index(max(rates))
    return Choice(batch_size, options[best], costs[best], cost.root.total, speeds)


def tree_file(choices: Sequence[Choice], note: str) -> TreeFile:
    """The trees of rising batch sizes as a file; equal neighbours become one, the last serves all larger batches."""
    trees: list[StaticTree] = []
    for choice, following in zip(choices, [*choices[1:], None], strict=True):
        if following is not None and choice.tree == following.tree:
            continue
        trees.append(choice.tree.model_copy(update={"max_batch_size": following and choice.batch_size}))
    return TreeFile(trees=tuple(trees), note=note)
