"""Checkpoints: recurrent states and convolution windows in slots.

Each slot has a stamp that says which owner it belongs to and at which position its state stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.pool_memory import entries_of_layer, new_layers
from specmamba.cache.pool_memory.chunk_store import ChunkStore
from specmamba.cache.shapes import CacheShape

PREFIX_CACHE = "prefix cache"  # the owner of states that any request may copy
NOWHERE = -1  # the position of a slot that holds no state yet


class StateOwnershipError(RuntimeError):
    """A state slot was used by an owner it does not belong to, or at another position than its state's."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a slot holds: the state of ``owner`` after its first ``position`` tokens, once ``is_written``."""

    owner: str
    position: int
    is_written: bool


class StatePool:
    """Slots 1..num_slots; slot 0 is padding.

    ``recurrent`` [layers, slots + 1, Hv, K, V] in the shape's ``state_dtype``: writers of a slot round, readers
    go on in float32. ``conv`` [layers, slots + 1, W-1, C] in the model's dtype, the last convolution
    inputs, oldest first; ``features`` [1, slots + 1, F] in the shape's ``features_dtype``, what a drafter needs to go
    on behind the last token (F = 0 where that is nothing). The number of slots can change, up to ``most_slots``, for
    which the tensors have room.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_slots: int,
        device: torch.device,
        most_slots: int | None = None,
        store: ChunkStore | None = None,
    ) -> None:
        s = shape.state
        layers = shape.num_state_layers
        self.num_slots, self.is_exact = num_slots, shape.is_exact
        self.most_slots = num_slots if most_slots is None else most_slots
        of_state = s.num_recurrent_values * shape.state_dtype.itemsize, s.window_bytes(shape.dtype)
        room = entries_of_layer(self.most_slots + 1, num_slots + 1, store, *of_state)
        parts: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
            ((layers, room, s.num_value_heads, s.key_dim, s.value_dim), shape.state_dtype),
            ((layers, room, s.conv_width - 1, s.conv_channels), shape.dtype),
            ((1, self.most_slots + 1, shape.draft_features), shape.features_dtype),
        )
        self._memory = [new_layers(size, dtype, device, num_slots + 1, store) for size, dtype in parts]
        self.recurrent, self.conv, self.features = (layers.tensor for layers in self._memory)
        self._states = self.recurrent, self.conv, self.features
        self._free = sorted(range(1, num_slots + 1), reverse=True)
        self._stamps: dict[int, Stamp] = {}

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``recurrent``, ``conv`` and ``features``."""
        return self._states

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_unused(self) -> bool:
        """Whether all slots are free."""
        return len(self._free) == self.num_slots

    def give_back(self) -> None:
        """Give back the memory of an unused pool, on a CPU."""
        for layers in self._memory:
            layers.give_back()

    def fit(self) -> None:
        """Let all layers have memory up to the last slot, and none behind it: after each change of their number.

        Raises:
            DriverError: memory of a GPU could not be mapped; the pool is not to be used any more.
        """
        for layers in self._memory:
            layers.fit(self.num_slots + 1)

    def extend(self, count: int) -> None:
        """Add free slots behind the others. Raises ValueError: there is no room for so many."""
        if not 0 <= count <= self.most_slots - self.num_slots:
            raise ValueError(f"{count} more slots than {self.num_slots} are more than {self.most_slots}")
        self._free = [*range(self.num_slots + count, self.num_slots, -1), *self._free]
        self.num_slots += count

    def shrink(self, count: int) -> list[tuple[int, int]]:
        """Take the last ``count`` slots away. States in them move to lower slots, with their stamps.

        Returns:
            (slot, its new number) of every state that has moved, ascending.

        Raises:
            ValueError: fewer slots are free.
            StateOwnershipError: a state that would move is being written. Nothing was changed.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} slots cannot go: {len(self._free)} of {self.num_slots} are free")
        last = self.num_slots - count
        sources = sorted(slot for slot in self._stamps if slot > last)
        for slot in sources:
            if not self._stamps[slot].is_written:
                raise StateOwnershipError(f"state slot {slot} cannot move: it is being written")
        free = [slot for slot in self._free if slot <= last]
        moved = [(source, free.pop()) for source in sources]
        for source, target in moved:
            self._copy_content(source, target)
            self._stamps[target] = self._stamps.pop(source)
        self._free, self.num_slots = free, last
        return moved

    def allocate(self, owner: str) -> int | None:
        """Allocate the lowest free slot with the state before any token (zeros, position 0); None if there is none."""
        slot = self.reserve(owner)
        if slot is not None:
            for states in self._states:
                states[:, slot].zero_()
            self._stamps[slot] = Stamp(owner, 0, is_written=True)
        return slot

    def reserve(self, owner: str) -> int | None:
        """Allocate the lowest free slot, not cleared, for a state that is written whole; None if there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._stamps[slot] = Stamp(owner, NOWHERE, is_written=True)
        return slot

    def stamp(self, slot: int) -> Stamp:
        """Return the stamp of an allocated slot.

        Raises:
            StateOwnershipError: the slot is free.
        """
        if slot not in self._stamps:
            raise StateOwnershipError(f"state slot {slot} is free")
        return self._stamps[slot]

    def check(self, slot: int, owner: str, position: int) -> None:
        """Make sure that a slot holds the written state of ``owner`` at ``position``.

        Raises:
            StateOwnershipError: it does not.
        """
        stamp = self.stamp(slot)
        if stamp.owner != owner or stamp.position != position or not stamp.is_written:
            raise StateOwnershipError(f"state slot {slot} should hold {owner!r} at {position}, but holds {stamp}")

    def begin_write(self, slot: int, owner: str) -> None:
        """Mark a slot as being written: until ``end_write`` its content must not be read.

        Raises:
            StateOwnershipError: the slot belongs to another owner.
        """
        stamp = self.stamp(slot)
        if stamp.owner != owner:
            raise StateOwnershipError(f"{owner!r} writes state slot {slot}, which belongs to {stamp.owner!r}")
        self._stamps[slot] = Stamp(owner, stamp.position, is_written=False)

    def end_write(self, slot: int, position: int) -> None:
        """Mark a slot as holding its owner's state at ``position``."""
        self._stamps[slot] = Stamp(self.stamp(slot).owner, position, is_written=True)

    def copy(self, source: int, target: int, position: int) -> None:
        """Copy the prefix cache's state at ``position`` from one slot into another, which keeps its owner.

        Raises:
            StateOwnershipError: the source is not the prefix cache's written state there, or the target is free.
        """
        self._copy(source, PREFIX_CACHE, target, self.stamp(target).owner, position)

    def fork(self, slot: int, owner: str, position: int, target: int) -> None:
        """Copy a request's state at ``position`` into a slot of the prefix cache.

        Raises:
            StateOwnershipError: the slot is not ``owner``'s written state there, or the target not the prefix cache's.
        """
        self._copy(slot, owner, target, PREFIX_CACHE, position)

    def donate(self, slot: int, owner: str, position: int) -> None:
        """Transfer a request's slot, with the state at ``position``, to the prefix cache.

        Raises:
            StateOwnershipError: the slot is not ``owner``'s written state there.
        """
        self.check(slot, owner, position)
        self._stamps[slot] = Stamp(PREFIX_CACHE, position, is_written=True)

    def take(self, slot: int, owner: str, position: int) -> None:
        """Transfer a slot of the prefix cache, with the state at ``position``, to a request: the reverse of ``donate``.

        Raises:
            StateOwnershipError: the slot is not the prefix cache's written state there.
        """
        self.check(slot, PREFIX_CACHE, position)
        self._stamps[slot] = Stamp(owner, position, is_written=True)

    def free(self, slot: int, owner: str) -> None:
        """Free a slot.

        Raises:
            StateOwnershipError: the slot is free already, or another owner's.
        """
        if self.stamp(slot).owner != owner:
            raise StateOwnershipError(f"{owner!r} frees state slot {slot}, which belongs to {self.stamp(slot).owner!r}")
        del self._stamps[slot]
        self._free.append(slot)
        self._free.sort(reverse=True)

    def _copy(self, source: int, source_owner: str, target: int, target_owner: str, position: int) -> None:
        self.check(source, source_owner, position)
        self.begin_write(target, target_owner)
        self._copy_content(source, target)
        self.end_write(target, position)

    def _copy_content(self, source: int, target: int) -> None:
        for states in self._states:
            states[:, target] = states[:, source]
