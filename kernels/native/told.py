"""What native code is told of operands that stay for several calls: worked out once, kept while the operand lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Operand = TypeVar("Operand")
_TOLD: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def told(operand: Operand, tell: Callable[[Operand], Any]) -> Any:
    """``tell(operand)``, of the first call with this operand.

    An operand compares by identity and is told in one way only. What ``tell`` raises, it raises again the next time.
    """
    try:
        return _TOLD[operand]
    except KeyError:
        return _TOLD.setdefault(operand, tell(operand))
