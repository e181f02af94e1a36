"""Acceptance: decide a token after every node, follow the child that has it.

Under either rule each token on the path is distributed as the target says, given the tokens before it, whatever was
drafted. Under ``target`` it is even the same token for a given seed, with and without drafts; under ``rejection`` more
drafts are accepted when they were drawn from a distribution close to the target's (speculative sampling, arXiv
2211.17192; over the children of a node in rounds, arXiv 2305.09781).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.kernels import sampling as sampling_ops
from specmamba.kernels import tree as tree_ops
from specmamba.sampling_params import AcceptRule, SamplingParams

NODE_BITS = 6  # a draft has at most 64 nodes (config.MAX_DRAFT_TOKENS)


class AcceptPolicy(NamedTuple):
    """How drafts are accepted."""

    synthetic_acceptance: float | None = (
        None  # probability of a first child, for studies of cost; see ``synthetic_tokens``
    )


def accept_rule(setting: Literal["auto", "target", "rejection"], params: SamplingParams, draws: bool) -> AcceptRule:
    """Return the rule by which a request's drafts are accepted.

    Args:
        setting: for all requests. ``auto``: ``rejection`` where the text need not be reproducible, because the request
            brings no seed, and drafts can be drawn.
        params: of the request; it may ask for a rule itself.
        draws: whether the drafter can draw.
    """
    if params.is_greedy:
        return "target"
    if params.accept is not None:
        return params.accept
    if setting == "auto":
        return "rejection" if draws and params.seed is None else "target"
    return setting


def accept(
    tree: DraftTree,
    logits: Tensor,
    batch: Batch,
    history: tuple[Tensor, Tensor] | None,
    synthetic: float | None = None,
) -> Verdict:
    """Choose the target's token after every node and find the accepted path of each tree.

    Args:
        tree: the drafts; ``allowed_tokens`` restricts the choice after each node.
        logits: [B, N, V], the target's at every node.
        batch: root positions, sampling settings and rules of acceptance; its forced output ids replace the choice.
        history: output counts [B, V] and prompt mask [B, V]; needed when there are penalties.
        synthetic: accept a first child with this probability, for studies of cost; the text is worthless then.
            None: judge the drafts.

    Returns:
        The verdict; the bonus token of each row is never a draft.
    """
    shape, sampling = tree.shape, batch.sampling
    changes = sampling.biases, sampling.penalties, tree.allowed_tokens
    if sampling.temperature is None and all(change is None for change in changes):
        choice, can_choose = sampling_ops.checked_argmax(logits)
    else:
        can_choose = sampling_ops.has_finite_max(logits)
        choice = choose(tree, changed(tree, logits, batch, history), batch)
    if batch.forced_output_ids is not None:
        forced = batch.forced_output_ids.gather(1, shape.depth)
        choice = forced.where(forced >= 0, choice)
    tokens = tree.tokens if synthetic is None else synthetic_tokens(tree, choice, batch, synthetic)
    path = tree_ops.accepted_path(tokens, shape.parents, shape.ancestors, choice)
    return Verdict(*path, is_finite=can_choose.gather(1, path[0]).all(1))


def changed(tree: DraftTree, logits: Tensor, batch: Batch, history: tuple[Tensor, Tensor] | None) -> Tensor:
    """Add biases to the logits, penalise them, and exclude tokens that may not follow; as for ``accept``."""
    biases, penalties = batch.sampling.biases, batch.sampling.penalties
    if biases is not None:
        logits = sampling_ops.add_bias(logits, biases.rows, biases.tokens, biases.values)
    if penalties is not None:
        assert history is not None
        strengths = penalties.presence, penalties.frequency, penalties.repetition
        logits = sampling_ops.penalize(logits, *history, tree.tokens, tree.shape.ancestors, strengths)
    if tree.allowed_tokens is not None:
        logits = sampling_ops.allow_tokens(logits, tree.allowed_tokens)
    return logits


def choose(tree: DraftTree, logits: Tensor, batch: Batch) -> Tensor:
    """The target's token after every node.

    ``target`` samples the target's distribution and never uses the drafts. ``rejection`` accepts a node's children
    one by one with probabilities that depend on what they were drawn from, and draws from the residual when all are
    refused; a node without children is sampled as under ``target``. At temperature 0 both are the argmax. Rows of both
    rules may be in one batch.

    Args:
        tree: the drafts.
        logits: [B, N, V], penalised.
        batch: root positions, sampling settings and rules.

    Returns:
        [B, N] int64.
    """
    sampling, shape = batch.sampling, tree.shape
    if sampling.temperature is None:
        return sampling_ops.argmax(logits)
    positions = batch.root_positions[:, None] + shape.depth + 1  # of the tokens that are chosen
    # Nodes of one depth share a number, but no two of them are on the accepted path; and roots only move on, so no
    # position is decided twice. Each number therefore decides one token at most, and its stream nothing else.
    uniforms = sampling_ops.uniform(sampling.seeds, positions, sampling_ops.CHOICE_STREAM)
    settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    if sampling.rejects is None:
        return sampling_ops.sample(logits, *settings, uniforms)
    choice = sampling_ops.residual_choice(
        sampling_ops.probabilities(logits, *settings),
        tree.tokens,
        shape.parents,
        tree.draft_probs,
        shape.max_children,
        _accept_uniforms(batch, shape.num_nodes),
        uniforms,
    )
    if sampling.all_reject:
        return choice
    return choice.where(sampling.rejects[:, None], sampling_ops.sample(logits, *settings, uniforms))


def synthetic_tokens(tree: DraftTree, choice: Tensor, batch: Batch, probability: float) -> Tensor:
    """Replace drafts so that every node's first child is right with this probability, and other children are wrong.

    For studies of cost at a given acceptance only: the accepted nodes were computed from other drafts, so the text is
    worthless. The random numbers depend on (seed, position) alone.

    Args:
        tree: the drafts.
        choice: [B, N] int64, the target's token after every node.
        batch: root positions and seeds.
        probability: of a first child, the same at every depth.

    Returns:
        [B, N] int64: the choice after the parent where a child is right, -1 where it is wrong, the roots as they are.
    """
    parents = tree.shape.parents
    positions = batch.root_positions[:, None] + tree.shape.depth
    uniforms = sampling_ops.uniform(batch.sampling.seeds, positions, sampling_ops.SYNTHETIC_STREAM)
    is_right = (uniforms < probability) & (sampling_ops.sibling_rank(parents) == 0) & (parents >= 0)
    tokens = torch.where(is_right, choice.gather(1, parents.clamp(min=0)), -1)
    tokens[:, 0] = tree.tokens[:, 0]
    return tokens


def _accept_uniforms(batch: Batch, num_nodes: int) -> Tensor:
    """Return one random number for every node of every step, [B, N] float32 in [0, 1)."""
    nodes = torch.arange(num_nodes, device=batch.root_positions.device)
    counters = (batch.root_positions[:, None] << NODE_BITS) | nodes
    return sampling_ops.uniform(batch.sampling.seeds, counters, sampling_ops.ACCEPT_STREAM)
