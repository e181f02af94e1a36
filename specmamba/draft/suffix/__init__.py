"""Suffix decoding: drafts from what followed the longest known end of a text, by how often it did.

After "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv 2411.04975). The counts are
those of suffix automata (``kernels/suffix_automaton``): of the request's own text, of texts that it shares a prefix
cache with, and of a corpus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.request_table import RequestTable
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTextStats
from specmamba.draft.candidates import Candidates
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import SharedText
from specmamba.draft.suffix.shared_texts import MOST_TOKENS, SharedTexts
from specmamba.draft.text_drafter import TextDrafter
from specmamba.errors import ConfigError
from specmamba.kernels import suffix_automaton
from specmamba.kernels.suffix_automaton import MAX_TOKENS, ROOT, DraftRule, Node, SuffixAutomaton, Tokens


@dataclass(eq=False)
class _OwnText:
    """The text of a row, as far as automata have it."""

    automaton: SuffixAutomaton
    shared: SharedText | None
    place: int = ROOT
    num_added: int = 0


class SuffixDrafter(TextDrafter):
    """Grows a tree for each request from the longest contexts that are known, best first.

    Automata are extended when drafts are asked for, so a step without drafts costs nothing. A step adds at most
    ``MOST_TOKENS`` of a text to each, so a long prompt is drafted from a few steps later, and delays no one.
    """

    def __init__(
        self, plan: DraftPlan, config: EngineConfig, table: RequestTable, corpus_tokens: Tensor | None
    ) -> None:
        """Add the corpus to an automaton.

        Args:
            plan: shape of the trees.
            config: gives the contexts' length, the rules of trees, and the memory of shared texts.
            table: gives the numbers of rows and of positions.
            corpus_tokens: [n] int64, as ``read_corpus`` returns them; None: no corpus.

        Raises:
            ConfigError: the corpus has more than ``MAX_TOKENS`` tokens.
        """
        super().__init__(plan.max_nodes, plan.topk, table)
        rules = config.suffix_rules
        self._rule = DraftRule(
            max_nodes=plan.max_nodes - 1,
            max_children=plan.topk,
            max_depth=plan.num_steps,
            max_width=plan.max_nodes,
            max_match=rules.max_match,
            factor=rules.factor,
            min_probability=rules.min_probability,
        )
        self._level_rules: dict[int, DraftRule] = {}  # of candidates, by their depth
        # without a prefix cache requests share nothing
        max_bytes = 0 if config.disable_radix_cache else rules.shared_mib << 20
        self._shared = SharedTexts(max_bytes, rules.max_match) if max_bytes else None
        self._next_shared: dict[int, SharedText] = {}  # of requests that begin, by row
        self._texts: dict[int, _OwnText] = {}  # of requests that run, by row
        self._grown: set[int] = set()  # rows of which tokens are in no automaton yet
        self._corpus: list[SuffixAutomaton] = []
        if corpus_tokens is not None:
            if len(corpus_tokens) > MAX_TOKENS:
                raise ConfigError(
                    f"--speculative-suffix-corpus: {config.speculative_suffix_corpus} has {len(corpus_tokens)} tokens, "
                    f"and {MAX_TOKENS} can be counted: choose a part of it"
                )
            self._corpus.append(suffix_automaton.new_automaton(rules.max_match))
            self._corpus[0].extend(ROOT, corpus_tokens.int().numpy())

    def share(self, row: int, shared: SharedText) -> None:
        self._next_shared[row] = shared

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        super().begin(row, tokens)
        shared = self._next_shared.pop(row, None)
        self._texts[row] = _OwnText(suffix_automaton.new_automaton(self._rule.max_match), shared)
        self._grown.add(row)

    def end(self, row: int) -> None:
        text = self._texts.pop(row, None)
        self._grown.discard(row)
        if text is not None and text.shared is not None and self._shared is not None:
            self._shared.end(text.shared, self._known(row))

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        super().advance(rows, decided)
        self._grown.update(rows)

    def forget_texts(self) -> None:
        if self._shared is None:
            return
        self._shared.forget()
        for row, text in self._texts.items():
            if text.shared is not None:
                text.shared.skip_to(int(self._lengths[row]))

    @property
    def text_stats(self) -> DraftTextStats:
        shared = self._shared
        return DraftTextStats(
            own_bytes=sum(text.automaton.num_bytes for text in self._texts.values()),
            shared_bytes=0 if shared is None else shared.num_bytes,
            corpus_bytes=sum(automaton.num_bytes for automaton in self._corpus),
            num_dropped=0 if shared is None else shared.num_dropped,
        )

    def offer(self, batch: Batch, num_steps: int) -> Candidates:
        self._add_new_tokens()
        width = self._max_children
        rule = self._level_rules.get(num_steps)
        if rule is None:  # the sizer says what is too unlikely
            rule = replace(
                self._rule, max_nodes=num_steps * width, max_depth=num_steps, max_width=width, min_probability=0.0
            )
            self._level_rules[num_steps] = rule
        shape = len(batch.rows), num_steps * width
        tokens, parents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        logp = np.full(shape, -np.inf, np.float32)
        for i, row in enumerate(batch.rows):
            _fill_levels(self._grow(row, rule), width, tokens[i], parents[i], logp[i])
        depths, ranks = np.repeat(np.arange(1, num_steps + 1), width), np.tile(np.arange(width), num_steps)
        on_cpu = torch.from_numpy(tokens), torch.from_numpy(parents), torch.from_numpy(logp)
        return Candidates(*on_cpu, depths, ranks)

    def _drafts(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._add_new_tokens()
        trees = [self._grow(row, self._rule) for row in rows]
        num_drafts = max(map(len, trees))
        tokens = torch.zeros(len(rows), num_drafts, dtype=torch.int64)
        parents = torch.full((len(rows), num_drafts), -1)
        for i, nodes in enumerate(trees):
            if nodes:
                tokens[i, : len(nodes)] = torch.tensor([node.token for node in nodes])
                parents[i, : len(nodes)] = torch.tensor([node.parent for node in nodes])
        return tokens, parents

    def _grow(self, row: int, rule: DraftRule) -> list[Node]:
        own = self._texts[row]
        others = [] if self._shared is None or own.shared is None else self._shared.of(own.shared.key)
        return suffix_automaton.draft([own.automaton, *others, *self._corpus], self._known(row), rule)

    def _known(self, row: int) -> Tokens:
        known: Tokens = self._history[row, : int(self._lengths[row])].numpy()
        return known

    def _add_new_tokens(self) -> None:
        for row in sorted(self._grown):
            own, known = self._texts[row], self._known(row)
            new = known[own.num_added : own.num_added + MOST_TOKENS]
            own.place = own.automaton.extend(own.place, new)
            own.num_added += len(new)
            added = [own.num_added]
            if self._shared is not None and own.shared is not None:
                self._shared.extend(own.shared, known)
                added.append(own.shared.num_tokens)
            if min(added) == len(known):
                self._grown.remove(row)


def _fill_levels(
    nodes: Sequence[Node],
    width: int,
    tokens: Tokens,
    parents: Tokens,
    logp: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> None:
    """Write nodes, the best first, as candidates level by level; a level has at most ``width``."""
    places = [0]  # of the root and the nodes, as parents of candidates
    used = [0] * (len(tokens) // width + 1)
    for node in nodes:
        place = (node.depth - 1) * width + used[node.depth]
        used[node.depth] += 1
        tokens[place], parents[place] = node.token, places[node.parent]
        logp[place] = math.log(node.probability)
        places.append(place + 1)
