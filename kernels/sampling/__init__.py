"""Choosing tokens: penalties, filters, drawing and accepting at every node of a draft tree.

Sizes: B batch, N nodes of a tree, V vocabulary, F parents of children that are drawn.
"""

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.sampling import native_ops, torch_ops
from specmamba.kernels.sampling.reference import Filter, Strengths

# Independent streams of random numbers, by purpose; each user counts positions in its own stream.
CHOICE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, SYNTHETIC_STREAM = range(4)

MAX_CHOSEN = 16  # tokens of a row that Triton chooses, one after the other

__all__ = [
    "ACCEPT_STREAM",
    "CHOICE_STREAM",
    "DRAFT_STREAM",
    "SYNTHETIC_STREAM",
    "add_bias",
    "allow_tokens",
    "argmax",
    "checked_argmax",
    "draw_children",
    "finite",
    "has_finite_max",
    "likeliest",
    "log",
    "penalize",
    "probabilities",
    "residual_choice",
    "sample",
    "sibling_rank",
    "token_logprobs",
    "uniform",
]


def _can_launch(logits: Tensor, *_: object) -> bool:
    return gpu.can_launch(logits)


@operator(
    triton=lambda seeds, positions, _: gpu.can_launch(seeds, positions),
    native=lambda seeds, positions, _: native_ops.can_draw(seeds, positions),
)
def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Random numbers in [0, 1) that are a pure function of (seed, stream, position), equal bit for bit in all forms.

    The same request therefore draws the same number at the same position in any batch. A counter-based generator
    (Salmon et al., SC 2011) with the finalizer of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", OOPSLA 2014) over seed and counter; the top 24 bits become a float32.

    Args:
        seeds: [B] int64.
        positions: [B, ...] int64, any counters.
        stream: numbers of different streams are independent, also at equal positions.

    Returns:
        [B, ...] float32.

    Raises:
        ValueError: seeds or positions have another shape or dtype (native form).
    """
    return torch_ops.uniform(seeds, positions, stream)


@operator(triton=_can_launch, native=native_ops.can_take)
def argmax(logits: Tensor) -> Tensor:
    """The likeliest token, the lowest id on ties.

    Args:
        logits: [..., V]; where one is NaN, forms may differ in the token that they return.

    Returns:
        [...] int64.

    Raises:
        ValueError: V is 0 (native form).
    """
    return torch_ops.argmax(logits)


@operator(triton=_can_launch, native=native_ops.can_take)
def has_finite_max(logits: Tensor) -> Tensor:
    """Whether the largest logit is finite, so that a token can be chosen.

    It is not where any logit is NaN or +inf, or where all are -inf.

    Args:
        logits: [..., V].

    Returns:
        [...] bool.

    Raises:
        ValueError: V is 0 (native form).
    """
    return torch_ops.has_finite_max(logits)


@operator(triton=_can_launch, native=native_ops.can_take)
def checked_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``argmax`` and ``has_finite_max``, which Triton finds in one pass.

    Args:
        logits: [..., V].

    Returns:
        [...] int64, and [...] bool.

    Raises:
        ValueError: V is 0 (native form).
    """
    return torch_ops.checked_argmax(logits)


@operator(
    triton=lambda logits, k: 0 < k <= min(MAX_CHOSEN, logits.shape[-1]) and gpu.can_launch(logits),
    native=lambda logits, _: native_ops.can_take(logits),
)
def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens after every node, for drafts.

    Args:
        logits: [..., V]; numbers that are not finite count as +-1e4, so that a head that overflows only drafts badly.
        k: tokens of each row, at most V.

    Returns:
        Tokens [..., k] int64, the likeliest first, and their log probabilities [..., k] float32. Of equal logits the
        lowest ids, in the native form and in Triton's; any of them in PyTorch's.

    Raises:
        ValueError: k is not in 1..V (native form).
    """
    return torch_ops.likeliest(logits, k)


@operator(
    triton=_can_launch,
    native=lambda logits, *_: native_ops.can_take(logits),
)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """Draw one token after every node by inverting the cumulative distribution in order of token id.

    Args:
        logits, temperature, top_k, top_p, min_p: as for ``probabilities``.
        uniforms: [B, N] float32 in [0, 1).

    Returns:
        [B, N] int64.

    Raises:
        ValueError: logits, settings and uniforms differ in shape or dtype (native form).
    """
    return torch_ops.sample(logits, temperature, top_k, top_p, min_p, uniforms)


@operator(triton=_can_launch, native=lambda logits, *_: native_ops.can_take(logits))
def probabilities(logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter) -> Tensor:
    """The distribution a token is drawn from.

    Temperature first, then top-k (ties with the k-th are kept), then top-p over what is left (the smallest set of the
    likeliest tokens that reaches the mass; equal ones by lower id; arXiv 1904.09751, section 3), then min-p relative
    to the largest probability (arXiv 2407.01082, section 3), then renormalised.

    Args:
        logits: [B, N, V].
        temperature: [B] float32; 0 puts all mass on the argmax.
        top_k: [B] int64, <= 0 keeps all; None: no row filters.
        top_p, min_p: [B] float32, 1 and 0 keep all; None: no row filters.

    Returns:
        [B, N, V] float32.

    Raises:
        ValueError: logits and settings differ in shape or dtype (native form).
    """
    return torch_ops.probabilities(logits, temperature, top_k, top_p, min_p)


@operator(triton=_can_launch, native=lambda logits, *_: native_ops.can_take(logits))
def penalize(
    logits: Tensor, output_counts: Tensor, prompt_mask: Tensor, tokens: Tensor, ancestors: Tensor, strengths: Strengths
) -> Tensor:
    """Penalise the tokens that already occurred on each node's own path.

    Repetition comes first (arXiv 1909.05858, section 4.1: positive logits of tokens in prompt or output are divided,
    others multiplied), then frequency (subtracted once per occurrence in the output), then presence (subtracted once).

    Args:
        logits: [B, N, V].
        output_counts: [B, V] int32, committed output tokens (the root too when it is one).
        prompt_mask: [B, V] bool, tokens of the prompt; only the repetition penalty reads them.
        tokens: [B, N] int64; those of a node's ancestors below the root count as output.
        ancestors: [B, N, N] bool, inclusive.
        strengths: presence, frequency and repetition, [B] float32 each; neutral are 0, 0 and 1.

    Returns:
        [B, N, V] float32, new memory.

    Raises:
        ValueError: operands differ in shape or dtype (native form).
    """
    return torch_ops.penalize(logits, output_counts, prompt_mask, tokens, ancestors, strengths)


@operator()
def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Add a bias to some tokens of some rows, at every node.

    Args:
        logits: [B, N, V]; sums are float32 at least, so that a small bias is not rounded away.
        rows: [K] int64.
        tokens: [K] int64; no pair of row and token may repeat.
        values: [K] float32.

    Returns:
        [B, N, V], new memory.
    """
    return torch_ops.add_bias(logits, rows, tokens, values)


@operator()
def allow_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    """Set the logits of tokens that may not follow to -inf.

    Args:
        logits: [B, N, V].
        bits: [B, N, ceil(V / 32)] int32; bit t % 32 of word t // 32 is set where token t is allowed.

    Returns:
        [B, N, V], new memory.
    """
    return torch_ops.allow_tokens(logits, bits)


@operator(native=lambda logits, *_: native_ops.can_take(logits))
def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of given tokens, and the likeliest tokens.

    Args:
        logits: [..., V].
        tokens: [...] int64.
        num_top: number of the likeliest tokens.

    Returns:
        Log probabilities of the tokens [...] float32; those of the likeliest [..., num_top] float32, descending, and
        their ids [..., num_top] int64; of equal ones the lower id first (native form).

    Raises:
        ValueError: logits and tokens do not fit, or there are fewer logits than ``num_top`` (native form).
    """
    return torch_ops.token_logprobs(logits, tokens, num_top)


@operator(native=native_ops.can_take)
def finite(logits: Tensor) -> Tensor:
    """Convert to float32 and replace what is not finite, for drafts: +inf becomes 1e4, NaN and -inf become -1e4.

    Args:
        logits: [...].

    Returns:
        [...] float32.
    """
    return torch_ops.finite(logits)


@operator(native=lambda x: native_ops.can_take(x) and x.dtype == torch.float32)
def log(x: Tensor) -> Tensor:
    """The natural logarithm, of few numbers: -inf of 0.

    Args:
        x: [...] float32.

    Returns:
        [...] float32. Forms may differ in the last bit.

    Raises:
        ValueError: another dtype (native form).
    """
    return torch_ops.log(x)


@operator(
    triton=lambda probs, uniforms: gpu.can_launch(probs) and uniforms.shape[-1] <= MAX_CHOSEN,
    native=lambda probs, uniforms: native_ops.can_accept(probs, None, uniforms),
)
def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw several different tokens from each distribution, one after the other, without replacement.

    Each draw inverts the cumulative distribution of what the previous draws left (arXiv 2402.14160).

    Args:
        probs: [B, F, V] float32, need not be normalised.
        uniforms: [B, F, k] float32 in [0, 1).

    Returns:
        tokens [B, F, k] int64, and is_drawn [B, F, k] bool: False where no mass was left; the token is then any index.

    Raises:
        ValueError: operands differ in shape or dtype (native form).
    """
    return torch_ops.draw_children(probs, uniforms)


@operator(
    triton=lambda probs, *_: gpu.can_launch(probs),
    native=lambda probs, _, __, drafts, ___, *uniforms: native_ops.can_accept(probs, drafts, *uniforms),
)
def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """Choose a token after every node: an accepted child's where there is one, else a token of no child.

    Multi-round speculative sampling (arXiv 2302.01318, algorithm 2; for several children arXiv 2305.09781, section
    4.3; drawn without replacement, arXiv 2402.14160): each choice is distributed as ``probs``, provided that the
    uniforms are independent of each other and of the drafts.

    Args:
        probs: [B, N, V] float32, the target's distribution after each node.
        tokens, parents: [B, N] int64; siblings have different tokens and are tried in order of nodes. A node other
            than the first with parent -1 is padding.
        draft_probs: [B, N, V] float32, what the children of each node were drawn from, without replacement; rows of
            nodes without children change nothing. A child without mass in what the children before it left was
            chosen, not drawn; without draft_probs all were.
        max_children: no node has more. (Further children would not be tried; the distribution of the choices stays
            right.)
        accept_uniforms: [B, N] float32, one per tried node.
        choice_uniforms: [B, N] float32, one per node after which a token is chosen; used where no child is
            accepted.

    Returns:
        [B, N] int64.

    Raises:
        ValueError: operands differ in shape or dtype (native form).
    """
    uniforms = accept_uniforms, choice_uniforms
    return torch_ops.residual_choice(probs, tokens, parents, draft_probs, max_children, *uniforms)


@operator()
def sibling_rank(parents: Tensor) -> Tensor:
    """The number of earlier nodes with the same parent.

    Args:
        parents: [B, N] int64.

    Returns:
        [B, N] int64.
    """
    return torch_ops.sibling_rank(parents)
