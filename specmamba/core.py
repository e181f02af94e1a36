"""Frozen values that cross packages: outputs of requests, batches, draft trees and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from specmamba.sampling_params import AcceptRule, SamplingBatch

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The client that a request belongs to."""

    name: str | None = None  # a key or an address: clients of different names take turns in the queue
    tenant: str | None = None  # cached prefixes are shared, and drafts are shown, within one tenant only


ANYONE = Owner()


@dataclass(frozen=True, slots=True)
class Handoff:
    """Where a prompt goes from the prefill server that computes it to the decode server that continues it."""

    room: int  # both get a request with this number
    host: str | None = None  # of the prefill server; None: this is it
    port: int | None = None


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Speculation figures of one request or of many.

    ``accepted_histogram[d]`` counts the verify steps that accepted exactly d drafted tokens. Only tokens that were put
    out count: one per step is the step's own, the others were accepted drafts, so tokens = steps + accepted, always.
    """

    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_histogram: tuple[int, ...] = ()
    num_drafts: int = 0  # verify steps that had a draft

    @property
    def accept_length(self) -> float:
        """Tokens gained per verify, the bonus token included; 1.0 for plain decoding, 0.0 before the first step."""
        if self.num_verify_steps == 0:
            return 0.0
        return 1.0 + self.num_accepted_tokens / self.num_verify_steps

    def __add__(self, other: SpecStats) -> SpecStats:
        """The figures of both."""
        histogram = zip_longest(self.accepted_histogram, other.accepted_histogram, fillvalue=0)
        return SpecStats(
            self.num_verify_steps + other.num_verify_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(a + b for a, b in histogram),
            self.num_drafts + other.num_drafts,
        )

    def after_step(self, num_drafted: int, num_accepted: int) -> SpecStats:
        """These figures with one more verify step counted in."""
        return self.after_steps(((num_drafted, num_accepted),))

    def after_steps(self, steps: Sequence[tuple[int, int]]) -> SpecStats:
        """These figures with more verify steps counted in, given by their drafted and their accepted tokens."""
        histogram = list(self.accepted_histogram)
        num_drafted = num_accepted = num_drafts = 0
        for drafted, accepted in steps:
            missing = max(drafted, accepted) + 1 - len(histogram)
            if missing > 0:
                histogram += [0] * missing
            histogram[accepted] += 1
            num_drafted += drafted
            num_accepted += accepted
            num_drafts += drafted > 0
        return SpecStats(
            self.num_verify_steps + len(steps),
            self.num_draft_tokens + num_drafted,
            self.num_accepted_tokens + num_accepted,
            tuple(histogram),
            self.num_drafts + num_drafts,
        )


@dataclass(frozen=True, slots=True)
class DraftTextStats:
    """Memory of the texts that drafts are copied from, in bytes."""

    own_bytes: int  # of requests' own texts
    shared_bytes: int  # of texts that requests share
    corpus_bytes: int
    num_dropped: int  # parts of shared texts, since the start, for want of memory


@dataclass(frozen=True, slots=True)
class ChainStats:
    """How often a step was launched before the one before it was read, since the start; and why not, where it was not.

    A step that waits for more than one of the reasons is counted for one.
    """

    num_steps: int  # that were read
    num_chained: int  # before whose read the next one was launched
    num_discarded: int  # rows of steps whose requests had ended before
    num_for_host: int  # steps before which the host had a part: grammars, penalties, sizes, a kind's first step
    num_for_requests: int  # before which requests came or extended that may not join, or all ended
    num_for_memory: int  # before which KV had to be made free, or a state was to be left


@dataclass(frozen=True, slots=True)
class SizingStats:
    """What the sizing of drafts has decided since the start, and thinks now."""

    num_steps: int
    num_plain_steps: int  # without drafts
    num_probes: int  # that drafted only to see whether drafts would pay
    num_requests: int  # summed over the steps
    num_nodes: int  # that were verified, roots included
    num_draft_levels: int  # depths of all drafts, summed
    predicted_seconds: float  # of all steps
    measured_seconds: float
    decision_seconds: float  # that all decisions took
    calibration_error: float  # of the probabilities of acceptance, 0 to 1
    depth: int  # of drafts now; 0: off
    gains: tuple[float, ...]  # tokens per second over plain decoding, predicted now, by depth from 0 on
    reason: str  # a sentence for the live page


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a token, given the tokens before it.

    Log probabilities are natural logarithms of the model's own distribution, before temperature, filters, penalties,
    biases and grammars.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log probabilities, the likeliest first


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one engine step adds to one request. ``finish_reason`` is set on the last delta and only there.

    ``error_code`` is set beside ``error`` if the request is at fault, not the engine.

    ``depths`` has the depth of every new token in its step's draft tree: 1 for the first draft below the root, 0 for
    a token that was not drafted (the bonus token). ``logprobs`` has one entry for every new token if the request asks
    for them. ``prompt_logprobs`` is set on the first delta if the request asks for it: one entry for every token of
    the prompt, None for the first one, which has no tokens before it. ``index`` is the number of the continuation in a
    stream of several.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    spec: SpecStats = field(default_factory=SpecStats)
    depths: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error_code: str | None = None
    rule: AcceptRule = "target"  # by which its drafts are accepted
    index: int = 0


@dataclass(frozen=True, slots=True)
class DraftView:
    """The draft of one request in one step, on the host, for the live page. Nodes in topological order."""

    request_id: str
    tokens: tuple[int, ...]  # the root first
    parents: tuple[int, ...]  # -1 for the root
    path: tuple[int, ...]  # accepted nodes, the root first
    bonus: int  # the target's own token after the path
    tenant: str | None = None  # of the request's owner


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The complete output for one prompt, as ``LLM.generate`` returns it: its first continuation, and the others."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    spec: SpecStats
    error: str | None = None  # message, if the finish reason is "error"
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    index: int = 0  # which continuation of its prompt this is
    others: tuple[RequestOutput, ...] = ()  # the continuations 1 to n - 1, of ``SamplingParams(n=...)``

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All continuations of the prompt, by ``index``; this one is the first."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class Packing:
    """The nodes of ragged trees side by side, without padding between them: what products run on."""

    places: Tensor  # [T] int64, each packed node's place among B * N; any place where there are fewer nodes than T
    nodes: Tensor  # [B * N] int64, each node's place in the packing; any place for padding
    firsts: Tensor  # [B] int64, the place of each root
    counts: Tensor  # [B] int64, nodes of each row, which are its first ones
    num_live: Tensor | None = None  # [1] int64, nodes of all rows; None: T

    @property
    def num_packed(self) -> int:
        """T."""
        return len(self.places)

    def pack(self, x: Tensor) -> Tensor:
        """[B, N, ...] -> [1, T, ...]."""
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, x: Tensor, batch_size: int) -> Tensor:
        """[1, T, ...] -> [B, N, ...]; padding gets values of some node."""
        return x[0].index_select(0, self.nodes).view(batch_size, -1, *x.shape[2:])


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The topology of a batch of draft trees, and the masks and depths that layers derive from it.

    Nodes are in topological order; node 0 is the root. Rows with fewer nodes than N mark the rest by parent -1:
    such a node is no node's child and is never accepted.
    """

    parents: Tensor  # [B, N] int64; -1 for the root
    ancestors: Tensor  # [B, N, N] bool; [i, j] when j is i or an ancestor of i
    depth: Tensor  # [B, N] int64; 0 for the root
    is_chain: bool  # parents[i] = i - 1 for all nodes, so an accepted path is a prefix of the nodes
    max_children: int  # the largest number of children of any node
    packing: Packing | None = None  # of trees with different numbers of nodes; None: products run on padding too

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Decided tokens of a batch that the draft head has not run yet, the roots included."""

    max_count: int  # the largest number in any row
    counts: Tensor | None  # [B] int64; None: ``max_count`` everywhere
    is_deferred: bool = False  # this step does not run them, and appends its own decided tokens
    kept: Tensor | None = None  # [B] int64, tokens in front of those that the step decides; None: all if deferred, or 0
    packing: Packing | None = None  # of [B, max_count]; None: the head runs on padding too


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one verify, by row of the request table. Each has its root: decided, not yet run.

    Numbers that shapes depend on are host values. In a captured step they are bounds that hold for every batch, exact
    values are only in the tensors, which the host does not read, and ``is_exact`` is False.
    """

    rows: tuple[int, ...]  # ascending; empty in a captured step
    row_index: Tensor  # [B] int64, the same rows; 0 is padding
    root_tokens: Tensor  # [B] int64
    root_positions: Tensor  # [B] int64
    max_root_position: int  # no root position is larger
    sampling: SamplingBatch
    forced_output_ids: Tensor | None = (
        None  # [B, F] int64, output ids at positions root + 1, root + 2, ...; -1: the target chooses
    )
    pending_tokens: PendingTokens | None = None  # None: the drafter has none
    num_logprobs: int | None = None  # likeliest tokens listed beside each decided token; None: no log probabilities
    is_exact: bool = True

    @property
    def size(self) -> int:
        """B, padding counted."""
        return self.row_index.shape[0]

    @property
    def first_row(self) -> int | None:
        """The first of consecutive rows; None where they are not, or are not known."""
        is_range = bool(self.rows) and self.rows[-1] - self.rows[0] == len(self.rows) - 1
        return self.rows[0] if is_range else None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Known tokens of several requests, one run each, padded to one length: the input of an extend."""

    rows: tuple[int, ...]
    row_index: Tensor  # [B] int64, the same rows
    tokens: Tensor  # [B, L] int64
    positions: Tensor  # [B, L] int64
    lengths: Tensor  # [B] int64, tokens of each row; the rest of a row is padding
    spans: tuple[tuple[int, int], ...]  # the first position of each row's tokens, and the one behind its last
    is_padded: bool
    end: int  # all token positions are below it; padding positions may not be

    @property
    def is_token(self) -> Tensor:
        """[B, L] bool; False for padding."""
        return self.positions - self.positions[:, :1] < self.lengths[:, None]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What a drafter proposes: tokens on a shape. ``tokens[:, 0]`` are the roots; siblings have different tokens.

    ``draft_probs[b, i]`` is the distribution that the children of node i were drawn from, one after the other in node
    order and without replacement. None: the tokens were chosen, not drawn.
    """

    tokens: Tensor  # [B, N] int64
    shape: TreeShape
    draft_probs: Tensor | None = None  # [B, N, V] float32
    allowed_tokens: Tensor | None = None  # [B, N, ceil(V/32)] int32, bits: what may follow each node; None: anything

    def first(self, num_rows: int) -> DraftTree:
        """Return the trees of the first ``num_rows`` rows, without the padding rows after them."""
        shape = self.shape
        parents, ancestors, depth = (x[:num_rows] for x in (shape.parents, shape.ancestors, shape.depth))
        own = replace(shape, parents=parents, ancestors=ancestors, depth=depth, packing=None)
        probs, allowed = (None if x is None else x[:num_rows] for x in (self.draft_probs, self.allowed_tokens))
        return DraftTree(self.tokens[:num_rows], own, probs, allowed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted paths of a batch of trees, and the tokens on them.

    ``path[b, : num_accepted[b] + 1]`` are node indices from the root down; the rest of the row is padding.
    """

    path: Tensor  # [B, N] int64
    num_accepted: Tensor  # [B] int64; accepted drafts, the root not counted
    path_tokens: Tensor  # [B, N + 1] int64; tokens of path[1:], then the bonus token, then padding
    bonus: Tensor  # [B] int64; the target's own token after the path: the next root
    is_finite: Tensor  # [B] bool; False where the target's logits are not finite and nothing can be decided

    def on_path(self, x: Tensor) -> Tensor:
        """Return what nodes have, [B, N, F], in the order of the paths; behind a path it is that of any node."""
        return x if x.shape[1] == 1 else x.gather(1, self.path[..., None].expand_as(x))
