"""Where the time of a step goes."""

from __future__ import annotations

import time
from typing import Literal

import torch

Phase = Literal["draft", "verify", "commit"]


class StepClock:
    """Seconds of every step by phase, while it is on. It is off unless asked for: on a GPU every lap waits.

    ``rows`` has the number of requests in each step, and ``seconds`` as many times of each phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self.seconds: dict[Phase, list[float]] = {"draft": [], "verify": [], "commit": []}
        self.rows: list[int] = []
        self._device = device
        self._last = 0.0

    def reset(self) -> None:
        """Forget what was measured."""
        for laps in self.seconds.values():
            laps.clear()
        self.rows.clear()

    def start(self, num_rows: int) -> None:
        """A step of so many requests begins."""
        if self.is_on:
            self.rows.append(num_rows)
            self._last = self._now()

    def lap(self, phase: Phase) -> None:
        """A phase ends."""
        if self.is_on:
            now = self._now()
            self.seconds[phase].append(now - self._last)
            self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
