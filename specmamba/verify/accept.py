"""Acceptance: decide a token after every node, follow the child that has it.

Whichever rule decides, each token on the path is distributed as the target says, given the tokens before it and
whatever was drafted. Under ``target`` it is even the same token for a given seed, with and without drafting; under
``rejection`` more drafts are accepted when they were drawn from a distribution close to the target's.
"""

from __future__ import annotations

from torch import Tensor

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels import tree as tree_ops
from specmamba.verify.rules import AcceptRule, choose, synthetic_tokens


def accept(
    tree: DraftTree,
    logits: Tensor,
    batch: Batch,
    history: tuple[Tensor, Tensor] | None,
    rule: AcceptRule = "target",
    synthetic: float | None = None,
) -> Verdict:
    """Decide how far each tree is right.

    Args:
        tree: the drafts.
        logits: [B, N, V], the target's, after every node.
        batch: where the roots stand, how the rows choose, and what grammars allow; forced tokens overrule the choice.
        history: output counts [B, V] and prompt mask [B, V]; needed when there are penalties.
        rule: how a token is chosen after a node; see ``choose``.
        synthetic: pretend that a first child is right with this probability, for studies of cost; the text is
            worthless then. None: judge the drafts.

    Returns:
        The verdict; the bonus token of each row is never a draft.
    """
    shape, penalties = tree.shape, batch.sampling.penalties
    can_choose = sampling_ops.has_finite_max(logits)
    if batch.sampling.biases is not None:
        biases = batch.sampling.biases
        logits = sampling_ops.add_bias(logits, biases.rows, biases.tokens, biases.values)
    if penalties is not None:
        assert history is not None
        strengths = penalties.presence, penalties.frequency, penalties.repetition
        logits = sampling_ops.penalize(logits, *history, tree.tokens, shape.ancestors, *strengths)
    if batch.allowed is not None:
        logits = sampling_ops.allow_tokens(logits, batch.allowed)
    choice = choose(tree, logits, batch, rule)
    if batch.forced_tokens is not None:
        forced = batch.forced_tokens.gather(1, shape.depth)
        choice = forced.where(forced >= 0, choice)
    tokens = tree.tokens if synthetic is None else synthetic_tokens(tree, choice, batch, synthetic)
    path = tree_ops.accepted_path(tokens, shape.parents, shape.ancestors, choice)
    return Verdict(*path, is_sound=can_choose.gather(1, path[0]).all(1))
