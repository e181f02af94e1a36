"""Choosing tokens: penalties, filters, drawing and accepting at every node of a draft tree."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.sampling import native_ops, torch_ops
from specmamba.kernels.sampling.torch_constraints import add_bias, allow_tokens, token_logprobs
from specmamba.kernels.sampling.torch_rejection import draw_children, residual_choice, sibling_rank

# What random numbers are for; the counters of a stream are its user's.
CHOICE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, SYNTHETIC_STREAM = range(4)

__all__ = [
    "ACCEPT_STREAM",
    "CHOICE_STREAM",
    "DRAFT_STREAM",
    "SYNTHETIC_STREAM",
    "add_bias",
    "allow_tokens",
    "argmax",
    "draw_children",
    "has_largest",
    "penalize",
    "probabilities",
    "residual_choice",
    "sample",
    "sibling_rank",
    "token_logprobs",
    "uniform",
]


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Random numbers of (seed, stream, position); see ``torch_ops.uniform``."""
    if gpu.can_launch(seeds, positions):
        from specmamba.kernels.sampling import triton_ops

        return triton_ops.uniform(seeds, positions, stream)
    if native_ops.can_draw(seeds, positions):
        return native_ops.uniform(seeds, positions, stream)
    return torch_ops.uniform(seeds, positions, stream)


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token; see ``torch_ops.argmax``."""
    if gpu.can_launch(logits):
        from specmamba.kernels.sampling import triton_ops

        return triton_ops.argmax(logits)
    if native_ops.can_take(logits):
        return native_ops.argmax(logits)
    return torch_ops.argmax(logits)


def has_largest(logits: Tensor) -> Tensor:
    """Whether there is a largest logit; see ``torch_ops.has_largest``."""
    if gpu.can_launch(logits):
        from specmamba.kernels.sampling import triton_ops

        return triton_ops.has_largest(logits)
    if native_ops.can_take(logits):
        return native_ops.has_largest(logits)
    return torch_ops.has_largest(logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """One token after every node; see ``torch_ops.sample``."""
    if gpu.can_launch(logits):
        from specmamba.kernels.sampling import triton_ops

        return triton_ops.sample(logits, temperature, top_k, top_p, min_p, uniforms)
    if top_k is top_p is min_p is None and native_ops.can_take(logits):
        return native_ops.sample(logits, temperature, uniforms)
    return torch_ops.sample(logits, temperature, top_k, top_p, min_p, uniforms)


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """The distribution a token is drawn from; see ``torch_ops.probabilities``."""
    if gpu.can_launch(logits):
        from specmamba.kernels.sampling import triton_ops

        return triton_ops.probabilities(logits, temperature, top_k, top_p, min_p)
    return torch_ops.probabilities(logits, temperature, top_k, top_p, min_p)


def penalize(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Penalise what each node's own path has said already; see ``torch_ops.penalize``."""
    history = output_counts, prompt_mask, tokens, ancestors
    if gpu.can_launch(logits):
        from specmamba.kernels.sampling import triton_ops

        return triton_ops.penalize(logits, *history, presence, frequency, repetition)
    return torch_ops.penalize(logits, *history, presence, frequency, repetition)
