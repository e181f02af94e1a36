"""Sizes of drafts where several ranks share a model: rank 0 decides them, by its clock, and tells the others.

What is told are the size of every step, and the trees that are chosen in it, in captured steps too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing.costs import StepCosts
from specmamba.draft.sizing.rounds import Bounds, DraftSize, SizedBatch
from specmamba.draft.sizing.sizer import DraftSizer
from specmamba.kernels.draft_sizing import Chosen, Ints, TreeArrays
from specmamba.parallel.ranks import Ranks

_NUM_FIELDS = 5  # of a size, in front of a number for each row
_ASK = DraftSize(-1)  # no size: the drafter is asked which rows it must draft for, and the size follows
_OF_TREES = "tokens", "parents", "candidates", "num_nodes"  # of TreeArrays; the others follow from them


def build_sizer(
    ranks: Ranks, bounds: Bounds, trees: TreeArrays, costs: StepCosts, totals: Callable[[int], Sequence[int]]
) -> DraftSizer:
    """The sizer of a rank, or of an engine of one process; arguments as for ``DraftSizer``."""
    if ranks.size == 1:
        return DraftSizer(bounds, trees, costs, totals)
    kind = _FirstSizer if ranks.is_first else _OtherSizer
    return kind(ranks, bounds, trees, costs, totals)


class _RankSizer(DraftSizer):
    """A sizer whose decisions are those of rank 0."""

    def __init__(
        self,
        ranks: Ranks,
        bounds: Bounds,
        trees: TreeArrays,
        costs: StepCosts,
        totals: Callable[[int], Sequence[int]],
    ) -> None:
        super().__init__(bounds, trees, costs, totals)
        self._ranks = ranks
        self._told = [torch.from_numpy(getattr(trees, name)) for name in _OF_TREES]

    def _tell_trees(self, num_rows: int) -> None:
        for x in self._told:
            self._ranks.broadcast(x[:num_rows])


class _FirstSizer(_RankSizer):
    """Decides, and tells the other ranks."""

    def again(self, rows: tuple[int, ...]) -> DraftSize | None:
        """As ``DraftSizer.again``."""
        size = super().again(rows)
        return None if size is None else self._tell(size, len(rows))

    def plan(self, batch: SizedBatch, rows: tuple[int, ...], must_draft: Callable[[], Sequence[bool]]) -> DraftSize:
        """As ``DraftSizer.plan``. Where the drafter is asked, which may run tokens then, so it is on all ranks."""

        def ask_all() -> Sequence[bool]:
            self._tell(_ASK, len(rows))
            return must_draft()

        return self._tell(super().plan(batch, rows, ask_all), len(rows))

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable = None) -> Chosen:
        """As ``DraftSizer.choose``."""
        chosen = super().choose(candidates, padded_size, key)
        self._tell_trees(padded_size)
        if key is None:
            self._ranks.broadcast(torch.tensor(list(map(int, chosen[:3]))))
        return chosen

    def _tell(self, size: DraftSize, num_rows: int) -> DraftSize:
        fields = [size.depth, size.is_chain, size.is_probe, size.learns, size.drafted is not None]
        of_rows = np.zeros(num_rows, np.int64) if size.drafted is None else size.drafted
        self._ranks.broadcast(torch.tensor([*map(int, fields), *of_rows.astype(np.int64).tolist()]))
        return size


class _OtherSizer(_RankSizer):
    """Does what rank 0 tells, and learns nothing."""

    def begin(self, row: int, mode: int, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def again(self, rows: tuple[int, ...]) -> DraftSize | None:
        """None: ``plan`` knows."""
        return None

    def plan(self, batch: SizedBatch, rows: tuple[int, ...], must_draft: Callable[[], Sequence[bool]]) -> DraftSize:
        """What rank 0 has planned."""
        told = self._receive(len(rows))
        if told[0] == _ASK.depth:
            must_draft()
            told = self._receive(len(rows))
        depth, is_chain, is_probe, learns, has_drafted = told[:_NUM_FIELDS]
        drafted = np.array(told[_NUM_FIELDS:], np.bool_) if has_drafted else None
        return DraftSize(depth, bool(is_chain), drafted, bool(is_probe), bool(learns))

    def _receive(self, num_rows: int) -> list[int]:
        told: list[int] = self._ranks.broadcast(torch.empty(_NUM_FIELDS + num_rows, dtype=torch.int64)).tolist()
        return told

    def prepare(self, key: Hashable, padded_size: int) -> None:
        """Do nothing."""

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable = None) -> Chosen:
        """The trees that rank 0 has chosen."""
        self._tell_trees(padded_size)
        if key is not None:
            return Chosen(0, 0, False, 0.0)  # not read where a captured step chooses
        num_nodes, width, is_chain = self._ranks.broadcast(torch.empty(3, dtype=torch.int64)).tolist()
        return Chosen(num_nodes, width, bool(is_chain), 0.0)

    def learn_in_step(self, key: Hashable, paths: Ints, num_accepted: Ints) -> None:
        """Do nothing."""

    def learn(self, paths: Ints, num_accepted: Ints) -> None:
        """Do nothing."""

    def observe(
        self, decided: Sequence[Sequence[int]], num_accepted: Sequence[int] | None, seconds: float | None
    ) -> None:
        """Do nothing."""

    def observe_rest(self, seconds: float) -> None:
        """Do nothing."""
