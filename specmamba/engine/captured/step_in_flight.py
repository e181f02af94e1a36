"""A step between its launch and the read of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specmamba.cuda_graphs import HostRead
from specmamba.engine.request import Request
from specmamba.verify.result import StepOutput


class StepInFlight(NamedTuple):
    """What the host needs to end a step that the device may still be working on."""

    requests: Sequence[Request]  # in order of their rows
    rows: tuple[int, ...]
    output: StepOutput
    read: HostRead  # of the columns of ``output`` that the host reads
    skips: bool  # the drafter has no part in it
    learns: bool  # acceptance of these drafts says something about others
    is_usual: bool  # it was replayed as a whole: its time says something about others
    began: float  # time of its launch
    num_nodes: int = 1  # of a tree
    leads: bool = False  # the next step of these requests may be launched before this one was read
    bucket: int = 0  # rows with padding, of a step that was launched before the one before it was read

    def has(self, request_id: str) -> bool:
        """Whether a request takes part."""
        return any(request.request_id == request_id for request in self.requests)
