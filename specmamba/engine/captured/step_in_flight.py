"""A step between its launch and the read of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specmamba.cuda_graphs import HostRead
from specmamba.draft.drafter import Drafter
from specmamba.engine.request import ChunkState, PrefillRun, Request
from specmamba.verify.result import StepOutput


class ExtendInFlight(NamedTuple):
    """Known tokens that the device may still be running, and what the host does when they were run."""

    runs: Sequence[PrefillRun]
    is_finite: Tensor  # [B] bool: whether the hidden states of each run are
    states: Sequence[ChunkState | None]  # at the ends of the runs; None: there was no slot for a copy


class StepInFlight(NamedTuple):
    """What the host needs to end a step that the device may still be working on."""

    requests: Sequence[Request]  # in order of their rows
    rows: tuple[int, ...]
    output: StepOutput
    read: HostRead  # of the columns of ``output`` that the host reads
    drafter: Drafter  # that took part in it
    learns: bool  # acceptance of these drafts says something about others
    is_usual: bool  # it was replayed as a whole: its time says something about others
    began: float  # time of its launch
    num_nodes: int = 1  # of a tree
    leads: bool = False  # the next step of these requests may be launched before this one was read
    bucket: int = 0  # rows with padding, of a step that was launched before the one before it was read
    extend: ExtendInFlight | None = None  # launched in front of it, and read with it

    def has(self, request_id: str) -> bool:
        """Whether a request takes part, or tokens of it are run in front of the step."""
        extending = () if self.extend is None else [run.request for run in self.extend.runs]
        return any(request.request_id == request_id for request in (*self.requests, *extending))
