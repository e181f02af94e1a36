"""The inputs of captured steps: fixed buffers, for batches that are padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specmamba.core import Batch, DraftTree, PendingTokens
from specmamba.cuda_graphs import Columns
from specmamba.draft.drafter import HostPendingTokens, chain_shape, tree_shape
from specmamba.engine.request import Request, forced_ahead
from specmamba.kernels.state_records import RowSet
from specmamba.sampling_params import Penalties, SamplingBatch, SamplingParams
from specmamba.verify.state_buffers import HostVerifySlots, VerifySlots

# values of padding rows: row 0 of every table and slot 0 of every pool belong to no request
INTEGERS = {
    **dict.fromkeys(("row", "slot", "root_token", "root_position", "num_pending", "folds"), 0),
    "num_pending_tokens": 1,
}
SETTINGS = {"seed": 0, "top_k": 0}
FLOATS = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}


class Sampling(NamedTuple):
    """The parts of sampling that a captured step runs; parts that no request of the batch uses are left out."""

    is_drawn: bool = False  # some row has a temperature above 0
    has_top_k: bool = False  # some sampled row uses top-k; likewise below
    has_top_p: bool = False
    has_min_p: bool = False
    is_penalized: bool = False

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Sampling:
        """Return the parts that at least one of these requests needs."""
        drawn = [p for p in params if not p.is_greedy]
        filters = (any(p.top_k > 0 for p in drawn), any(p.top_p < 1 for p in drawn), any(p.min_p > 0 for p in drawn))
        return cls(bool(drawn), *filters, any(p.has_penalties for p in params))


class StepKind(NamedTuple):
    """What a captured step depends on, besides the drafter and the accept policy."""

    batch_size: int  # a bucket
    num_nodes: int
    sampling: Sampling
    max_root_position: int
    is_deferred: bool = False  # ``PendingTokens.is_deferred``
    is_forced: bool = False  # some output ids are forced
    is_chain: bool = False  # trees drafted before the step are chains
    max_children: int = 1  # of any node of trees drafted before the step


class StepInputs:
    """The inputs of all kinds of steps. A step of bucket size b reads their first b rows."""

    def __init__(self, num_rows: int, max_nodes: int, device: torch.device) -> None:
        """Allocate the buffers of the largest bucket.

        Args:
            num_rows: of the largest bucket.
            max_nodes: of a tree.
            device: where steps run.
        """
        self.integers = Columns(INTEGERS, num_rows, torch.int64, device)
        self.settings = Columns(SETTINGS, num_rows, torch.int64, device)
        self.floats = Columns(FLOATS, num_rows, torch.float32, device)
        self.tokens = torch.zeros(num_rows, max_nodes, dtype=torch.int64, device=device)  # drafted before the step
        self.parents = torch.full_like(self.tokens, -1)
        self.forced_output_ids = torch.full_like(self.tokens, -1)
        self._members: tuple[int, ...] = ()  # requests whose settings were written last
        self._used = Sampling()  # parts of sampling that they use

    def clear(self) -> None:
        """Make every row padding."""
        for columns in (self.integers, self.settings, self.floats):
            columns.write({})
        self._clear_tree()
        self.forced_output_ids.fill_(-1)
        self._members = ()

    def write_settings(self, requests: Sequence[Request]) -> Sampling:
        """Write what stays the same for a request in all its steps; returns the parts of sampling that are used."""
        members = tuple([request.sequence_number for request in requests])
        if members != self._members:
            params = [request.params for request in requests]
            own = {name: [getattr(p, name) for p in params] for name in ("temperature", "top_p", "min_p")}
            penalties = {name: [getattr(p, f"{name}_penalty") for p in params] for name in FLOATS.keys() - own.keys()}
            self.floats.write(own | penalties)
            self.settings.write({"seed": [r.seed for r in requests], "top_k": [p.top_k for p in params]})
            self._members, self._used = members, Sampling.of(params)
        return self._used

    def write(
        self, requests: Sequence[Request], slots: HostVerifySlots, pending_tokens: HostPendingTokens | None
    ) -> None:
        """Write the inputs of a step of these requests; the rows behind them become padding."""
        self.write_settings(requests)  # a capture has cleared them
        columns: dict[str, Sequence[int]] = {
            "row": slots.rows,
            "slot": slots.state_slots,
            "root_token": [request.root_token for request in requests],
            "root_position": [request.root_position for request in requests],
            "num_pending": slots.num_pending,
        }
        if slots.folded:
            columns["folds"] = [row in slots.folded for row in slots.rows]
        if pending_tokens is not None:
            columns["num_pending_tokens"] = pending_tokens.counts
        self.integers.write(columns)
        if any(request.forced_output_ids for request in requests):
            self.forced_output_ids.fill_(-1)
            forced = forced_ahead(requests, self.forced_output_ids.shape[1])
            self.forced_output_ids[: len(requests)] = forced.to(self.forced_output_ids.device)

    def write_tree(self, tree: DraftTree) -> None:
        """Write trees that were drafted before the step; nodes and rows that they lack become padding."""
        size, num_nodes = tree.tokens.shape
        self._clear_tree()
        self.tokens[:size, :num_nodes] = tree.tokens
        self.parents[:size, :num_nodes] = tree.shape.parents

    def _clear_tree(self) -> None:
        self.tokens.zero_()
        self.parents.fill_(-1)

    def batch(self, kind: StepKind, max_pending_tokens: int | None) -> Batch:
        """The batch that a step of this kind works on; ``max_pending_tokens``: of a draft head, None: there is none."""
        size, column = kind.batch_size, self.integers.read
        pending_tokens = None
        if max_pending_tokens is not None:
            pending_tokens = PendingTokens(max_pending_tokens, column("num_pending_tokens", size), kind.is_deferred)
        return Batch(
            rows=(),
            row_index=column("row", size),
            root_tokens=column("root_token", size),
            root_positions=column("root_position", size),
            max_root_position=kind.max_root_position,
            sampling=self._sampling(kind),
            forced_output_ids=self.forced_output_ids[:size] if kind.is_forced else None,
            pending_tokens=pending_tokens,
            is_exact=False,
        )

    def slots(self, kind: StepKind, node_offset: int, folds: bool, device: torch.device) -> VerifySlots:
        """Where a step of this kind finds and leaves states; ``folds``: rows may fold."""
        size, column = kind.batch_size, self.integers.read
        rows, state_slots = (RowSet.of((), device, column(name, size)) for name in ("row", "slot"))
        flags = column("folds", size) > 0 if folds else None
        return VerifySlots(rows, state_slots, node_offset, column("num_pending", size), flags)

    def tree(self, kind: StepKind) -> DraftTree:
        """The trees that were drafted before the step."""
        size, num_nodes = kind.batch_size, kind.num_nodes
        tokens = self.tokens[:size, :num_nodes].clone()
        tokens[:, 0] = self.integers.read("root_token", size)
        if kind.is_chain:
            return DraftTree(tokens, chain_shape(size, num_nodes, tokens.device))
        return DraftTree(tokens, tree_shape(self.parents[:size, :num_nodes], kind.max_children))

    def _sampling(self, kind: StepKind) -> SamplingBatch:
        size, used = kind.batch_size, kind.sampling
        strengths = (self.floats.read(name, size) for name in ("presence", "frequency", "repetition"))
        return SamplingBatch(
            temperature=self.floats.read("temperature", size) if used.is_drawn else None,
            top_k=self.settings.read("top_k", size) if used.has_top_k else None,
            top_p=self.floats.read("top_p", size) if used.has_top_p else None,
            min_p=self.floats.read("min_p", size) if used.has_min_p else None,
            seeds=self.settings.read("seed", size),
            penalties=Penalties(*strengths) if used.is_penalized else None,
        )
