"""Drafting with a head of several modules: the entries that each step runs, and the states passed to the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftEntries:
    """The entries of a draft so far: the root's, then one for every node that the head ran, ordered by depth."""

    tokens: Tensor  # [B, E] int64
    depth: Tensor  # [E] int64, below the root
    ancestors: Tensor  # [B, E, E] bool; [m, n] is True when n is m or an ancestor of m
    levels: tuple[int, ...]  # index of the first entry of each depth

    @classmethod
    def of_roots(cls, tokens: Tensor) -> DraftEntries:
        """Return the entries of the roots alone; ``tokens`` [B, 1]."""
        itself = torch.ones(len(tokens), 1, 1, dtype=torch.bool, device=tokens.device)
        return cls(tokens, torch.zeros(1, dtype=torch.int64, device=tokens.device), itself, (0,))

    @property
    def num_entries(self) -> int:
        return self.tokens.shape[1]

    def grow(self, tokens: Tensor, ancestors: Tensor | None) -> DraftEntries:
        """Return these entries and those of the next depth; arguments as for ``MTPDrafter.descend``."""
        size, num_tokens = tokens.shape
        old, total = self.num_entries, self.num_entries + num_tokens
        if ancestors is None:
            ancestors = torch.ones(size, num_tokens, total, dtype=torch.bool, device=tokens.device)
        return DraftEntries(
            tokens=torch.cat([self.tokens, tokens], 1),
            depth=torch.cat([self.depth, self.depth.new_full((num_tokens,), len(self.levels))]),
            ancestors=torch.cat([torch.nn.functional.pad(self.ancestors, (0, num_tokens)), ancestors], 1),
            levels=(*self.levels, old),
        )

    @cached_property
    def parents(self) -> Tensor:
        """[B, E] int64: the parent of each entry, which is its last ancestor in this order; 0 for the root."""
        places = torch.arange(self.num_entries, device=self.depth.device)
        return (self.ancestors & (places < places[:, None])).mul(places).amax(-1)

    def seen(self, first: int, root_positions: Tensor, first_key: int) -> Tensor:
        """Return the attention mask of the entries from ``first`` on, [B, E - first, E] bool.

        A module has no entries at positions before its ``first_key``: nodes there see only themselves, and no entry
        sees them.
        """
        places = torch.arange(self.num_entries, device=self.depth.device)
        is_itself = places == places[first:, None]
        is_entry = root_positions[:, None] + self.depth >= first_key
        return self.ancestors[:, first:] & (is_entry[:, None] | is_itself)


class Descent:
    """One draft of D modules: each step runs its module over the entries of the last D depths.

    A module ran D steps ago for the last time, so it lacks the entries of the D depths since then. Their input states
    are the outputs of the step before, which ran the parents of these entries.
    """

    def __init__(self, root_tokens: Tensor, at_roots: Sequence[Tensor]) -> None:
        """Start at the roots [B, 1], from the states of every module after the roots, [B, 1, H] each."""
        self._at_roots, self._num_modules = at_roots, len(at_roots)
        self.entries = DraftEntries.of_roots(root_tokens)
        self.first = 1  # first of the entries that the newest step runs
        self._states = at_roots[0][:, :0]  # its outputs at these entries

    def step(self, tokens: Tensor, depth: int, ancestors: Tensor | None) -> tuple[int, Tensor]:
        """Go one depth down; arguments as for ``MTPDrafter.descend``.

        Returns:
            The module that runs the entries from ``first`` on, and the hidden states that they take, [B, Q, H].
        """
        states, begin = self._states, self.first
        if depth <= self._num_modules:  # the first entries of this step are the roots' children
            states, begin = torch.cat([self._at_roots[depth - 1], states], 1), 0
        self.entries = self.entries.grow(tokens, ancestors)
        self.first = self.entries.levels[max(1, depth + 1 - self._num_modules)]
        above = self.entries.parents[:, self.first :] - begin
        return depth % self._num_modules, states.gather(1, above[..., None].expand(-1, -1, states.shape[2]))

    def keep(self, states: Tensor) -> None:
        """Keep the module's outputs [B, Q, H] at the entries that it ran, for the next step."""
        self._states = states
