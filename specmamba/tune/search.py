"""From recorded acceptance and measured costs to the best static tree of each batch size.

``best_trees`` is the dynamic program of Sequoia (arXiv 2402.12374, section 4.1), with odds that depend on the depth as
well as on the rank: a node at the rank path r_1 ... r_d is accepted with probability p[1, r_1] * ... * p[d, r_d], and
the value of a tree is the sum over its nodes below the root. Such odds ignore that easy and hard passages come in runs,
so they only propose trees; ``walk`` then measures a tree on the recorded ranks, step by step as a run would make them.
(The mean over all positions would be too high: a run skips the tokens it accepted, so its steps start at hard tokens
more often.)

Candidates are the best trees for every number of nodes, depth limit and limit on ranks (1: chains). The acceptance
length of a candidate is walked on text that it was not searched on: trees searched on one half of the texts run along
the other half, and the other way round. Chosen is the highest acceptance length per millisecond of a step; of equals
the smallest tree. Drafting nothing at all is a candidate too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from specmamba.trees import StaticTree, TreeFile
from specmamba.tune.costs import BatchCost, StepCost, tree_of_paths

Ranks = NDArray[np.int64]  # [T, D] of one text: rank of the token d + 1 places behind the root; -1 behind the end
Odds = NDArray[np.float64]  # [D, R]: probability that the token at a depth has this rank
ROOT = StaticTree(parents=(-1,), ranks=(0,))


@dataclass(frozen=True)
class Acceptance:
    """Counts of the ranks that the tokens of recorded texts had in the draft head's list, by depth."""

    counts: NDArray[np.int64]  # [D, R]
    num_samples: NDArray[np.int64]  # [D]

    @classmethod
    def of(cls, texts: Sequence[Ranks], max_rank: int) -> Acceptance:
        """Count the ranks below ``max_rank`` of recorded texts."""
        ranks = np.concatenate(texts)
        counts = np.stack([(ranks == rank).sum(0) for rank in range(max_rank)], 1)
        return cls(counts, (ranks >= 0).sum(0))

    @property
    def odds(self) -> Odds:
        """The share of each rank at each depth, [D, R]; 0 if nothing was recorded."""
        odds: Odds = self.counts / np.maximum(self.num_samples, 1)[:, None]
        return odds


def best_trees(odds: Odds, max_nodes: int) -> dict[int, StaticTree]:
    """Find the tree with the highest expected number of accepted tokens, for every number of nodes.

    A subtree is identified by the depth of its top and its number of nodes: O(D * R * max_nodes^2) steps.

    Args:
        odds: [D, R]; no tree is deeper than D, and no node has a child of rank R or more.
        max_nodes: largest number of nodes, the root counted.

    Returns:
        Trees by number of nodes, from 1; numbers that depth and ranks do not allow are left out.
    """
    num_depths, num_ranks = odds.shape
    sizes = np.arange(max_nodes)
    rest = sizes[:, None] - sizes  # [m, k]: nodes left when k of m go to one child
    # [m]: value of a top with m nodes below it; at the deepest level only m = 0
    value = np.where(sizes == 0, 0.0, -np.inf)
    taken: list[NDArray[np.int64]] = []  # by depth, the deepest first: [R, m], nodes that go to the child of each rank
    for depth in reversed(range(num_depths)):
        # [k]: value of a child with k nodes, itself counted; 0: no child
        below = np.concatenate([[0.0], 1.0 + value[:-1]])
        value = np.where(sizes == 0, 0.0, -np.inf)
        choices = np.zeros((num_ranks, max_nodes), np.int64)
        for rank in range(num_ranks):
            gain = np.where(np.isfinite(below), odds[depth, rank] * np.where(np.isfinite(below), below, 0.0), -np.inf)
            totals = np.where(rest >= 0, value[rest] + gain, -np.inf)
            choices[rank] = totals.argmax(1)
            value = totals.max(1)
        taken.append(choices)
    taken.reverse()
    return {int(m) + 1: tree_of_paths(_paths(taken, int(m), ())) for m in sizes if np.isfinite(value[m])}


def _paths(taken: Sequence[NDArray[np.int64]], num_below: int, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the rank paths of all nodes below the one at ``path``."""
    if not num_below:
        return
    choices = taken[len(path)]
    for rank in reversed(range(len(choices))):
        size = int(choices[rank, num_below])
        num_below -= size
        if size:
            yield (*path, rank)
            yield from _paths(taken, size - 1, (*path, rank))


@dataclass(frozen=True)
class Walk:
    """The steps of a run with a tree along recorded texts; counted as in ``SpecStats``."""

    histogram: tuple[int, ...]  # [depth + 1]: number of steps by accepted drafts

    @property
    def num_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_accepted(self) -> int:
        return sum(depth * steps for depth, steps in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Tokens per step, the target's own included."""
        return 1.0 + self.num_accepted / self.num_steps

    def __add__(self, other: Walk) -> Walk:
        longest = max(len(self.histogram), len(other.histogram))
        padded = [[*walk.histogram, *[0] * (longest - len(walk.histogram))] for walk in (self, other)]
        return Walk(tuple(a + b for a, b in zip(*padded, strict=True)))


def walk(tree: StaticTree, texts: Sequence[Ranks]) -> Walk:
    """Run along the texts with ``tree``: each step accepts drafts and continues behind the bonus token."""
    histogram = [0] * (max(tree.depths) + 1)
    for ranks in texts:
        accepted = accepted_depths(tree, ranks).tolist()
        position = 0
        while position < len(accepted):
            # the last token of a text is always the target's own
            count = min(accepted[position], len(accepted) - position - 1)
            histogram[count] += 1
            position += count + 1
    return Walk(tuple(histogram))


def accepted_depths(tree: StaticTree, ranks: Ranks) -> NDArray[np.int64]:
    """Number of drafts of ``tree`` that are accepted at every position of a text, [T]."""
    child = np.full((tree.num_nodes, max(tree.ranks) + 1), -1)
    for number, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if number:
            child[parent, rank] = number
    node = np.zeros(len(ranks), np.int64)
    depths = np.zeros(len(ranks), np.int64)
    is_on = np.ones(len(ranks), bool)
    for depth in range(min(max(tree.depths), ranks.shape[1])):
        taken = ranks[:, depth]
        is_on &= (taken >= 0) & (taken < child.shape[1])
        following = child[node, np.where(is_on, taken, 0)]
        is_on &= following >= 0
        node = np.where(is_on, following, node)
        depths += is_on
    return depths


@dataclass(frozen=True)
class Candidate:
    """A tree that was searched on all texts."""

    tree: StaticTree
    accept_length: float  # expected on other text: of trees with the same limits, on texts they were not searched on
    accept_length_seen: float  # on the text that it was searched on


@dataclass(frozen=True)
class Choice:
    """The tree for a batch size, and its predicted figures."""

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
        """The predicted speed over that of plain decoding."""
        return self.candidate.accept_length * self.plain_ms / self.cost.total


def candidates(texts: Sequence[Ranks], max_nodes: int, max_depth: int, max_rank: int) -> list[Candidate]:
    """Find all candidates, the smallest tree first.

    Args:
        texts: recorded ranks of two texts or more.
        max_nodes: nodes of a tree at the most, the root counted.
        max_depth: depth of the deepest node at the most.
        max_rank: ranks of children are below this.
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
    """Choose the candidate with the most tokens per second.

    Args:
        batch_size: requests that decode together.
        options: the smallest tree first.
        cost: the fitted costs of this batch size.
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
    """Make the tree file of ascending batch sizes; equal neighbours are merged, the last tree has no limit."""
    trees: list[StaticTree] = []
    for choice, following in zip(choices, [*choices[1:], None], strict=True):
        if following is not None and choice.tree == following.tree:
            continue
        trees.append(choice.tree.model_copy(update={"max_batch_size": following and choice.batch_size}))
    return TreeFile(trees=tuple(trees), note=note)
