"""Frozen values that cross rooms: what a request asks for, what a drafter proposes, what the target decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]

# What a sampling setting may be, wherever it is given: in Python, over HTTP, on the command line.
Temperature = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False, description="0: greedy")]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False, description="mass of the likeliest tokens to keep")]
TopK = Annotated[int, Field(ge=-1, le=2**31, description="keep the k likeliest tokens; 0 or -1 keeps all")]
MinP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False, description="relative to the likeliest token")]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
# bounded below too: a logit divided by next to nothing is no number any more
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False, description="1 changes nothing")]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_STOP_STRINGS, MAX_STOP_IDS = 16, 256
MAX_LOGPROBS, MAX_BIASES, MAX_GRAMMAR_CHARACTERS = 20, 1024, 65_536
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
LogitBias = Annotated[
    dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]],
    Field(max_length=MAX_BIASES, description="added to the logits of tokens, by token id"),
]


class GrammarSpec(BaseModel):
    """What every output of a request must be a text of; the end-of-text token is allowed where such a text is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    text: Annotated[
        str, Field(max_length=MAX_GRAMMAR_CHARACTERS, description="schema, expression or rules; empty for json_object")
    ] = ""


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen and when the request ends. Validated, immutable.

    ``temperature`` 0 is greedy. With a ``seed`` and the acceptance rule "target" the text depends on nothing else: not
    on the batch the request runs in, and (in exact arithmetic) not on the drafter, because the random number of a token
    is a function of (seed, position) alone. Under "rejection" it also depends on what was drafted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: Annotated[int, Field(ge=0, description="new tokens at the most; 0: the prompt is only run")] = 16
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed | None = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_STOP_IDS)] = ()
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    logprobs: Annotated[NumLogprobs | None, Field(description="likeliest tokens to list beside each new one")] = None
    prompt_logprobs: Annotated[NumLogprobs | None, Field(description="the same of the prompt's tokens")] = None
    grammar: GrammarSpec | None = None
    speculative: Annotated[bool, Field(description="false: decode this request plainly, without drafts")] = True

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_special(self) -> bool:
        """Whether a step has more to do than to draft and choose; then it runs operator by operator."""
        return bool(self.logit_bias or self.grammar) or self.logprobs is not None or not self.speculative


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

    def after_step(self, num_drafted: int, num_accepted: int) -> SpecStats:
        """These figures with one more verify step counted in."""
        histogram = list(self.accepted_histogram)
        histogram.extend([0] * (max(num_drafted, num_accepted) + 1 - len(histogram)))
        histogram[num_accepted] += 1
        return SpecStats(
            self.num_verify_steps + 1,
            self.num_draft_tokens + num_drafted,
            self.num_accepted_tokens + num_accepted,
            tuple(histogram),
            self.num_drafts + (num_drafted > 0),
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token, given those before it.

    Log probabilities are natural logarithms of the model's own distribution, before temperature, filters, penalties,
    biases and grammars.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, the likeliest first


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one engine step adds to one request. ``finish_reason`` is set on the last delta and only there.

    ``error_code`` is set beside ``error`` where the request itself is what went wrong, not the engine.

    ``depths`` has for every new token how deep in its step's draft it stood: 1 for the first draft below the root; 0
    for a token that was not drafted, the step's own. ``logprobs`` has one entry for every new token of requests that
    ask for them. ``prompt_logprobs`` is on the first delta of requests that ask for it: one entry for every token of
    the prompt, None for the first one, which follows nothing.
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


@dataclass(frozen=True, slots=True)
class DraftView:
    """The draft of one request in one step, on the host, for people who look on. Nodes in topological order."""

    request_id: str
    tokens: tuple[int, ...]  # the root first
    parents: tuple[int, ...]  # -1 for the root
    path: tuple[int, ...]  # accepted nodes, the root first
    bonus: int  # the target's own token after the path


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole answer to one prompt, as ``LLM.generate`` returns it."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    spec: SpecStats
    error: str | None = None  # what went wrong, when the finish reason is "error"
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Penalties:
    """Strengths, all [B] float32; neutral for rows without penalties."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """What is added to logits: ``values`` [K] float32 to tokens [K] of rows [K], both int64."""

    rows: Tensor
    tokens: Tensor
    values: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Biases:
        """Collect the biases of a batch's requests."""
        import torch

        found = [(row, *item) for row, p in enumerate(params) for item in p.logit_bias.items()]
        rows, tokens, values = zip(*found, strict=True)
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor(tokens, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Settings of a batch, all [B]; None where no row uses them, so that their work is skipped."""

    temperature: Tensor | None  # float32; None: all greedy
    top_k: Tensor | None  # int64
    top_p: Tensor | None  # float32
    min_p: Tensor | None  # float32
    seeds: Tensor  # int64
    penalties: Penalties | None
    biases: Biases | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> SamplingBatch:
        """Collect the settings of a batch's requests."""
        import torch

        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        sampled = [p for p in params if not p.is_greedy]
        penalties = None
        if any(p.has_penalties for p in params):
            penalties = Penalties(column("presence_penalty"), column("frequency_penalty"), column("repetition_penalty"))
        return cls(
            temperature=column("temperature") if sampled else None,
            top_k=column("top_k", torch.int64) if any(p.top_k > 0 for p in sampled) else None,
            top_p=column("top_p") if any(p.top_p < 1 for p in sampled) else None,
            min_p=column("min_p") if any(p.min_p > 0 for p in sampled) else None,
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            penalties=penalties,
            biases=Biases.of(params, device) if any(p.logit_bias for p in params) else None,
        )


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The topology of a batch of draft trees, with what every layer needs to know about it.

    Nodes are in topological order; node 0 is the root. Rows with fewer nodes than N mark the rest by parent -1:
    such a node is no node's child and is never accepted.
    """

    parents: Tensor  # [B, N] int64; -1 for the root
    ancestors: Tensor  # [B, N, N] bool; [i, j] when j is i or an ancestor of i
    depth: Tensor  # [B, N] int64; 0 for the root
    is_chain: bool  # parents[i] = i - 1 throughout, so an accepted path is a prefix of the nodes
    max_children: int  # no node has more of them

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Decided tokens of a batch that the draft head has not run yet, the roots included."""

    max_count: int  # the largest number in any row
    counts: Tensor | None  # [B] int64; None: ``max_count`` everywhere
    is_deferred: bool = False  # this step does not run them; it adds its own decided tokens behind them


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one verify, by row of the request table. Each has its root: decided, not yet run.

    What shapes depend on are numbers of the host. In a step that is replayed they are bounds that hold for every batch,
    what is exact stands in tensors, and the host does not look at those: ``is_exact`` is False there.
    """

    rows: tuple[int, ...]  # ascending; empty in a step that is replayed
    row_index: Tensor  # [B] int64, the same rows; 0 is padding
    root_tokens: Tensor  # [B] int64
    root_positions: Tensor  # [B] int64
    max_root_position: int  # no root stands behind it
    sampling: SamplingBatch
    forced_output_ids: Tensor | None = None  # [B, F] int64, given at root + 1, root + 2, ...; -1: the target chooses
    pending_tokens: PendingTokens | None = None  # None: the drafter has none
    num_logprobs: int | None = None  # of the likeliest tokens, listed beside each that is decided; None: no figures
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
    """Runs of known tokens of several requests, padded to one length; what an extend works on."""

    rows: tuple[int, ...]
    row_index: Tensor  # [B] int64, the same rows
    tokens: Tensor  # [B, L] int64
    positions: Tensor  # [B, L] int64
    lengths: Tensor  # [B] int64; the rest of a row is padding
    is_padded: bool
    end: int  # positions of all tokens are below it; those of padding may not be

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decides about a batch of trees.

    ``path[b, : num_accepted[b] + 1]`` are node indices from the root down; the rest of the row is padding.
    """

    path: Tensor  # [B, N] int64
    num_accepted: Tensor  # [B] int64; accepted drafts, the root not counted
    path_tokens: Tensor  # [B, N + 1] int64; tokens of path[1:], then the bonus token, then padding
    bonus: Tensor  # [B] int64; the target's own token after the path: the next root
    is_finite: Tensor  # [B] bool; False where the target's logits are not finite and nothing can be decided
