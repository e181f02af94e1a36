"""Rules for decimal numbers between two bounds, digit by digit.

Integers have at most 15 digits unless their bounds have more. Other numbers have at most 9 digits before the point and
6 behind it, so that double precision tells all of them apart and no rounding crosses a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from specmamba.errors import RequestError
from specmamba.grammar.ebnf import literal, one_of, repeated

MAX_INTEGER_DIGITS, MAX_WHOLE_DIGITS, MAX_FRACTION_DIGITS = 15, 9, 6
_MAX_BOUND_DIGITS = 30


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers from ``low`` to ``high``; an open bound is excluded. None: no bound."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False

    def negated(self) -> Bounds:
        """The bounds of -x for x within these."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Bounds(low, high, self.high_open, self.low_open)


def integers(bounds: Bounds) -> str:
    """The expression for all integers within bounds.

    Raises:
        RequestError: there is no such integer, or a bound has too many digits.
    """
    low, high = _whole_low(bounds), _whole_high(bounds)
    choices = []
    if low is None or low < 0:
        choices.append(_negative(low, high))
    if high is None or high >= 0:
        choices.append(whole(max(low or 0, 0), high))
    return _any(choices)


def decimals(bounds: Bounds) -> str:
    """The expression for numbers within bounds, with or without a fraction.

    Raises:
        RequestError: there is no such number, or a bound has too many digits.
    """
    choices = []
    if bounds.low is None or bounds.low < 0:
        above_zero = bounds.negated()
        if above_zero.low is None or above_zero.low <= 0:
            above_zero = Bounds(Decimal(0), above_zero.high, True, above_zero.high_open)
        choices.append(_with_sign(_magnitude(above_zero)))
    if bounds.high is None or bounds.high >= 0:
        low_open = bounds.low_open and bounds.low is not None and bounds.low >= 0
        choices.append(
            _magnitude(Bounds(max(bounds.low or Decimal(0), Decimal(0)), bounds.high, low_open, bounds.high_open))
        )
    return _any(choices)


def whole(low: int, high: int | None, digits: int = MAX_INTEGER_DIGITS) -> str | None:
    """Integers from ``low`` (at least 0) to ``high``, without leading zeros; None if there are none."""
    if high is None:
        high = 10 ** max(digits, len(str(low)) + 1) - 1
    if low > high:
        return None
    choices = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        choices.append(_between(str(first), str(min(high, 10**length - 1))))
    return one_of(choices)


def _between(low: str, high: str) -> str:
    """Digit strings between two bounds of the same length."""
    if not low.strip("0") and not high.strip("9"):
        return repeated("[0-9]", len(low), len(low))
    if low[0] == high[0]:
        return f"{literal(low[0])} {_between(low[1:], high[1:])}"
    first, last, choices, rest = int(low[0]), int(high[0]), [], len(low) - 1
    if low[1:].strip("0"):
        choices.append(f"{literal(low[0])} {_between(low[1:], '9' * rest)}")
        first += 1
    if high[1:].strip("9"):
        choices.append(f"{literal(high[0])} {_between('0' * rest, high[1:])}")
        last -= 1
    if first <= last:
        choices.append(f"{_digit(first, last)} {repeated('[0-9]', rest, rest)}")
    return one_of(choices)


def _magnitude(bounds: Bounds) -> str | None:
    """Numbers within bounds that are at least zero."""
    low, low_tail = _parts(bounds.low or Decimal(0))
    top = Decimal(10**MAX_WHOLE_DIGITS - 1) if bounds.high is None else bounds.high
    high, high_tail = _parts(max(top, Decimal(low + 1)) if bounds.high is None else top)
    if high < low:
        return None
    if low == high:
        tail = _tail_between(low_tail, high_tail, bounds, MAX_FRACTION_DIGITS, is_first=True)
        return None if tail is None else f"{literal(str(low))} {tail}"
    choices = [f"{literal(str(low))} {_fraction_from(low_tail, bounds.low_open)}"]
    between = whole(low + 1, high - 1)
    if between is not None:
        choices.append(f"{between} {_ANY_FRACTION}")
    end = _fraction_to(high_tail, bounds.high_open)
    if end is not None:
        choices.append(f"{literal(str(high))} {end}")
    return one_of(choices)


_ANY_FRACTION = f'("." [0-9]{{1,{MAX_FRACTION_DIGITS}}})?'


def _fraction_from(tail: str, is_open: bool) -> str:
    """Fractions of at least 0.``tail`` (open: more), with the point; also no fraction, where the bound allows it."""
    if not tail and not is_open:
        return _ANY_FRACTION
    return f'"." ({_at_least(tail, is_open, MAX_FRACTION_DIGITS)})'


def _fraction_to(tail: str, is_open: bool) -> str | None:
    """Fractions of at most 0.``tail`` (open: less), with the point; None where there are none."""
    if not tail:
        return None if is_open else '""'
    return f'("." ({_at_most(tail, is_open, MAX_FRACTION_DIGITS, is_first=True)}))?'


def _at_least(tail: str, is_open: bool, room: int) -> str:
    """Up to ``room`` digits behind the point whose value is at least ``tail`` (open: more)."""
    if not tail:
        if not is_open:
            return f"[0-9]{{0,{room}}}"
        above = f"[1-9] [0-9]{{0,{room - 1}}}"
        return above if room == 1 else one_of([above, f'"0" ({_at_least("", True, room - 1)})'])
    digit = int(tail[0])
    choices = [f"{literal(tail[0])} ({_at_least(tail[1:], is_open, room - 1)})"]
    if digit < 9:
        choices.append(f"{_digit(digit + 1, 9)} [0-9]{{0,{room - 1}}}")
    return one_of(choices)


def _at_most(tail: str, is_open: bool, room: int, is_first: bool) -> str | None:
    """Digits whose value is at most ``tail`` (open: less), which has no zeros at its end."""
    if not tail:
        return None if is_open else '""'
    digit, choices = int(tail[0]), [] if is_first else ['""']
    if digit > 0:
        choices.append(f"{_digit(0, digit - 1)} [0-9]{{0,{room - 1}}}")
    rest = _at_most(tail[1:], is_open, room - 1, is_first=False)
    if rest is not None:
        choices.append(f"{literal(tail[0])} ({rest})")
    return one_of(choices)


def _tail_between(low: str, high: str, bounds: Bounds, room: int, is_first: bool) -> str | None:
    """Digits behind the point between two values; with the point in the first call."""
    if not low and not bounds.low_open:
        return _fraction_to(high, bounds.high_open) if is_first else _at_most(high, bounds.high_open, room, False)
    if not high or room == 0:
        return '""' if low == high and not bounds.low_open and not bounds.high_open else None
    first, last = low[:1] or "0", high[0]
    choices: list[str | None] = []
    if first == last:
        rest = _tail_between(low[1:], high[1:], bounds, room - 1, is_first=False)
        choices.append(None if rest is None else f"{literal(first)} ({rest})")
    elif first < last:
        choices.append(f"{literal(first)} ({_at_least(low[1:], bounds.low_open, room - 1)})")
        if int(last) - int(first) > 1:
            choices.append(f"{_digit(int(first) + 1, int(last) - 1)} [0-9]{{0,{room - 1}}}")
        end = _at_most(high[1:], bounds.high_open, room - 1, is_first=False)
        choices.append(None if end is None else f"{literal(last)} ({end})")
    found = [choice for choice in choices if choice is not None]
    if not found:
        return None
    return f'"." ({one_of(found)})' if is_first else one_of(found)


def _negative(low: int | None, high: int | None) -> str | None:
    return _with_sign(whole(max(1, -high) if high is not None else 1, None if low is None else -low))


def _with_sign(magnitude: str | None) -> str | None:
    return None if magnitude is None else f'"-" ({magnitude})'


def _any(choices: list[str | None]) -> str:
    found = [choice for choice in choices if choice is not None]
    if not found:
        raise RequestError("JSON schema: no number lies within the given bounds", "grammar")
    return one_of(found)


def _parts(bound: Decimal) -> tuple[int, str]:
    """The integer part, and the digits behind the point without zeros at the end."""
    whole_text, _, tail = f"{bound:f}".partition(".")
    tail = tail.rstrip("0")
    if len(whole_text) > MAX_WHOLE_DIGITS or len(tail) >= MAX_FRACTION_DIGITS:
        raise RequestError(
            f"JSON schema: the bound {bound} has too many digits: a bound of a number that is no integer has at most "
            f"{MAX_WHOLE_DIGITS} before the point and {MAX_FRACTION_DIGITS - 1} behind it",
            "grammar",
        )
    return int(whole_text), tail


def _whole_low(bounds: Bounds) -> int | None:
    if bounds.low is None:
        return None
    low = -int((-_checked(bounds.low)).to_integral_value(rounding="ROUND_FLOOR"))
    return low + 1 if bounds.low_open and low == bounds.low else low


def _whole_high(bounds: Bounds) -> int | None:
    if bounds.high is None:
        return None
    high = int(_checked(bounds.high).to_integral_value(rounding="ROUND_FLOOR"))
    return high - 1 if bounds.high_open and high == bounds.high else high


def _checked(bound: Decimal) -> Decimal:
    if abs(bound.adjusted()) >= _MAX_BOUND_DIGITS and bound:
        raise RequestError(f"JSON schema: the bound {bound:.3e} has too many digits", "grammar")
    return bound


def _digit(low: int, high: int) -> str:
    return f"[{low}-{high}]"
