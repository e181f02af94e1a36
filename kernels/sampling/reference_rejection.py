"""Drawing drafts and accepting them by their probabilities, one node at a time: the specification.

Sources: speculative sampling, arXiv 2302.01318 (algorithm 2) and 2211.17192 (section 2.3); several children of one
node, tried in turn, arXiv 2305.09781 (section 4.3); drawn without replacement, arXiv 2402.14160. See README.md.

Arithmetic is Python's, in float64.
"""

import torch
from torch import Tensor

LEAST_MASS = 2.0**-110  # drafts: less counts as none, so that narrower arithmetic can divide by what is left


def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws without replacement: probs [B, F, V], uniforms [B, F, k] in [0, 1).

    Returns tokens [B, F, k] int64 and is_drawn [B, F, k] bool; where no mass was left, a token is 0 and not drawn.
    """
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=probs.device)
    is_drawn = torch.zeros(uniforms.shape, dtype=torch.bool, device=probs.device)
    for b in range(probs.shape[0]):
        for f in range(probs.shape[1]):
            left = probs[b, f].tolist()
            for j, uniform in enumerate(uniforms[b, f].tolist()):
                if sum(left) > LEAST_MASS:
                    tokens[b, f, j] = token = invert_cdf(left, uniform)
                    is_drawn[b, f, j] = True
                    left[token] = 0.0
    return tokens, is_drawn


def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """Choose a token after every node, an accepted child's where there is one.

    probs [B, N, V]; tokens, parents [B, N] int64; draft_probs [B, N, V] or None; accept_uniforms (of the child that is
    tried) and choice_uniforms (of the node after which is chosen) [B, N] in [0, 1). Of a node's children, the first
    max_children are tried.

    Returns [B, N] int64.
    """
    choice = torch.zeros_like(tokens)
    for b, row in enumerate(parents.tolist()):
        for node in range(len(row)):
            children = [child for child, parent in enumerate(row) if parent == node][:max_children]
            choice[b, node] = choose(
                probs[b, node].tolist(),
                None if draft_probs is None or not children else draft_probs[b, node].tolist(),
                [int(tokens[b, child]) for child in children],
                [float(accept_uniforms[b, child]) for child in children],
                float(choice_uniforms[b, node]),
            )
    return choice


def choose(p: list[float], q: list[float] | None, tokens: list[int], tries: list[float], uniform: float) -> int:
    """The token after one node, whose children have these different tokens.

    ``p`` [V] is the target's distribution, ``q`` [V] what the children were drawn from; ``tries`` has a random number
    for each child, ``uniform`` is for the draw when all are refused.
    """
    residual, left = p, [0.0] * len(p) if q is None else q
    for token, u in zip(tokens, tries, strict=True):
        is_drawn = left[token] > 0 and sum(left) > LEAST_MASS
        residual, proposal = normalised(residual), normalised(left) if is_drawn else point_mass(token, len(p))
        if u * proposal[token] < residual[token]:
            return token
        residual = without([max(r - d, 0.0) for r, d in zip(residual, proposal, strict=True)], [token])
        left = without(left, [token])
    for weights in (residual, without(p, tokens)):
        if sum(weights) > 0:
            return invert_cdf(weights, uniform)
    return invert_cdf(p, uniform)


def invert_cdf(weights: list[float], uniform: float) -> int:
    """The smallest token whose cumulative weight exceeds the uniform's share of the total."""
    threshold, cumulative = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > threshold:
            return token
    raise ValueError("no weight is positive")


def normalised(weights: list[float]) -> list[float]:
    """weights [V] with sum 1, or unchanged when they have none."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else weights


def without(weights: list[float], tokens: list[int]) -> list[float]:
    """weights [V] with no mass on these tokens."""
    return [0.0 if token in tokens else weight for token, weight in enumerate(weights)]


def point_mass(token: int, size: int) -> list[float]:
    """All mass on one of ``size`` tokens."""
    return [float(other == token) for other in range(size)]
