"""The inputs of captured steps: fixed buffers, for batches that are padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specmamba.cache.shapes import pending_token_capacity
from specmamba.core import Batch, DraftTree, Packing, PendingTokens
from specmamba.cuda_graphs import Columns
from specmamba.draft.candidates import Candidates
from specmamba.draft.drafter import HostPendingTokens, chain_shape, tree_shape
from specmamba.engine.request import Request, forced_ahead
from specmamba.kernels import draft_sizing, gpu
from specmamba.kernels.draft_sizing import Ints, TreeArrays
from specmamba.kernels.state_records import RowSet
from specmamba.sampling_params import MAX_LOGPROBS, AcceptRule, Biases, Penalties, SamplingBatch, SamplingParams
from specmamba.verify.state_buffers import HostVerifySlots, VerifySlots

# values of padding rows: row 0 of every table and slot 0 of every pool belong to no request
ROOTS = {"row": 0, "root_token": 0, "root_position": 0, "num_pending_tokens": 1, "num_kept_tokens": 0}
SLOTS = {"slot": 0, "num_pending": 0, "folds": 0}
SETTINGS = {"seed": 0, "top_k": 0, "rejects": 0}
FLOATS = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}
LEAST_BIASES = 64  # of a captured step; larger numbers are powers of two
LOGPROBS = 0, 5, MAX_LOGPROBS  # likeliest tokens that captured steps list

# of TreeArrays, that steps read
ARRAYS = "tokens", "parents", "candidates", "num_nodes", "places", "nodes", "firsts", "num_live"


class Sampling(NamedTuple):
    """The parts of sampling that a captured step runs; parts that no request of the batch uses are left out."""

    is_drawn: bool = False  # some row has a temperature above 0
    is_filtered: bool = False  # some sampled row uses top-k, top-p or min-p; the filters of others keep everything
    is_penalized: bool = False
    has_rejection: bool = False  # some sampled row is decided under ``rejection``
    has_target: bool = True  # some sampled row is decided under ``target``

    @classmethod
    def of(cls, params: Sequence[SamplingParams], rules: Sequence[AcceptRule]) -> Sampling:
        """Return the parts that at least one of these requests needs."""
        drawn = [p for p in params if not p.is_greedy]
        used = {rule for p, rule in zip(params, rules, strict=True) if not p.is_greedy}
        rejects = "rejection" in used
        is_filtered = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in drawn)
        is_penalized = any(p.has_penalties for p in params)
        return cls(bool(drawn), is_filtered, is_penalized, rejects, used != {"rejection"})


class Deciding(NamedTuple):
    """What the decisions of a batch need: parts of ``StepKind``."""

    sampling: Sampling = Sampling()
    num_biases: int = 0
    num_logprobs: int | None = None


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
    num_packed: int = 0  # tokens that products run on; 0: all nodes and padding
    max_pending_tokens: int = 0  # of a draft head, in any row; 0: there is none
    keeps_tokens: bool = False  # some rows keep their pending tokens
    num_distributions: int = 0  # of every row, that its drafts were drawn from
    depth: int = 0  # of drafts whose trees the step itself chooses; 0: it does not
    num_biases: int = 0  # of logits, in all rows, with padding
    num_logprobs: int | None = None  # likeliest tokens beside each decided token; None: no log probabilities
    is_masked: bool = False  # some nodes have a set of tokens that may follow


@lru_cache(maxsize=4096)
def before_decision(kind: StepKind, is_drafted: bool) -> StepKind:
    """What draft and forward of a step depend on; ``is_drafted``: the drafts are part of it, and may be drawn."""
    before = kind._replace(
        sampling=kind.sampling if is_drafted and kind.sampling.has_rejection else Sampling(),
        is_forced=False,
        num_distributions=0,
        num_biases=0,
        num_logprobs=None,
        is_masked=False,
    )
    return before if is_drafted else before._replace(is_deferred=False, max_pending_tokens=0, keeps_tokens=False)


class TreeInputs:
    """Trees that were drafted before a step, for batches that are padded to a bucket."""

    def __init__(self, num_rows: int, max_nodes: int, device: torch.device) -> None:
        """Allocate the buffers of ``num_rows`` rows."""
        self._device = device
        self.arrays = TreeArrays.empty(num_rows, max_nodes)  # of the host; on a CPU steps read what it writes
        given = [torch.from_numpy(getattr(self.arrays, name)) for name in ARRAYS]
        on_device = given if device.type == "cpu" else [x.to(device) for x in given]
        self._copies = [] if device.type == "cpu" else list(zip(on_device, given, strict=True))
        self.tokens, self.parents, self._candidates, *packed = on_device
        self.counts, self.places, self.nodes, self.firsts, self.num_live = packed
        self.entries = torch.zeros_like(self.tokens)  # the distribution after each node
        self._draft_probs: dict[int, Tensor] = {}  # [rows, E, V] float32, by E
        self._allowed: Tensor | None = None  # [rows, N, words] int32, bits; None: no step was masked yet

    def clear(self) -> None:
        """Make all nodes but the roots padding."""
        for x in (self.tokens, self.counts, self.places, self.nodes, self.firsts, self.num_live, self.entries):
            x.zero_()
        self.parents.fill_(-1)

    def write(self, tree: DraftTree, num_distributions: int = 0) -> None:
        """Write trees; nodes and rows that they lack become padding.

        ``num_distributions``: of a row, as ``write_distributions`` wrote them, one for each node from the root on.
        """
        size, num_nodes = tree.tokens.shape
        self.clear()
        self.tokens[:size, :num_nodes] = tree.tokens
        self.parents[:size, :num_nodes] = tree.shape.parents
        if num_distributions:
            entries = torch.arange(size * num_distributions, device=self._device).view(size, -1)
            self.entries[:size, :num_nodes] = entries[:, :num_nodes]

    def write_distributions(self, tree: DraftTree, num_distributions: int) -> None:
        """Write what a decision reads of trees besides their tokens; their rows may draw from so many distributions."""
        (size, num_nodes), probs, bits = tree.tokens.shape, tree.draft_probs, tree.allowed_tokens
        if probs is not None:
            self.draft_probs(size, num_distributions, probs.shape[2])[:, :num_nodes] = probs
        if bits is not None:
            if self._allowed is None:
                shape = *self.tokens.shape, bits.shape[2]
                self._allowed = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._allowed.fill_(-1)
            self._allowed[:size, :num_nodes] = bits

    def write_chosen(self, kind: StepKind, entries: Ints | None) -> None:
        """Write the trees that ``arrays`` have, for a step of this kind.

        Args:
            kind: of the step; rows of the arrays behind its requests are padding.
            entries: [B, N], the distribution that each node's children were drawn from, numbered through all rows;
                None: nothing is drawn.
        """
        if entries is not None:
            self.entries[: len(entries), : entries.shape[1]] = torch.from_numpy(entries)
        if kind.num_packed:
            draft_sizing.pack(self.arrays, kind.batch_size, kind.num_nodes, kind.num_packed)
        for to, given in self._copies:
            to.copy_(given)

    def draft_probs(self, num_rows: int, num_distributions: int, vocab_size: int) -> Tensor:
        """Memory for the distributions that a draft leaves to a verify, [B, E, V] float32."""
        if num_distributions not in self._draft_probs:
            shape = self.tokens.shape[0], num_distributions, vocab_size
            self._draft_probs[num_distributions] = torch.zeros(shape, device=self._device)
        return self._draft_probs[num_distributions][:num_rows]

    def read_chosen(self, kind: StepKind, root_tokens: Tensor, candidates: Candidates) -> DraftTree:
        """Pack the trees that were just chosen from ``candidates``, in a step that runs on the CPU; see ``read``."""
        draft_sizing.pack(self.arrays, kind.batch_size, kind.num_nodes, kind.num_packed)
        tree, probs = self.read(kind, root_tokens), candidates.draft_probs
        if probs is None:
            return tree
        assert candidates.entries is not None
        entries = candidates.entries.gather(1, self._candidates[: kind.batch_size, : kind.num_nodes])
        entries = entries + torch.arange(kind.batch_size)[:, None] * probs.shape[1]
        return replace(tree, draft_probs=_of_nodes(probs, entries))

    def read(self, kind: StepKind, root_tokens: Tensor) -> DraftTree:
        """The trees of a step of this kind, on ``root_tokens`` [B]."""
        size, num_nodes = kind.batch_size, kind.num_nodes
        tokens = self.tokens[:size, :num_nodes].clone()
        tokens[:, 0] = root_tokens
        parents = self.parents[:size, :num_nodes]
        packing = None
        if kind.num_packed:
            of_nodes = self.places[: kind.num_packed], self.nodes[: size * num_nodes]
            packing = Packing(*of_nodes, self.firsts[:size], self.counts[:size], self.num_live)
        if kind.is_chain:
            shape = replace(chain_shape(size, num_nodes, tokens.device), parents=parents, packing=packing)
        else:
            shape = replace(tree_shape(parents, kind.max_children), packing=packing)
        return DraftTree(tokens, shape)

    def complete(self, kind: StepKind, tree: DraftTree) -> DraftTree:
        """A tree of such a step with what only its decision reads: the distributions of drafts, and allowed tokens."""
        size, num_nodes = kind.batch_size, kind.num_nodes
        if kind.num_distributions:
            probs = self._draft_probs[kind.num_distributions]
            tree = replace(tree, draft_probs=_of_nodes(probs, self.entries[:size, :num_nodes]))
        if kind.is_masked:
            assert self._allowed is not None
            tree = replace(tree, allowed_tokens=self._allowed[:size, :num_nodes])
        return tree


def _of_nodes(probs: Tensor, entries: Tensor) -> Tensor:
    """Distributions [B, N, V] of nodes: those of ``probs`` [rows, E, V] at ``entries`` [B, N], over all rows."""
    return probs.flatten(0, 1).index_select(0, entries.reshape(-1)).view(*entries.shape, -1)


class PackedInputs:
    """The packing of rows with different numbers of tokens, in memory that captured steps of a CPU read."""

    def __init__(self, num_rows: int, width: int) -> None:
        """``width``: tokens of a row at the most."""
        self._arrays = TreeArrays.empty(num_rows, width)
        columns = (getattr(self._arrays, name) for name in ("places", "nodes", "firsts", "num_nodes", "num_live"))
        self._places, self._nodes, self._firsts, self._counts, self._num_live = map(torch.from_numpy, columns)

    def clear(self) -> None:
        """Make every row padding."""
        for x in (self._places, self._nodes, self._firsts, self._counts, self._num_live):
            x.zero_()

    def write(self, counts: Sequence[int], num_rows: int, width: int) -> None:
        """Pack so many tokens of each of ``num_rows`` rows, in a layout of ``width`` tokens a row; others have none."""
        self._arrays.num_nodes[: len(counts)] = counts
        self._arrays.num_nodes[len(counts) : num_rows] = 0
        draft_sizing.pack(self._arrays, num_rows, width, num_rows * width)

    def read(self, num_rows: int, width: int) -> Packing:
        """The packing of the first rows, in such a layout."""
        size = num_rows * width
        return Packing(
            self._places[:size], self._nodes[:size], self._firsts[:num_rows], self._counts[:num_rows], self._num_live
        )


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

    def __init__(self, num_rows: int, max_nodes: int, device: torch.device, num_trees: int | None = None) -> None:
        """Allocate the buffers of the largest bucket.

        Args:
            num_rows: of the largest bucket.
            max_nodes: of a tree.
            device: where steps run.
            num_trees: rows of the largest batch, which may be too large for a bucket; None: ``num_rows``.
        """
        self.rows = Columns(ROOTS | SLOTS, num_rows, torch.int64, device)
        self.settings = Columns(SETTINGS, num_rows, torch.int64, device)
        self.floats = Columns(FLOATS, num_rows, torch.float32, device)
        self.biases = BiasInputs(device)
        self._logits: Tensor | None = None  # of the largest step; None: no step has run
        self.trees = TreeInputs(max(num_rows, num_trees or 0), max_nodes, device)
        self._pending = None if device.type != "cpu" else PackedInputs(num_rows, pending_token_capacity(max_nodes))
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
        columns: dict[str, Sequence[int]] = {
            "row": [request.held_row for request in requests],
            "root_token": [request.root_token for request in requests],
            "root_position": [request.root_position for request in requests],
        }
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
