"""A progress bar on standard error while ``LLM.generate`` waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from specmamba.calls.collector import Collector

# what a bar is made by, with the arguments of tqdm's; None: by tqdm where standard error is a terminal
UseTqdm = bool | Callable[..., Any] | None
INTERVAL_S = 0.1


def wait_for(ended: threading.Event, collector: Collector, use_tqdm: UseTqdm) -> None:
    """Wait until all calls have ended, and show meanwhile how many have, if that is wanted.

    The bar is drawn here and not where tokens come in, so that no step of the engine waits for a terminal.
    """
    make = _bar_maker(use_tqdm)
    if make is None:
        ended.wait()
        return
    began, num_shown, is_over = time.perf_counter(), 0, False
    with make(total=collector.num_calls, desc="texts", unit="text", dynamic_ncols=True) as bar:
        while not is_over:
            is_over = ended.wait(INTERVAL_S)
            speed = collector.num_tokens / (time.perf_counter() - began)
            bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            num_ended = collector.num_ended  # read once: more may end while the bar is drawn
            bar.update(num_ended - num_shown)
            num_shown = num_ended
        bar.refresh()


def _bar_maker(use_tqdm: UseTqdm) -> Callable[..., Any] | None:
    if callable(use_tqdm):
        return use_tqdm
    is_wanted = use_tqdm if use_tqdm is not None else sys.stderr is not None and sys.stderr.isatty()
    if not is_wanted:
        return None
    from tqdm import tqdm

    made: Callable[..., Any] = tqdm
    return made
