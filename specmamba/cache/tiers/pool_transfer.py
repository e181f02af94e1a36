"""Between the pools and entries: what a prefix has in slots of the pools becomes bytes, and bytes go into slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.prefix.node import TokenSlots
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool
from specmamba.cache.tiers.entry import Buffers, Bytes, Entry, EntryLayout, Part


class PoolTransfer:
    """Copies between one engine's pools and entries of its layout."""

    def __init__(
        self,
        kv: KVPool,
        states: StatePool,
        identity: Mapping[str, str],
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Describe the pools.

        Args:
            kv: keys and values of the target and the draft.
            states: recurrent states, windows and the drafter's features.
            identity: of the model, as ``EntryLayout`` has it.
            state_dtype: of recurrent states in entries; those of a pool with fewer bits stay as they are.
        """
        self._kv, self._states = kv, states
        in_pool = states.recurrent.dtype
        stored = state_dtype if state_dtype.itemsize < in_pool.itemsize else in_pool
        if stored is not in_pool:
            identity = {**identity, "states": f"{_name(in_pool)} as {_name(stored)}"}
        self._state_dtypes = stored, *(each.dtype for each in states.tensors[1:])
        tokens = [_part(f"kv{i}", group, group.dtype) for i, group in enumerate(kv.groups)]
        parts = zip(("recurrent", "window", "features"), states.tensors, self._state_dtypes, strict=True)
        state = [_part(*part) for part in parts]
        self.layout = EntryLayout(dict(identity), tuple(tokens), tuple(state))

    def take(self, key: bytes, parent: bytes, start: int, slots: TokenSlots, state_slot: int, into: Buffers) -> Entry:
        """Copy a segment out of the pools.

        Args:
            key, parent: as ``Entry`` has them.
            start: position of its first token.
            slots: [n] int64, token slots of its KV.
            state_slot: has the prefix cache's state after the last token.
            into: memory of the size of ``n`` tokens, which the entry has.

        Raises:
            StateOwnershipError: the slot holds another state.
        """
        end = start + len(slots)
        self._states.check(state_slot, PREFIX_CACHE, end)
        index = torch.from_numpy(slots).to(self._kv.groups[0].device if self._kv.groups else "cpu")
        for group, target in zip(self._kv.groups, into[0], strict=True):
            _copy_tokens(group, index, target)
        for each, target, dtype in zip(self._states.tensors, into[1], self._state_dtypes, strict=True):
            _copy_bytes(each[:, state_slot], target, dtype)
        return Entry(self.layout, key, parent, start, end, *into)

    def put_tokens(self, entries: Sequence[Entry], start: int, slots: TokenSlots) -> None:
        """Copy KV of positions [start, start + n) into token slots [n] of the pool.

        Args:
            entries: of this layout, one behind the other; the first may begin before ``start``.
            start: position of the first slot.
            slots: [n] int64.

        Raises:
            ValueError: the entries leave tokens out, whose slots would keep what another text has left there.
        """
        end = start
        for entry in entries:
            if entry.start > end:
                raise ValueError(f"entries have no tokens from {end} to {entry.start}")
            first, end = max(start, entry.start), entry.end
            own = torch.from_numpy(slots[first - start : entry.end - start])
            for part, group, given in zip(self.layout.token_parts, self._kv.groups, entry.tokens, strict=True):
                size = part.shape[0], entry.end - entry.start, *part.shape[1:]
                source = _tensor(given, group.dtype, size)[:, first - entry.start :]
                group.index_copy_(1, own.to(group.device), source.to(group.device))

    def put_state(self, entry: Entry, state_slot: int) -> None:
        """Copy an entry's state into a slot that the prefix cache has reserved.

        Raises:
            StateOwnershipError: the prefix cache does not own the slot.
        """
        assert entry.state is not None
        self._states.begin_write(state_slot, PREFIX_CACHE)
        parts = zip(self.layout.state_parts, self._states.tensors, entry.state, self._state_dtypes, strict=True)
        for part, each, given, dtype in parts:
            each[:, state_slot] = _tensor(given, dtype, part.shape).to(each.device)
        self._states.end_write(state_slot, entry.end)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(name: str, tensor: Tensor, dtype: torch.dtype) -> Part:
    """Describe what entries have of a tensor [layers, slots, ...] of a pool, in this dtype."""
    return Part(name, _name(dtype), dtype.itemsize, (len(tensor), *tensor.shape[2:]))


def _copy_tokens(group: Tensor, index: Tensor, target: Bytes) -> None:
    """Copy token slots ``index`` [n] of a tensor [layers, slots, ...] to the host, as bytes."""
    size = len(group), len(index), *group.shape[2:]
    if group.is_cpu:
        torch.index_select(group, 1, index, out=_tensor(target, group.dtype, size))
    else:
        _copy_bytes(group.index_select(1, index), target, group.dtype)


def _copy_bytes(source: Tensor, target: Bytes, dtype: torch.dtype) -> None:
    """Copy a tensor to the host, as bytes in this dtype; this waits until they are there.

    What float16 cannot hold becomes its largest number, as in a pool of that type.
    """
    if dtype is torch.float16 and source.dtype is not dtype:
        largest = torch.finfo(dtype).max
        source = source.clamp(-largest, largest)
    _tensor(target, dtype, source.shape).copy_(source)


def _tensor(given: Bytes, dtype: torch.dtype, size: Sequence[int]) -> Tensor:
    if not given.nbytes:
        return torch.empty(*size, dtype=dtype)
    return torch.from_numpy(given).view(dtype).view(*size)
