"""Suffix automata: what followed the longest known ends of a text, in texts that grow, and trees of drafts of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specmamba.kernels.suffix_automaton import native_ops, reference
from specmamba.kernels.suffix_automaton.operands import MAX_TOKENS, ROOT, DraftRule, Node, Tokens

__all__ = ["MAX_TOKENS", "ROOT", "DraftRule", "Node", "SuffixAutomaton", "Tokens", "draft", "new_automaton"]


class SuffixAutomaton(Protocol):
    """What both forms have; see ``reference.SuffixAutomaton``."""

    max_match: int

    @property
    def num_bytes(self) -> int: ...

    def extend(self, place: int, tokens: Tokens) -> int: ...


def new_automaton(max_match: int) -> SuffixAutomaton:
    """Make an automaton without texts, of contexts up to ``max_match`` tokens. It may get up to ``MAX_TOKENS`` tokens.

    Raises MemoryError, as the native form's ``extend`` does.
    """
    automaton: SuffixAutomaton = _form().SuffixAutomaton(max_match)
    return automaton


def draft(automata: Sequence[SuffixAutomaton], text: Tokens, rule: DraftRule) -> list[Node]:
    """Return the likeliest nodes after a text, the best first; see ``reference.draft``.

    Args:
        automata: of this process's form, all with the rule's ``max_match``; the first one is preferred.
        text: [n] int32.
        rule: what the tree may have.

    Raises:
        ValueError: a text or an automaton does not fit (native form).
    """
    nodes: list[Node] = _form().draft(automata, text, rule)
    return nodes


def _form() -> Any:
    return reference if native_ops.code() is None else native_ops
