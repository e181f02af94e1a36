"""How long methods take while something runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Watch = Callable[[object, str, str], None]


@contextmanager
def stopwatch() -> Iterator[tuple[dict[str, float], Watch]]:
    """Seconds by part, and what adds the time of an object's method to a part.

    Time in a watched method that another one calls is taken off the caller's. Methods are as before afterwards.
    """
    seconds: dict[str, float] = {}
    inner = [0.0]  # seconds of watched calls inside the one that runs, a level per call
    watched: list[tuple[object, str]] = []

    def watch(owner: object, name: str, part: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                seconds[part] = seconds.get(part, 0.0) + elapsed - inner.pop()
                inner[-1] += elapsed

        setattr(owner, name, timed)
        watched.append((owner, name))

    try:
        yield seconds, watch
    finally:
        for owner, name in watched:
            delattr(owner, name)
