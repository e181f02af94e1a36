"""The inputs of captured steps: fixed buffers, for batches that are padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.shapes import pending_token_capacity
from specmamba.core import Batch, DraftTree, PendingTokens, Verdict
from specmamba.cuda_graphs import Columns, Queue, at_once
from specmamba.draft.drafter import HostPendingTokens
from specmamba.engine.captured.step_kind import LOGPROBS, Deciding, Sampling, StepKind
from specmamba.engine.captured.tree_inputs import PackedInputs, TreeInputs
from specmamba.engine.request import KNOWN_STOPS, Request, forced_ahead
from specmamba.kernels import gpu
from specmamba.kernels.state_records import RowSet
from specmamba.sampling_params import Biases, Penalties, SamplingBatch, SamplingParams
from specmamba.verify.state_buffers import HostVerifySlots, VerifySlots

# values of padding rows: row 0 of every table and slot 0 of every pool belong to no request
ROWS = {
    "num_kept_tokens": 0,
    # what a step leaves to the next one, in the order of ``StepInputs.advance``
    "row": 0, "slot": 0, "root_token": 0, "root_position": 0, "num_pending_tokens": 1, "num_pending": 0, "folds": 0,
    "num_left": 0,
}  # fmt: skip
STOPS = tuple(f"stop_{i}" for i in range(KNOWN_STOPS))
SETTINGS = {"seed": 0, "top_k": 0, "rejects": 0} | dict.fromkeys(STOPS, -1)
FLOATS = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}
NEW = -1  # the place of a request in the step before that it takes no part in
LEAST_BIASES = 64  # of a captured step; larger numbers are powers of two


class BiasInputs:
    """Biases of logits, for steps with so many of them in all rows; what is left over adds 0 to a token of row 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, Biases] = {}  # by number

    def write(self, params: Sequence[SamplingParams]) -> int:
        """Write the biases of a batch; returns the number that a step of them has, 0 where there are none."""
        if not any(p.logit_bias for p in params):
            return 0
        given = Biases.of(params, self._device)
        count = len(given.values)
        number = max(LEAST_BIASES, gpu.next_power_of_2(count))
        for to, x in zip(self._of(number).columns, given.columns, strict=True):
            to[:count] = x
            to[count:] = 0
        return number

    def read(self, number: int) -> Biases | None:
        """The biases of a step that has this number of them."""
        return self._of(number) if number else None

    def _of(self, number: int) -> Biases:
        if number not in self._buffers:
            rows, tokens = (torch.zeros(number, dtype=torch.int64, device=self._device) for _ in range(2))
            self._buffers[number] = Biases(rows, tokens, torch.zeros(number, device=self._device))
        return self._buffers[number]


class StepInputs:
    """The inputs of all kinds of steps. A step of bucket size b reads their first b rows."""

    def __init__(
        self,
        num_rows: int,
        max_nodes: int,
        device: torch.device,
        num_trees: int | None = None,
        is_mirrored: bool | None = None,
        queue: Queue = at_once,
    ) -> None:
        """Allocate the buffers of the largest bucket.

        Args:
            num_rows: of the largest bucket.
            max_nodes: of a tree.
            device: where steps run.
            num_trees: rows of the largest batch, which may be too large for a bucket; None: ``num_rows``.
            is_mirrored: the device has its own copy of numbers by row; None: it has one unless it is a CPU.
            queue: gives copies to the device.
        """
        if is_mirrored is None:
            is_mirrored = device.type != "cpu"
        self.rows = Columns(ROWS, num_rows, torch.int64, device, is_mirrored, queue)
        self.settings = Columns(SETTINGS, num_rows, torch.int64, device, is_mirrored, queue)
        self.floats = Columns(FLOATS, num_rows, torch.float32, device, is_mirrored, queue)
        self._moves = Columns({"place": NEW}, num_rows, torch.int64, device, is_mirrored, queue)
        self._joining = Columns(ROWS, num_rows, torch.int64, device, is_mirrored, queue)
        self._queue = queue
        self.biases = BiasInputs(device)
        self._logits: Tensor | None = None  # of the largest step; None: no step has run
        self.trees = TreeInputs(max(num_rows, num_trees or 0), max_nodes, device)
        self._pending = None if is_mirrored else PackedInputs(num_rows, pending_token_capacity(max_nodes))
        self.forced_output_ids = torch.full((num_rows, max_nodes), -1, dtype=torch.int64, device=device)
        self._members: tuple[int, ...] = ()  # requests whose settings were written last
        self._written: tuple[object, object, object] = None, None, None  # what ``write`` has written last
        self._columns: dict[str, Sequence[int]] = {}  # of the same
        self._used = Deciding()  # what their decisions need

    def clear(self) -> None:
        """Make every row padding."""
        for columns in (self.rows, self.settings, self.floats):
            columns.write({})
        self.trees.clear()
        self.forced_output_ids.fill_(-1)
        if self._pending is not None:
            self._pending.clear()
        self._members, self._written = (), (None, None, None)

    def write_settings(self, requests: Sequence[Request]) -> Deciding:
        """Write what stays the same for a request in all its steps; returns what their decisions need."""
        members = tuple([request.sequence_number for request in requests])
        if members != self._members:
            params = [request.params for request in requests]
            own = {name: [getattr(p, name) for p in params] for name in ("temperature", "top_p", "min_p")}
            penalties = {name: [getattr(p, f"{name}_penalty") for p in params] for name in FLOATS.keys() - own.keys()}
            self.floats.write(own | penalties)
            rules = [request.rule for request in requests]
            settings = {"seed": [r.seed for r in requests], "top_k": [p.top_k for p in params]}
            stops = [request.text.known_stops for request in requests]
            settings |= {name: [of_request[i] for of_request in stops] for i, name in enumerate(STOPS)}
            self.settings.write(settings | {"rejects": [rule == "rejection" for rule in rules]})
            listed = [p.logprobs for p in params if p.logprobs is not None]
            num_logprobs = next(n for n in LOGPROBS if n >= max(listed)) if listed else None
            self._members = members
            self._used = Deciding(Sampling.of(params, rules), self.biases.write(params), num_logprobs)
        return self._used

    def write(
        self,
        requests: Sequence[Request],
        pending_tokens: HostPendingTokens | None,
        kind: StepKind,
        slots: HostVerifySlots | None = None,
    ) -> None:
        """Write the batch of a step of this kind, in one copy; the rows behind its requests become padding.

        A second call for the same step, with the same objects, adds the slots alone.

        Args:
            requests: of the batch, in order of their rows.
            pending_tokens: of the drafter.
            kind: of step.
            slots: where the verify finds and leaves states; None: nothing is verified in this part of the step.
        """
        written, layout = self._written, (kind.batch_size, kind.max_pending_tokens)
        is_same = written[0] is requests and written[1] is pending_tokens and written[2] == layout
        if pending_tokens is None or not is_same:
            self._written = requests, pending_tokens, layout
            self._columns = self._columns_of(requests, pending_tokens, kind)
        elif slots is None:
            return
        columns = self._columns
        if slots is not None:
            columns = columns | {"slot": slots.state_slots, "num_pending": slots.num_pending}
            if slots.folded:
                columns["folds"] = [row in slots.folded for row in slots.rows]
        self.rows.write(columns)

    def _columns_of(
        self, requests: Sequence[Request], pending_tokens: HostPendingTokens | None, kind: StepKind
    ) -> dict[str, Sequence[int]]:
        """The columns of a batch; what stands in other buffers is written."""
        self.write_settings(requests)  # a capture has cleared them
        columns = _known_of(requests)
        if pending_tokens is not None:
            columns["num_pending_tokens"] = pending_tokens.counts
            columns["num_kept_tokens"] = pending_tokens.kept or ()
            if self._pending is not None and not pending_tokens.is_deferred:
                self._pending.write(pending_tokens.counts, kind.batch_size, kind.max_pending_tokens)
        if kind.is_forced:
            self.forced_output_ids.fill_(-1)
            forced = forced_ahead(requests, self.forced_output_ids.shape[1])
            self.forced_output_ids[: len(requests)] = forced.to(self.forced_output_ids.device)
        return columns

    def keep(self, requests: Sequence[Request], places: Sequence[int]) -> None:
        """Let the next step have some rows of the one before, which need not have been read, and those of others.

        Args:
            requests: of the next step. What is known of those in the step before is on the device.
            places: of these in the step before, ascending; ``NEW``: all their known tokens but the last have been run,
                and nothing is pending but that one.
        """
        self._moves.write({"place": places})
        new = [None if place != NEW else request for request, place in zip(requests, places, strict=True)]
        self._joining.write(_known_of(new) | {"slot": [request.held_slot if request else 0 for request in new]})
        moves = self._moves.read("place", len(self.forced_output_ids))
        self._queue(lambda: self.rows.keep(moves, self._joining))

    def advance(self, kind: StepKind, verdict: Verdict, most_pending: int) -> None:
        """Make the rows those of the next step of the same requests; runs on the device alone.

        Rows whose requests end here, as ``TextStream.ends_on_device`` says, become padding.

        Args:
            kind: of step; all its pending tokens were run.
            verdict: of it. Where nothing could be decided, the next root is any token.
            most_pending: records of a row that does not fold.
        """
        size, column = kind.batch_size, self.rows.read
        count = verdict.num_accepted + 1
        num_pending = column("num_pending", size).masked_fill(column("folds", size) > 0, 0) + count
        num_left = column("num_left", size) - count
        stops = torch.stack([self.settings.read(name, size) for name in STOPS], 1)
        tokens = verdict.path_tokens
        is_decided = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        has_stop = ((tokens[..., None] == stops[:, None]).any(2) & is_decided).any(1)
        advanced = {
            "row": column("row", size),
            "slot": column("slot", size),
            "root_token": verdict.bonus.masked_fill(~verdict.is_finite, 0),
            "root_position": column("root_position", size) + count,
            "num_pending_tokens": count,
            "num_pending": num_pending,
            "folds": num_pending > most_pending,
            "num_left": num_left,
        }
        self.rows.put(advanced, (column("row", size) > 0) & (num_left > 0) & ~has_stop)

    def keep_logits(self, logits: Tensor) -> Tensor:
        """Copy the logits [B, N, V] of a forward to where its decision reads them, in the same memory for all kinds."""
        if self._logits is None:
            most = len(self.forced_output_ids) * self.forced_output_ids.shape[1]
            self._logits = logits.new_empty(most * logits.shape[2])
        kept = self._logits[: logits.numel()].view(logits.shape)
        return kept.copy_(logits)

    def batch(self, kind: StepKind) -> Batch:
        """The batch that a step of this kind works on."""
        size, column = kind.batch_size, self.rows.read
        pending_tokens = None
        if kind.max_pending_tokens:
            kept = column("num_kept_tokens", size) if kind.keeps_tokens else None
            counts, most = column("num_pending_tokens", size), kind.max_pending_tokens
            packing = None if self._pending is None or kind.is_deferred else self._pending.read(size, most)
            pending_tokens = PendingTokens(most, counts, kind.is_deferred, kept, packing)
        return Batch(
            rows=(),
            row_index=column("row", size),
            root_tokens=column("root_token", size),
            root_positions=column("root_position", size),
            max_root_position=kind.max_root_position,
            sampling=self._sampling(kind),
            forced_output_ids=self.forced_output_ids[:size] if kind.is_forced else None,
            pending_tokens=pending_tokens,
            num_logprobs=kind.num_logprobs,
            is_exact=False,
        )

    def slots(self, kind: StepKind, node_offset: int, folds: bool, device: torch.device) -> VerifySlots:
        """Where a step of this kind finds and leaves states; ``folds``: rows may fold."""
        size, column = kind.batch_size, self.rows.read
        rows = RowSet.of((), device, self.rows.read("row", size))
        state_slots = RowSet.of((), device, column("slot", size))
        flags = column("folds", size) > 0 if folds else None
        return VerifySlots(rows, state_slots, node_offset, column("num_pending", size), flags)

    def tree(self, kind: StepKind) -> DraftTree:
        """The trees that were drafted before the step."""
        return self.trees.read(kind, self.rows.read("root_token", kind.batch_size))

    def _sampling(self, kind: StepKind) -> SamplingBatch:
        size, used = kind.batch_size, kind.sampling
        strengths = (self.floats.read(name, size) for name in ("presence", "frequency", "repetition"))
        return SamplingBatch(
            temperature=self.floats.read("temperature", size) if used.is_drawn else None,
            top_k=self.settings.read("top_k", size) if used.is_filtered else None,
            top_p=self.floats.read("top_p", size) if used.is_filtered else None,
            min_p=self.floats.read("min_p", size) if used.is_filtered else None,
            seeds=self.settings.read("seed", size),
            penalties=Penalties(*strengths) if used.is_penalized else None,
            biases=self.biases.read(kind.num_biases),
            rejects=self.settings.read("rejects", size) > 0 if used.has_rejection else None,
            all_reject=not used.has_target,
        )


def _known_of(requests: Sequence[Request | None]) -> dict[str, Sequence[int]]:
    """What the host knows of the next step of each request; 0 where there is none."""
    return {
        "row": [request.held_row if request else 0 for request in requests],
        "root_token": [request.root_token if request else 0 for request in requests],
        "root_position": [request.root_position if request else 0 for request in requests],
        "num_left": [request.text.num_left if request else 0 for request in requests],
    }
