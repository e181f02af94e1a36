"""The probe through which tools observe steps: times of phases, and the target's logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["draft", "verify", "commit"]


class StepProbe:
    """Seconds of every step by phase while ``is_on``, and a callback for logits. Both are off by default.

    ``rows`` has the number of requests of each step, ``seconds`` one time per phase and step. On a GPU every lap waits
    for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self.on_logits: Callable[[Tensor], None] | None = None  # gets the logits [B, N, V] of every step
        self.seconds: dict[Phase, list[float]] = {"draft": [], "verify": [], "commit": []}
        self.rows: list[int] = []
        self._device = device
        self._last = 0.0

    @property
    def is_watching(self) -> bool:
        """Whether steps must run operator by operator: a captured step calls neither ``lap`` nor ``show``."""
        return self.is_on or self.on_logits is not None

    def reset(self) -> None:
        """Drop all times."""
        for laps in self.seconds.values():
            laps.clear()
        self.rows.clear()

    def start(self, num_rows: int) -> None:
        """Begin a step of ``num_rows`` requests."""
        if self.is_on:
            self.rows.append(num_rows)
            self._last = self._now()

    def lap(self, phase: Phase) -> None:
        """End a phase and store its time."""
        if self.is_on:
            now = self._now()
            self.seconds[phase].append(now - self._last)
            self._last = now

    def show(self, logits: Tensor) -> None:
        """Pass the target's logits [B, N, V] to the callback."""
        if self.on_logits is not None:
            self.on_logits(logits)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
