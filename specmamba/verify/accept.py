"""Acceptance by the target's own choice: decide a token after every node, follow the child that has it.

At temperature 0 the choice is the argmax. Above it, the target's distribution is sampled with a random number that
belongs to the position: every token on the path is then a plain sample of the target, whatever was drafted, so the
output distribution is the target's own, and a seeded text is the same with and without drafting.
"""

from __future__ import annotations

from torch import Tensor

from specmamba.core import DraftTree, Verdict
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels import tree as tree_ops
from specmamba.verify.sampling import SamplingBatch


def accept(
    tree: DraftTree,
    logits: Tensor,
    sampling: SamplingBatch,
    root_positions: Tensor,
    history: tuple[Tensor, Tensor] | None,
) -> Verdict:
    """Decide how far each tree is right.

    Args:
        tree: the drafts.
        logits: [B, N, V], the target's, after every node.
        sampling: how the rows choose.
        root_positions: [B] int64.
        history: output counts [B, V] and prompt mask [B, V]; needed when there are penalties.

    Returns:
        The verdict; the bonus token of each row is never a draft.
    """
    shape = tree.shape
    is_sound = logits.amax((1, 2)).isfinite()  # the largest of numbers that hold one that is none is none
    if sampling.penalties is not None:
        assert history is not None
        p = sampling.penalties
        logits = sampling_ops.penalize(
            logits, *history, tree.tokens, shape.ancestors, p.presence, p.frequency, p.repetition
        )
    if sampling.temperature is None:
        choice = logits.argmax(-1)
    else:
        positions = root_positions[:, None] + shape.depth + 1  # of the tokens that are chosen
        uniforms = sampling_ops.uniform(sampling.seeds, positions)
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        choice = sampling_ops.sample(logits, sampling.temperature, *filters, uniforms)
    path = tree_ops.accepted_path(tree.tokens, shape.parents, shape.ancestors, choice)
    return Verdict(*path, is_sound=is_sound)
