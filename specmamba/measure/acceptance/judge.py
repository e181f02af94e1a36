"""Decide whether rounding explains the difference between a plain and a speculative text, or whether it is a bug.

Two texts with the same seed are equal up to some token, and different texts behind it. Each token was chosen from
logits that differ from the exact ones by rounding only. So plain decoding is forced along the speculative text from the
first difference on, and for each token the **shift** is computed: the error that the logits must have for plain
decoding to choose that token. For the first difference the same is done with the plain text's token. If rounding to the
type explains all shifts, the difference is a near tie, else a divergence.

It is not enough to judge the first difference: a state or a key that is sometimes wrong usually changes first a token
that is nearly as likely as the right one, which looks like a near tie. Later tokens of the wrong text then need shifts
that rounding does not explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from specmamba.kernels.sampling import CHOICE_STREAM, sample, uniform

EXACT_BOUND = 1e-3  # float32: sums in another order move a logit by about 1e-5
CDF_ROUNDING = 2.0**-20  # the sampler adds up probabilities in float32


@dataclass(frozen=True, slots=True)
class Difference:
    """The token at which a text with drafts differs most from the plain text.

    It is the first one that rounding does not explain, or, if rounding explains all, the one with the largest shift
    relative to its bound.
    """

    prompt: int  # its number
    first_position: int  # in the output, of the first difference
    position: int  # of this token
    plain_token: int | None  # what plain decoding chooses here; None: the text ends here
    speculative_token: int | None
    shift: float  # error of the logits that the difference needs
    bound: float  # error of the logits that rounding can cause

    @property
    def kind(self) -> Literal["near_tie", "diverged"]:
        return "near_tie" if self.shift <= self.bound else "diverged"


def rounding_bound(logits: Tensor, dtype: torch.dtype) -> float:
    """Bound the difference of a logit between two runs by rounding: 2 eps max|logit|, and at least 1e-3.

    The products of the output head are rounded to ``dtype``: by half a unit in the last place in either run, together
    eps |logit|. The same again is allowed for all roundings before: a hidden state whose relative error is c eps in a
    random direction moves a logit by c eps times the logits' root mean square, which is about a quarter of the largest;
    c is a small number, because the errors of layers add up like a random walk. Measured on the demo in
    bfloat16 (largest logit 17, 4 texts of 64 tokens): the differences have a root mean square of 0.013 and a maximum
    of 0.094; the bound is 0.27.

    Args:
        logits: [V]; entries of minus infinity are masked tokens.
        dtype: of weights and activations.
    """
    largest = logits[logits.isfinite()].abs().amax().item()
    return max(EXACT_BOUND, 2 * torch.finfo(dtype).eps * largest)


def greedy_shift(logits: Tensor, token: int) -> float:
    """The least error of logits [V] that makes this token the likeliest: half its distance to the largest logit."""
    return (logits.amax() - logits[token]).item() / 2


def sampled_shift(logits: Tensor, temperature: float, u: float, token: int) -> float:
    """The least error of logits [V] with which the random number ``u`` chooses this token.

    Tokens are chosen by inverting the cumulative distribution F in order of token id: token t, when u is in
    [F(t - 1), F(t)). Let A be the weight (exp(logit / temperature)) of the ids up to some id and B that of all others,
    so F = A / (A + B). Errors of the logits up to eps multiply A and B by factors within
    exp(±eps / temperature), so F can become anything between

        F / (F + (1 - F) e^(±2 eps / temperature)),

    which is a change by F (1 - F) (e^(2 eps / temperature) - 1) at the most, and in log-odds one of exactly
    ±2 eps / temperature. So u is reached when eps is temperature / 2 times the distance of u to the token's interval,
    in log-odds.
    """
    probs = (logits.double() / temperature).softmax(-1)
    below, own, above = probs[:token].sum().item(), probs[token].item(), probs[token + 1 :].sum().item()
    to_rise = _log_odds(below, own + above) - _log_odds_of(u + CDF_ROUNDING)
    to_fall = _log_odds_of(u - CDF_ROUNDING) - _log_odds(below + own, above)
    return max(0.0, to_rise, to_fall) * temperature / 2


def _log_odds(part: float, rest: float) -> float:
    if rest <= 0:
        return math.inf
    return math.log(part) - math.log(rest) if part > 0 else -math.inf


def _log_odds_of(share: float) -> float:
    inside = min(max(share, 2.0**-30), 1 - 2.0**-30)
    return _log_odds(inside, 1 - inside)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two texts differ, the end of the shorter one included; None when they are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    end = None if len(a) == len(b) else min(len(a), len(b))
    return next((i for i, (x, y) in pairs if x != y), end)


class Walk(Protocol):
    """Plain decoding, forced along given tokens."""

    def __call__(self, prompt: Sequence[int], tokens: Sequence[int], see: Callable[[Tensor], None]) -> None:
        """Call ``see`` with the logits [V] that each of the tokens is chosen from, in order."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares texts of one model.

    At a temperature above 0 both texts must have chosen each token by the same random number (the acceptance rule
    "target").
    """

    walk: Walk
    dtype: torch.dtype
    temperature: float

    def compare(
        self, number: int, prompt: Sequence[int], seed: int, plain: Sequence[int], speculative: Sequence[int]
    ) -> Difference | None:
        """Compare two outputs for a prompt; None when they are equal."""
        start = first_difference(plain, speculative)
        if start is None:
            return None
        if start >= min(len(plain), len(speculative)):  # one is only shorter, which rounding cannot cause
            ends = [text[start] if start < len(text) else None for text in (plain, speculative)]
            return Difference(number, start, start, ends[0], ends[1], math.inf, 0.0)
        found: list[Difference] = []

        def see(logits: Tensor) -> None:
            at = start + len(found)
            token, u = speculative[at], self._uniform(seed, len(prompt) + at)
            shift, chosen = self._shift(logits, u, token), self._choice(logits, u)
            if at == start:  # the plain run's token is known here, and must be explained too
                chosen = plain[at]
                shift = max(shift, self._shift(logits, u, chosen))
            bound = rounding_bound(logits, self.dtype)
            found.append(Difference(number, start, at, chosen, token, shift, bound))

        self.walk([*prompt, *plain[:start]], speculative[start:], see)
        unexplained = next((each for each in found if each.kind == "diverged"), None)
        return unexplained or max(found, key=lambda each: each.shift / each.bound)

    def _uniform(self, seed: int, position: int) -> Tensor:
        return uniform(torch.tensor([seed]), torch.tensor([[position]]), CHOICE_STREAM)

    def _shift(self, logits: Tensor, u: Tensor, token: int) -> float:
        if self.temperature == 0:
            return greedy_shift(logits, token)
        return sampled_shift(logits, self.temperature, u.item(), token)

    def _choice(self, logits: Tensor, u: Tensor) -> int:
        return int(sample(logits[None, None], torch.tensor([self.temperature]), None, None, None, u))
