"""What captured steps depend on: steps of one kind are one program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from specmamba.draft.sizing.rounds import PROBED_NODES
from specmamba.kernels.draft_sizing import Chosen
from specmamba.sampling_params import MAX_LOGPROBS, AcceptRule, SamplingParams

LOGPROBS = 0, 5, MAX_LOGPROBS  # likeliest tokens that captured steps list
WIDTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)  # nodes of the largest chosen tree, padded, on a GPU


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


def kind_of_chosen(kind: StepKind, chosen: Chosen, max_nodes: int, step: int | None) -> StepKind:
    """The kind of step that takes chosen trees.

    Args:
        kind: of the batch.
        chosen: the trees.
        max_nodes: of any tree.
        step: numbers of packed nodes are multiples of it; None: padding costs no products, and there are two kinds.
    """
    size = kind.batch_size
    kind = kind._replace(max_children=max_nodes - 1)
    if step is None:
        width = min(PROBED_NODES, max_nodes) if chosen.width <= PROBED_NODES else max_nodes
        return kind._replace(num_nodes=width, num_packed=size * width)
    if size == 1:
        return kind._replace(num_nodes=chosen.width)
    width = min(next(n for n in WIDTHS if n >= chosen.width), max_nodes)
    if chosen.num_nodes == size * width:
        return kind._replace(num_nodes=width)
    return kind._replace(num_nodes=width, num_packed=min(-(-chosen.num_nodes // step) * step, size * width))
