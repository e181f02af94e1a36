"""The time of a step on this machine, for any static tree and batch size.

Measured are whole engine steps and their phases, with trees of three shapes for every number of nodes (all children of
the root; two chains and leaves; as many nodes with children as fit) and with chains of every depth. All of them take
turns over several rounds, in another order each time, on full batches that replay recorded texts, so that drafts are
accepted as often as in use. Fitted per batch size, with a median over rounds:

- ``verify(N)``: monotone in the number of nodes, linear between those measured; chains and other trees apart.
- ``draft``: a first part (the head catches up with what was accepted, and picks the root's children), for chains and
  for other trees, and a part per deeper level that has nodes with children, monotone in their number. Least squares.
- ``overhead``: the rest of the whole step (commit, scheduling, text): a constant, for chains and other trees.

The root alone, plain decoding from a tree file, is measured, not fitted. Nothing else is assumed of the curves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmamba import LLM
from specmamba.measure.full_batch import Job, Stretch, run_full_batch
from specmamba.trees import StaticTree, TreeFile

NODES = (3, 5, 8, 12, 16, 24, 32, 48, 64)
Curve = tuple[tuple[int, float], ...]  # (x, milliseconds), x rising, milliseconds never falling


def is_chain(tree: StaticTree) -> bool:
    """Whether every node is the child of the one before; the root alone is a chain too."""
    return tree.parents == tuple(range(-1, tree.num_nodes - 1))


def level_widths(tree: StaticTree) -> tuple[int, ...]:
    """Numbers of nodes with children at depth 1, 2, ...: the batches that the draft head runs below the root."""
    depths = tree.depths
    inner = [depths[node] for node in set(tree.parents[1:]) if node]
    return tuple(inner.count(depth) for depth in range(1, max(inner, default=0) + 1))


def probe_trees(max_nodes: int, max_depth: int) -> list[StaticTree]:
    """Make the trees to measure; the root alone is the first."""
    chains = [_bundle(depth + 1, 1, depth) for depth in range(min(max_depth, max_nodes - 1) + 1)]
    bushes = []
    for nodes in sorted({n for n in NODES if n < max_nodes} | ({max_nodes} if max_nodes > 2 else set())):
        bushes.append(_bundle(nodes, nodes - 1, 1))
        if max_depth > 1 and nodes > 4:
            bushes += [_bundle(nodes, 2, max_depth), _bundle(nodes, (nodes - 1) // 2, 2)]
    return list(dict.fromkeys([*chains, *bushes]))


def _bundle(num_nodes: int, width: int, depth: int) -> StaticTree:
    """Make chains side by side below the root; the nodes left over become second children near the root."""
    chains = [(first, *[0] * d) for d in range(depth) for first in range(width)][: num_nodes - 1]
    leaves = [(*path, 1) for path in chains if len(path) < depth][: num_nodes - 1 - len(chains)]
    more = [(width + i,) for i in range(num_nodes - 1 - len(chains) - len(leaves))]
    return tree_of_paths([*chains, *leaves, *more])


def tree_of_paths(paths: Iterator[tuple[int, ...]] | Sequence[tuple[int, ...]]) -> StaticTree:
    """Make the tree whose nodes below the root have these rank paths; nodes are numbered level by level."""
    nodes = [(), *sorted(paths, key=lambda path: (len(path), path))]
    number = {path: node for node, path in enumerate(nodes)}
    return StaticTree(
        parents=(-1, *(number[path[:-1]] for path in nodes[1:])), ranks=(0, *(path[-1] for path in nodes[1:]))
    )


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of one step."""

    draft: float
    verify: float
    overhead: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.overhead


@dataclass(frozen=True)
class KindCost:
    """The fitted costs of chains, or of other trees."""

    verify: Curve  # over nodes
    draft_base: float
    overhead: float


@dataclass(frozen=True)
class BatchCost:
    """The fitted costs of one batch size."""

    root: StepCost
    chain: KindCost
    bush: KindCost | None  # None: trees with so few nodes are all chains
    level: Curve  # of one level of the draft, over its nodes with children

    def step(self, tree: StaticTree) -> StepCost:
        """Predict the cost of a step with ``tree``, which must not be larger than the measured trees."""
        if tree.num_nodes == 1:
            return self.root
        kind = self.chain if self.bush is None or is_chain(tree) else self.bush
        levels = sum(_at(self.level, width) for width in level_widths(tree))
        return StepCost(kind.draft_base + levels, _at(kind.verify, tree.num_nodes), kind.overhead)

    def as_json(self) -> dict[str, Any]:
        """Convert the costs for the report."""
        kinds = {"chain": self.chain, "tree": self.bush}
        return {
            "plain_step_ms": self.root.total,
            "verify_ms": {name: dict(kind.verify) for name, kind in kinds.items() if kind},
            "draft_base_ms": {name: kind.draft_base for name, kind in kinds.items() if kind},
            "draft_level_ms": dict(self.level),
            "overhead_ms": {name: kind.overhead for name, kind in kinds.items() if kind},
        }


@dataclass(frozen=True)
class Sample:
    """The times of a step with one tree: medians over rounds, corrected for the machine's speed in each round."""

    tree: StaticTree
    draft: float
    verify: float
    step: float


def measure(
    llm: LLM,
    trees: Sequence[StaticTree],
    rounds: Sequence[Sequence[Job]],
    folder: Path,
    seed: int,
    advance: Callable[[], None],
) -> list[Sample]:
    """Time every tree on the same batch of requests, once per round.

    Args:
        llm: an engine with room for the largest tree.
        trees: what to measure.
        rounds: the requests of each round, the same number in all.
        folder: for tree files.
        seed: of the order of the trees in each round.
        advance: called after every round.
    """
    files = [folder / f"probe-{i}.json" for i in range(len(trees))]
    for file, tree in zip(files, trees, strict=True):
        file.write_text(TreeFile(trees=(tree,)).model_dump_json(), "utf8")
    shuffler = random.Random(seed)
    table: list[dict[int, Stretch]] = []
    for jobs in rounds:
        order = list(range(len(trees)))
        shuffler.shuffle(order)
        stretches = {}
        for i in order:
            llm.workbench.use_drafts(speculative_tree=files[i])
            stretches[i] = run_full_batch(llm, jobs, clock=True)
        table.append(stretches)
        advance()
    return _medians(trees, table)


def _medians(trees: Sequence[StaticTree], table: Sequence[dict[int, Stretch]]) -> list[Sample]:
    order = range(len(trees))
    names = ("draft_ms", "verify_ms", "step_ms")
    times = np.array([[[getattr(row[i], name) for name in names] for i in order] for row in table])  # [round, tree, 3]
    steady = times / round_factors(times[:, :, 2])[:, None, None]
    return [Sample(tree, *map(float, np.median(steady[:, i], 0))) for i, tree in enumerate(trees)]


def round_factors(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimate how slow the machine was in each round, from times [rounds, trees]; 1 for the median round.

    Tukey's median polish of the logarithms: a time is its tree's cost times its round's factor.
    """
    logs = np.log(times)
    rounds = np.zeros(len(times))
    for _ in range(10):
        trees = np.median(logs - rounds[:, None], 0)
        rounds = np.median(logs - trees, 1)
    factors: NDArray[np.float64] = np.exp(rounds - np.median(rounds))
    return factors


def fit(samples: Sequence[Sample]) -> BatchCost:
    """Fit the costs of one batch size, as the docstring of this module describes.

    Args:
        samples: of ``probe_trees``.
    """
    root, *others = samples
    chains = [sample for sample in others if is_chain(sample.tree)]
    bushes = [sample for sample in others if not is_chain(sample.tree)]
    bases, level = _fit_draft(chains, bushes)
    return BatchCost(
        root=StepCost(root.draft, root.verify, root.step - root.draft - root.verify),
        chain=_fit_kind(chains, bases[0]),
        bush=_fit_kind(bushes, bases[1]) if bushes else None,
        level=level,
    )


def _fit_kind(samples: Sequence[Sample], draft_base: float) -> KindCost:
    by_nodes: dict[int, list[float]] = {}
    for sample in samples:
        by_nodes.setdefault(sample.tree.num_nodes, []).append(sample.verify)
    overheads = [sample.step - sample.draft - sample.verify for sample in samples]
    return KindCost(monotone(by_nodes), draft_base, float(np.median(overheads)))


def _fit_draft(chains: Sequence[Sample], bushes: Sequence[Sample]) -> tuple[list[float], Curve]:
    """Fit the first part of a draft, for chains and for other trees, and the cost of a level by its width."""
    widths = sorted({width for sample in [*chains, *bushes] for width in level_widths(sample.tree)})
    rows, targets = [], []
    for sample in [*chains, *bushes]:
        has = level_widths(sample.tree)
        row = [is_chain(sample.tree), not is_chain(sample.tree), *(has.count(width) for width in widths)]
        rows.append(np.array(row, float) / sample.draft)  # divided, so that relative errors have the same weight
        targets.append(1.0)
    solution = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=None)[0].tolist()
    return solution[:2], monotone({width: [max(ms, 0.0)] for width, ms in zip(widths, solution[2:], strict=True)})


def monotone(values: dict[int, list[float]]) -> Curve:
    """The non-decreasing curve with the least squared error (pool adjacent violators)."""
    pools: list[tuple[float, int, list[int]]] = []  # mean, number of values, their places
    for x in sorted(values):
        mean, count, places = float(np.mean(values[x])), len(values[x]), [x]
        while pools and pools[-1][0] > mean:
            before, number, xs = pools.pop()
            mean, count, places = (before * number + mean * count) / (number + count), number + count, xs + places
        pools.append((mean, count, places))
    return tuple((x, mean) for mean, _, places in pools for x in places)


def _at(curve: Curve, x: int) -> float:
    return float(np.interp(x, [place for place, _ in curve], [ms for _, ms in curve]))
