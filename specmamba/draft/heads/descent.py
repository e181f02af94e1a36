"""What a head of several modules runs at each step of a draft, and what it remembers from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftEntries:
    """The entries of a draft so far: the root's, then one for every node that the head was asked about, by depth."""

    tokens: Tensor  # [B, E] int64
    depth: Tensor  # [E] int64, below the root
    ancestors: Tensor  # [B, E, E] bool; [m, n] when n is m or above it
    levels: tuple[int, ...]  # where the entries of each depth begin

    @classmethod
    def of_roots(cls, tokens: Tensor) -> DraftEntries:
        """The roots alone; ``tokens`` [B, 1]."""
        itself = torch.ones(len(tokens), 1, 1, dtype=torch.bool, device=tokens.device)
        return cls(tokens, torch.zeros(1, dtype=torch.int64, device=tokens.device), itself, (0,))

    @property
    def num_entries(self) -> int:
        return self.tokens.shape[1]

    def grow(self, tokens: Tensor, ancestors: Tensor | None) -> DraftEntries:
        """These with entries of the next depth; arguments as for ``MTPDrafter.descend``."""
        size, num_new = tokens.shape
        old, total = self.num_entries, self.num_entries + num_new
        if ancestors is None:
            ancestors = torch.ones(size, num_new, total, dtype=torch.bool, device=tokens.device)
        return DraftEntries(
            tokens=torch.cat([self.tokens, tokens], 1),
            depth=torch.cat([self.depth, self.depth.new_full((num_new,), len(self.levels))]),
            ancestors=torch.cat([torch.nn.functional.pad(self.ancestors, (0, num_new)), ancestors], 1),
            levels=(*self.levels, old),
        )

    @cached_property
    def parents(self) -> Tensor:
        """[B, E] int64: as entries stand by depth, a parent is the last of those above; 0 for the root."""
        places = torch.arange(self.num_entries, device=self.depth.device)
        return (self.ancestors & (places < places[:, None])).mul(places).amax(-1)

    def seen(self, first: int, root_positions: Tensor, first_key: int) -> Tensor:
        """Which entries those from ``first`` on see, [B, E - first, E] bool.

        Those that are no entries of a module, as they stand below its ``first_key``, see themselves only and nobody
        sees them.
        """
        places = torch.arange(self.num_entries, device=self.depth.device)
        is_itself = places == places[first:, None]
        is_entry = root_positions[:, None] + self.depth >= first_key
        return self.ancestors[:, first:] & (is_entry[:, None] | is_itself)


class Descent:
    """One draft of D modules: each step runs its module over the entries of the last D depths.

    The module that ran D steps ago has its entries up to there already. What it lacks are those of the D depths since,
    and their hidden states are what the step before has just given, for the same entries moved up by one depth.
    """

    def __init__(self, root_tokens: Tensor, at_roots: Sequence[Tensor]) -> None:
        """root_tokens: [B, 1]; at_roots: the states of every module after the roots, [B, 1, H] each."""
        self._at_roots, self._num_modules = at_roots, len(at_roots)
        self.entries = DraftEntries.of_roots(root_tokens)
        self.first = 1  # of the entries that the newest step runs
        self._states = at_roots[0][:, :0]  # at these entries

    def step(self, tokens: Tensor, depth: int, ancestors: Tensor | None) -> tuple[int, Tensor]:
        """Go one depth down; arguments as for ``MTPDrafter.descend``.

        Returns:
            The module that runs the entries from ``first`` on, and the hidden states that they take, [B, Q, H].
        """
        states, begin = self._states, self.first
        if depth <= self._num_modules:  # the oldest entries are the roots' children
            states, begin = torch.cat([self._at_roots[depth - 1], states], 1), 0
        self.entries = self.entries.grow(tokens, ancestors)
        self.first = self.entries.levels[max(1, depth + 1 - self._num_modules)]
        above = self.entries.parents[:, self.first :] - begin
        return depth % self._num_modules, states.gather(1, above[..., None].expand(-1, -1, states.shape[2]))

    def keep(self, states: Tensor) -> None:
        """What the module gave at the entries it ran, [B, Q, H]."""
        self._states = states
