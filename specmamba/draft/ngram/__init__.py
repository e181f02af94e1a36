"""Drafts from text: what followed the newest tokens where they stood before, in this text or in a corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.request_table import RequestTable
from specmamba.config import EngineConfig
from specmamba.core import Batch
from specmamba.draft.candidates import Candidates
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.ngram.matching import NO_TOKEN, CorpusIndex, MatchRule, match_history
from specmamba.draft.text_drafter import TextDrafter
from specmamba.kernels.state_records import RowSet

CPU = torch.device("cpu")

# Matches vote for what follows. Without a corpus, factors from 1.5 to 64 and limits from 4 to 64 matches gave the same
# acceptance within 1 % (the demo's output, Python files). A corpus has many more matches than the request's own text,
# and they are worse: with this weight all of them together do not outvote one match of the same length in the request's
# text. This gave 1.82 tokens per step at temperature 0.8, equal weights gave 1.75.
WEIGHT_PER_TOKEN = 4.0  # factor of a match's weight for each further token that agrees
MAX_MATCHES = 16  # in a request's own text, and in the corpus
CORPUS_WEIGHT = 1 / MAX_MATCHES
DOUBT = WEIGHT_PER_TOKEN**-9  # weight against all matches: as much as a match of 3 tokens of 12 has


class NgramDrafter(TextDrafter):
    """Looks the newest tokens of a request up in its own prompt and output, and in a corpus if there is one.

    This is prompt lookup decoding with trees: the continuations of the longest matches are merged into one tree per
    request (``merge``). Without a match a tree is its root.
    """

    def __init__(
        self, plan: DraftPlan, config: EngineConfig, table: RequestTable, corpus_tokens: Tensor | None
    ) -> None:
        """Index the corpus.

        Args:
            plan: shape of the trees.
            config: gives the smallest and largest number of tokens that must agree.
            table: gives the numbers of rows and of positions.
            corpus_tokens: [n] int64, as ``read_corpus`` returns them; None: no corpus.
        """
        super().__init__(plan.max_nodes, plan.topk, table)
        self._rule = MatchRule(
            min_window=config.ngram_windows[0],
            max_window=config.ngram_windows[1],
            num_steps=plan.num_steps,
            max_matches=MAX_MATCHES,
        )
        weights = [WEIGHT_PER_TOKEN**-i for i in range(self._rule.max_window)]
        self._weight_of_length = torch.tensor([0.0, *reversed(weights)], dtype=torch.float64)
        self._corpus = None
        if corpus_tokens is not None and len(corpus_tokens):
            self._corpus = CorpusIndex(corpus_tokens, self._rule.max_window)

    def offer(self, batch: Batch, num_steps: int) -> Candidates:
        continuations, weights = self._continuations(RowSet.of(batch.rows, CPU))
        tokens, parents, logp = trie_levels(continuations[:, :, :num_steps], weights, num_steps, self._max_children)
        depths = np.repeat(np.arange(1, num_steps + 1), self._max_children)
        return Candidates(tokens, parents, logp, depths, np.tile(np.arange(self._max_children), num_steps))

    def _drafts(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        continuations, weights = self._continuations(RowSet.of(rows, CPU))
        if not continuations.shape[1]:
            nothing = torch.zeros(len(rows), 0, dtype=torch.int64)
            return nothing, nothing
        return merge(continuations, weights, self._max_children, self.max_nodes - 1)

    def _continuations(self, rows: RowSet) -> tuple[Tensor, Tensor]:
        """Return what followed the matches of each row, and its weights, as ``merge`` takes them."""
        lengths = rows.take(self._lengths)
        history = rows.take(self._history[:, : int(lengths.amax())])
        matches = match_history(history, lengths, self._rule)
        continuations, weights = matches.continuations, self._weight_of_length[matches.lengths]
        if self._corpus is not None:
            matches = self._corpus.match(history, lengths, self._rule)
            continuations = torch.cat([continuations, matches.continuations], 1)
            of_corpus = self._weight_of_length[matches.lengths] * CORPUS_WEIGHT
            weights = torch.cat([weights, of_corpus], 1)
        return continuations, weights


# Factor of a node's score for each step below the root. Any factor below 1 keeps a child's score below its parent's;
# between 0.3 and 0.95 acceptance hardly depends on it.
DEPTH_DECAY = 0.5


def merge(continuations: Tensor, weights: Tensor, max_children: int, max_drafts: int) -> tuple[Tensor, Tensor]:
    """Merge the continuations of each row into a trie, and keep its best nodes.

    A node is a prefix that one or more continuations share. Its score is the sum of their weights, times
    ``DEPTH_DECAY`` per step of depth. So a node's score is below its parent's, and the best nodes of all form a tree.
    Of equal scores the shallower node comes first, then the one of an earlier continuation.

    Args:
        continuations: [B, C, S] int64, C and S at least 1; NO_TOKEN after the end of a continuation.
        weights: [B, C] float64, at least 0; a continuation of weight 0 is ignored.
        max_children: largest number of children of a node.
        max_drafts: largest number of nodes of a tree, the root not included.

    Returns:
        Tokens and parents [B, D] int64 of nodes 1 to D, best first, where D is the size of the largest tree. Rows with
        fewer nodes end with parents of -1.
    """
    tokens = continuations.transpose(1, 2).contiguous()
    num_steps, count = tokens.shape[1:]
    same = tokens[..., None] == tokens[:, :, None]  # [B, S, C, C]: the first s + 1 tokens are the same
    for step in range(1, num_steps):
        same[:, step] &= same[:, step - 1]
    decay = torch.tensor([DEPTH_DECAY**depth for depth in range(1, num_steps + 1)], dtype=torch.float64)
    support = (same.double() @ weights[:, None, :, None]).squeeze(-1)
    others = torch.arange(count)
    first = others.where(same, count).amin(-1)  # [B, S, C]: the first of the continuations with this prefix
    is_first = (first == others) & (tokens != NO_TOKEN)
    score = (support * decay[:, None]).gather(2, first)  # equal for all with this prefix, however sums are rounded
    if max_children < min(count, max_drafts):
        score = score * _is_among_siblings(score, same, first, is_first, max_children)
    return _best_nodes(tokens, score * is_first, first, max_drafts)


def trie_levels(continuations: Tensor, weights: Tensor, num_steps: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the continuations of each row into a trie, and keep the best nodes of every level.

    The probability of a node, given its parent, is its share of the weights of all matches that have the parent, beside
    ``DOUBT``: a long match leaves little doubt, a short one much, and so do matches that go on differently.

    Args:
        continuations: [B, C, S] int64; NO_TOKEN after the end of a continuation.
        weights: [B, C] float64.
        num_steps: levels; those that no continuation has are empty.
        width: nodes of a level at the most.

    Returns:
        Tokens, parents and log probabilities as in ``Candidates``, [B, num_steps * width] each, level by level.
    """
    size, count = weights.shape
    shape = size, num_steps, width
    tokens, parents = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    logp = torch.full(shape, -torch.inf)
    if not count:
        return tokens.flatten(1), parents.flatten(1), logp.flatten(1)
    same = continuations[:, :, None] == continuations[:, None]  # [B, C, C, S]
    others, before = torch.arange(count), weights.sum(1, keepdim=True).expand(-1, count)
    has_prefix = torch.ones(size, count, count, dtype=torch.bool)
    node_of = torch.zeros(size, count, dtype=torch.int64)  # of each continuation's prefix, as ``Candidates.parents``
    for step in range(continuations.shape[2]):
        has_prefix = has_prefix & same[..., step]
        support = (has_prefix.double() @ weights[..., None]).squeeze(-1)
        is_first = has_prefix.where(others[:, None] >= others, False).sum(2) == 1
        is_node = is_first & (continuations[..., step] != NO_TOKEN) & (node_of >= 0)
        best, chosen = (support * is_node).sort(dim=1, descending=True, stable=True)
        best, chosen = best[:, :width], chosen[:, :width]
        kept = best.shape[1]
        tokens[:, step, :kept] = continuations[..., step].gather(1, chosen).clamp(min=0)
        parents[:, step, :kept] = node_of.gather(1, chosen).clamp(min=0)
        logp[:, step, :kept] = (best / (before.gather(1, chosen) + DOUBT)).log()
        numbers = torch.arange(step * width + 1, step * width + 1 + kept).where(best > 0, -1)
        of_first = torch.full_like(node_of, -1).scatter_(1, chosen, numbers)
        first = has_prefix.int().argmax(2)
        node_of, before = of_first.gather(1, first), support
    return tokens.flatten(1), parents.flatten(1), logp.flatten(1)


def _is_among_siblings(score: Tensor, same: Tensor, first: Tensor, is_first: Tensor, max_children: int) -> Tensor:
    """Whether a prefix and all shorter ones are among the ``max_children`` best of their siblings, [B, S, C]."""
    mine, other = score[..., None], score[:, :, None]
    is_earlier = torch.arange(first.shape[2]) < first[..., None]
    is_better = ((other > mine) | ((other == mine) & is_earlier)) & is_first[:, :, None]
    is_better[:, 1:] &= same[:, :-1]  # only siblings count
    is_among = is_better.sum(-1) < max_children
    for step in range(1, is_among.shape[1]):
        is_among[:, step] &= is_among[:, step - 1]
    return is_among


def _best_nodes(tokens: Tensor, score: Tensor, first: Tensor, max_drafts: int) -> tuple[Tensor, Tensor]:
    """Return what ``merge`` returns: the prefixes [B, S, C] with the highest scores; one with score 0 is no node."""
    num_rows, num_steps, count = tokens.shape
    best, prefix = score.view(num_rows, -1).sort(dim=1, descending=True, stable=True)
    num_drafts = min(max_drafts, int((best > 0).sum(1).amax()))
    is_node, prefix = best[:, :num_drafts] > 0, prefix[:, :num_drafts]
    nodes = torch.arange(1, num_drafts + 1).expand_as(prefix)
    node_of_prefix = prefix.new_zeros(num_rows, num_steps * count).scatter_(1, prefix, nodes)
    first_prefix = (first + torch.arange(num_steps)[:, None] * count).view(num_rows, -1)
    shorter = first_prefix.gather(1, (prefix - count).clamp(min=0))
    parents = node_of_prefix.gather(1, shorter).where(prefix >= count, 0)
    drafts = tokens.view(num_rows, -1).gather(1, prefix)
    return drafts.where(is_node, 0), parents.where(is_node, -1)
