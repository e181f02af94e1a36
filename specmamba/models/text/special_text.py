"""Special tokens that clients write in messages: they are found, marked before the rendering, and encoded as text.

A special token that is written in a client's string must not act as one: it could end a message and begin another in
the name of the system. Rendered texts mix the client's strings with special tokens of the template. So each special
token inside a client's string gets a mark in it before the rendering; what has none afterwards is the template's own.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from specmamba.templates.rendering import Conversation, RenderedChat, escape_of, without_mark

# Noncharacters, which no text of a language has.
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
# Characters that one call of ``re`` searches. No other thread runs Python code during such a call.
SLICE = 1 << 16
# Branches of a pattern inside each other: the parser of ``re`` has a limit.
_MOST_NESTED = 50


class SpecialText:
    """The special tokens of a tokenizer, in and out of the strings of clients. Safe to share between threads."""

    def __init__(self, backend: Backend, tokens: Mapping[int, AddedToken], control_ids: Collection[int]) -> None:
        """``tokens``: the added tokens by id. ``control_ids``: those that clients may not write."""
        self._source = backend
        self._special = {i: token for i, token in tokens.items() if token.special and token.content}
        self._control_ids = frozenset(control_ids)
        # A mark inside a token of one character is not possible: such tokens always act.
        self._control = [token.content for i, token in tokens.items() if i in control_ids and len(token.content) > 1]
        self._longest = max(map(len, self._control), default=0)
        self._longest_acting = max((len(token.content) for token in self._special.values()), default=0)
        self._starts, self._acting = self._pattern_of_starts(), self._pattern_of_acting()
        # Parts of tokens where a string ends or begins: the neighbour in the rendered text may have the rest. Letters
        # and digits at the edge are left alone, because templates compare words.
        parts = [(text[:cut], text[cut:]) for text in self._control for cut in range(1, len(text))]
        self._beginnings = {first for first, _ in parts if not first[0].isalnum()}
        self._ends = {second for _, second in parts if not second[-1].isalnum()}
        self._first, self._last = {text[0] for text in self._beginnings}, {text[-1] for text in self._ends}
        self._sign = f"\ufdef{secrets.token_hex(16)}\ufdef"  # clients cannot write what they do not know
        self._lock = threading.Lock()  # guards the field below
        self._backend: Backend | None = None

    def marked(self, conversation: Conversation) -> Conversation:
        """Put a mark in each special token of the client's strings; without any, the conversation stays as it is."""
        values = [conversation.messages, conversation.tools, conversation.variables]
        texts = list(strings(values))
        if not any(map(self._is_special, texts)):
            return conversation
        seen = "\n".join([conversation.template, *texts])
        mark = next((mark for mark in MARKS if mark not in seen and escape_of(mark) not in seen), MARKS[0])
        messages, tools, variables = self._with_mark(values, mark)
        # The names of variables are compared with those that the template reads.
        named = dict(zip(conversation.variables, variables.values(), strict=True))
        return replace(conversation, messages=messages, tools=tools, variables=named, mark=mark)

    def has_text(self, rendered: RenderedChat) -> bool:
        """Whether a special token in this text is not the template's own."""
        return bool(rendered.mark) and self.signed(rendered) != self._with_signs(rendered.text)

    def signed(self, rendered: RenderedChat) -> str:
        """The text of a conversation as ``backend`` reads it: special tokens of the template have a sign."""
        return without_mark(self._with_signs(rendered.marked), rendered.mark)

    @property
    def backend(self) -> Backend:
        """A copy of the tokenizer for which special tokens are text, unless they have a sign."""
        with self._lock:
            if self._backend is None:
                copy: Backend = Backend.from_str(self._source.to_str())
                copy.encode_special_tokens = True
                copy.add_tokens([self._with_sign(token) for token in self._special.values()])
                self._backend = copy
            return self._backend

    def real_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The tokenizer's own ids for those of ``backend``."""
        model, found = self.backend.model, []
        for i in token_ids:
            if i in self._control_ids:  # some models find special tokens in text: split it
                text = self._special[i].content
                found += [token.id for part in (text[:1], text[1:]) for token in model.tokenize(part)]
            else:
                found.append(self._real.get(i, i))
        return found

    def _with_signs(self, text: str) -> str:
        starts = [match.start() for match in found(self._acting, text, self._longest_acting)]
        return self._sign.join(text[start:end] for start, end in pairwise([0, *starts, len(text)]))

    def _with_sign(self, token: AddedToken) -> AddedToken:
        return AddedToken(
            self._sign + token.content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
        )

    @cached_property
    def _real(self) -> dict[int, int]:
        """Own ids by those of tokens with a sign."""
        found = {self.backend.token_to_id(self._sign + token.content): i for i, token in self._special.items()}
        return {signed: i for signed, i in found.items() if signed is not None}

    def _pattern_of_starts(self) -> re.Pattern[str]:
        """Finds where tokens begin that clients may not write, also where they overlap."""
        return re.compile(f"(?={any_of(dict.fromkeys(self._control, ''))})")

    def _pattern_of_acting(self) -> re.Pattern[str]:
        """Finds special tokens, the longest at each place."""
        conditions: dict[str, str] = {}
        for token in self._special.values():
            text = token.content
            # The second part looks back from the end of the token at the character before it.
            alone = rf"(?!\w)(?<!\w[\s\S]{{{len(text)}}})" if token.single_word else ""
            conditions[text] = alone and conditions.get(text, alone)
        return re.compile(any_of(conditions))

    def _is_special(self, text: str) -> bool:
        return next(found(self._starts, text, self._longest), None) is not None or any(self._edges(text))

    def _edges(self, text: str) -> Iterator[int]:
        """Where to put a mark for parts of special tokens at the edges of a string, apart from white space."""
        stripped = text.strip()
        start = len(text) - len(text.lstrip())
        end = start + len(stripped)
        head, tail = stripped[: self._longest], stripped[-self._longest :]
        if not self._last.isdisjoint(head):
            yield from (start + cut - 1 for cut in range(1, len(head) + 1) if head[:cut] in self._ends)
        if not self._first.isdisjoint(tail):
            yield from (end - cut + 1 for cut in range(1, len(tail) + 1) if tail[-cut:] in self._beginnings)

    def _with_mark(self, value: Any, mark: str) -> Any:
        match value:
            case str():
                return self._marked_text(value, mark)
            case Mapping():
                return {self._with_mark(key, mark): self._with_mark(each, mark) for key, each in value.items()}
            case list() | tuple():
                return [self._with_mark(each, mark) for each in value]
        return value

    def _marked_text(self, text: str, mark: str) -> str:
        inside = (match.start() + 1 for match in found(self._starts, text, self._longest))
        cuts = [0, *sorted({*inside, *self._edges(text)}), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(cuts))


def any_of(conditions: Mapping[str, str]) -> str:
    """A pattern for the longest of several texts. At each place it reads at most as much as the longest one.

    Texts with the same beginning share it: ``re`` would else try them one after the other.

    Args:
        conditions: for each text a pattern of no width that must match after it; "" for none.
    """
    return _branches(conditions, 0) if conditions else "(?!)"


def _branches(conditions: Mapping[str, str], depth: int) -> str:
    # Of all texts in order, the first and the last one have the least in common.
    same = (first == last for first, last in zip(min(conditions), max(conditions), strict=False))
    shared = min(conditions)[: sum(takewhile(bool, same))]
    rests = {text[len(shared) :]: condition for text, condition in conditions.items()}
    if len(rests) == 1:
        return re.escape(shared) + rests[""]
    if depth == _MOST_NESTED:
        choices = [re.escape(rest) + rests[rest] for rest in sorted(rests, key=len, reverse=True)]
    else:
        by_first: dict[str, dict[str, str]] = {}
        for rest, condition in rests.items():
            by_first.setdefault(rest[:1], {})[rest] = condition
        ending = [by_first.pop("")[""]] if "" in rests else []  # last: longer texts come first
        choices = [_branches(branch, depth + 1) for branch in by_first.values()] + ending
    return f"{re.escape(shared)}(?:{'|'.join(choices)})"


def found(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """``pattern.finditer(text)``, searched in slices: other threads can run between them.

    Args:
        pattern: reads at most ``longest`` characters and the ones beside them, wherever it matches.
        text: of any length.
        longest: in characters.
    """
    start = 0
    while start < len(text):
        end = start + SLICE
        following = end
        for match in pattern.finditer(text, start, end + longest + 1):
            if match.start() >= end:
                break
            yield match
            following = max(end, match.end())
        start = following


def strings(value: Any) -> Iterator[str]:
    """All strings of a value of JSON, the keys of its objects included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, each in value.items():
                yield from strings(key)
                yield from strings(each)
        case list() | tuple():
            for each in value:
                yield from strings(each)
