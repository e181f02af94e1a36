"""Penalties, filters, drawing and accepting in vectorised PyTorch. See README.md."""

import torch
from torch import Tensor

from specmamba.kernels.sampling.reference import OVERFLOW, Filter, Strengths

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the 64-bit constants as torch's signed integers
_STREAM = 0xD1342543DE82EF95  # odd, and unrelated to the step from counter to counter
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_BLOCK = 512  # tokens whose mass is summed up before the cumulative sum
_WORD_BITS = 32
LEAST_MASS = 2.0**-110  # less counts as none: no float32 may overflow when it is divided by a mass


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """64-bit arithmetic in torch's signed integers."""
    key = _mix(seeds + stream_key(stream)).view(-1, *[1] * (positions.ndim - 1))
    bits = _mix(key + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 40).float() * 2.0**-24


def probabilities(logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter) -> Tensor:
    """Filters by sorting; the argmax is subtracted first."""
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # the largest is 0: no temperature can make it overflow
    is_greedy = (temperature == 0)[:, None, None]
    scaled = logits / temperature.where(temperature != 0, 1)[:, None, None]
    if top_k is not None:
        scaled = _keep_top_k(scaled, top_k)
    probs = scaled.softmax(-1)
    if top_p is not None:
        probs = _keep_top_p(probs, top_p)
    if min_p is not None:
        probs = probs.where(probs >= min_p[:, None, None] * probs.amax(-1, keepdim=True), 0)
    if top_p is not None or min_p is not None:
        probs = probs / probs.sum(-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
    return torch.where(is_greedy, one_hot, probs)


def argmax(logits: Tensor) -> Tensor:
    """PyTorch's argmax returns the first maximum."""
    return logits.argmax(-1)


def has_finite_max(logits: Tensor) -> Tensor:
    """The maximum is NaN where any logit is."""
    return logits.amax(-1).isfinite()


def checked_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Two reductions."""
    return argmax(logits), has_finite_max(logits)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """Draw from ``probabilities``."""
    return draw(probabilities(logits, temperature, top_k, top_p, min_p), uniforms)


def penalize(
    logits: Tensor, output_counts: Tensor, prompt_mask: Tensor, tokens: Tensor, ancestors: Tensor, strengths: Strengths
) -> Tensor:
    """Counts of all nodes at once, by a scatter."""
    presence, frequency, repetition = strengths
    logits = logits.float()
    counts = output_counts[:, None].to(logits.dtype).repeat(1, tokens.shape[1], 1)
    below_root = ancestors.to(logits.dtype)
    below_root[..., 0].zero_()
    counts.scatter_add_(2, tokens[:, None].expand_as(ancestors), below_root)
    was_said = counts > 0
    factor = repetition[:, None, None].where(was_said | prompt_mask[:, None], 1)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None, None] * counts - presence[:, None, None] * was_said


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """One scatter into a float32 copy."""
    biased = logits.clone() if logits.dtype == torch.float32 else logits.float()
    added = values[:, None].expand(-1, logits.shape[1])
    biased.transpose(1, 2).index_put_((rows, tokens), added, accumulate=True)
    return biased


def allow_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    """Every bit becomes a number of the mask."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    is_allowed = ((bits[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[-1]]
    return torch.where(is_allowed > 0, logits, -torch.inf)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """One logsumexp; the likeliest by topk."""
    logits = logits.float()
    total = logits.logsumexp(-1)
    own = logits.gather(-1, tokens[..., None]).squeeze(-1) - total
    top = logits.topk(num_top, -1)
    return own, top.values - total[..., None], top.indices


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Equal logits in any order."""
    logits = finite(logits)
    tokens = logits.topk(k, -1).indices
    return tokens, logits.log_softmax(-1).gather(-1, tokens)


def finite(logits: Tensor) -> Tensor:
    """Convert to float32 and replace what is not finite."""
    return logits.float().nan_to_num(-OVERFLOW, OVERFLOW, -OVERFLOW)


def log(x: Tensor) -> Tensor:
    """PyTorch's."""
    return x.log()


def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One draw per child; the drawn token's mass is removed before the next."""
    blocks = blocks_of(probs.clone())
    masses = blocks.sum(-1)
    tokens, is_drawn = [], []
    for uniform in uniforms.unbind(-1):
        is_drawn.append(masses.sum(-1) > LEAST_MASS)
        token = draw_from_blocks(blocks, masses, uniform)[..., None]
        blocks.flatten(-2).scatter_(-1, token, 0)
        block = token // blocks.shape[-1]
        left = blocks.gather(-2, block[..., None].expand(*block.shape, blocks.shape[-1]))
        masses.scatter_(-1, block, left.sum(-1))
        tokens.append(token.squeeze(-1))
    return torch.stack(tokens, -1).clamp_(max=probs.shape[-1] - 1), torch.stack(is_drawn, -1)


def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """One round per child of a node, for all nodes at once."""
    if parents.shape[1] == 1:
        return draw(probs, choice_uniforms)
    children = _children(parents, min(max_children, parents.shape[1] - 1))
    residual, q = probs.clone(), None
    if draft_probs is not None:
        q = draft_probs.where((children >= 0).any(-1, keepdim=True), 0)
    mass = residual.sum(-1)
    choice = torch.full_like(tokens, -1)
    for child in children.unbind(-1):
        exists, child = child >= 0, child.clamp(min=0)
        token, uniform = tokens.gather(1, child), accept_uniforms.gather(1, child).double()
        if q is None:
            accepts = uniform * mass < _at(residual, token)
        else:
            q_token, q_mass = _at(q, token), q.sum(-1)
            is_drawn = exists & (q_token > 0) & (q_mass > LEAST_MASS)
            density = torch.where(is_drawn, q_token.double() / q_mass, 1)
            accepts = uniform * density * mass < _at(residual, token)
            scale = torch.where(is_drawn, mass / q_mass, 0)  # the residual stays as it is, without normalisation
            residual.addcmul_(q, scale[..., None], value=-1).clamp_(min=0)
            _remove(q, token, exists)
        choice = torch.where(exists & accepts & (choice < 0), token, choice)
        _remove(residual, token, exists)
        mass = residual.sum(-1)
    if q is not None:  # rounding can empty a residual: then probs without the children
        residual.addcmul_(probs, (mass == 0)[..., None])
        for child in children.unbind(-1):
            _remove(residual, tokens.gather(1, child.clamp(min=0)), child >= 0)
    return torch.where(choice >= 0, choice, _draw_or_else(residual, probs, choice_uniforms))


def sibling_rank(parents: Tensor) -> Tensor:
    """Counts earlier nodes with the same parent."""
    return (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = scaled.shape[-1]
    k = top_k.where(top_k > 0, vocabulary).clamp(max=vocabulary)
    descending = scaled.sort(-1, descending=True).values
    kth = descending.gather(-1, (k - 1)[:, None, None].expand(-1, scaled.shape[1], 1))
    return scaled.masked_fill(scaled < kth, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    keep = (mass_before < top_p[:, None, None]) | (top_p >= 1)[:, None, None]
    keep[..., 0].fill_(True)
    return probs.where(torch.zeros_like(keep).scatter_(-1, ids, keep), 0)


def blocks_of(weights: Tensor) -> Tensor:
    """Weights [..., V] as blocks of neighbouring tokens [..., V / S, S]; padded with zeros where V is no multiple."""
    size = min(_BLOCK, weights.shape[-1])
    missing = -weights.shape[-1] % size
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(*weights.shape[:-1], padded.shape[-1] // size, size)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token [...] int64 from each of the weights [..., V]; where nothing has any mass, some token."""
    blocks = blocks_of(weights)
    return draw_from_blocks(blocks, blocks.sum(-1), uniforms).clamp_(max=weights.shape[-1] - 1)


def draw_from_blocks(blocks: Tensor, masses: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative distribution in order of token id, in two levels: first the block, then the token in it.

    Running sums are float64: over a vocabulary of 250,000 a float32 one is off by more than many a token's probability.
    They cost much more than the plain sum of each block, so only the sums of the blocks and one block go through them.

    Args:
        blocks: [..., V / S, S] float32 from ``blocks_of``, not normalised.
        masses: [..., V / S] float32, the sum of each block.
        uniforms: [...] float32 in [0, 1).

    Returns:
        [...] int64; where there is no mass (or none that is a number), some index of ``blocks``.
    """
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    threshold = uniforms[..., None] * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=masses.shape[-1] - 1)
    mass = masses.gather(-1, block)
    # the block's mass is rounded: what is left of the threshold counts as a fraction of it, and never as all of it
    fraction = ((threshold - cumulative.gather(-1, block) + mass) / mass).clamp_(0, 1 - 2.0**-50)
    index = block[..., None].expand(*block.shape, blocks.shape[-1])
    inside = blocks.gather(-2, index).squeeze(-2).cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(inside, fraction * inside[..., -1:], right=True).clamp_(max=blocks.shape[-1] - 1)
    return (block * blocks.shape[-1] + token).squeeze(-1)


def stream_key(stream: int) -> int:
    """The constant that is added to the seeds of a stream, as torch's signed integer."""
    return ((_GOLDEN + stream * _STREAM + 2**63) % 2**64) - 2**63


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own is arithmetic on signed integers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _children(parents: Tensor, max_children: int) -> Tensor:
    """The children of every node, in order; [B, N, max_children] int64, -1 where there are fewer."""
    batch, num_nodes = parents.shape
    rank = sibling_rank(parents)
    nowhere = num_nodes * max_children
    entry = torch.where((parents >= 0) & (rank < max_children), parents * max_children + rank, nowhere)
    nodes = torch.arange(num_nodes, device=parents.device).expand_as(parents)
    table = parents.new_full((batch, nowhere + 1), -1).scatter_(1, entry, nodes)
    return table[:, :-1].reshape(batch, num_nodes, max_children)


def _at(weights: Tensor, token: Tensor) -> Tensor:
    return weights.gather(-1, token[..., None]).squeeze(-1)


def _remove(weights: Tensor, token: Tensor, exists: Tensor) -> None:
    """Take the mass of a token [B, N] out of weights [B, N, V], in place, where it exists."""
    weights.scatter_(-1, token[..., None], torch.where(exists, 0, _at(weights, token))[..., None])


def _draw_or_else(weights: Tensor, others: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from weights [B, N, V], or from others where weights are empty."""
    blocks = blocks_of(weights)
    masses = blocks.sum(-1)
    token = draw_from_blocks(blocks, masses, uniforms)
    return torch.where((masses > 0).any(-1), token, draw(others, uniforms)).clamp_(max=weights.shape[-1] - 1)
