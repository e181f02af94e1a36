"""Captured steps that do nothing, to time the host's part of a step on a device that works by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specmamba.cuda_graphs import EagerReplay, NextPart
from specmamba.engine.captured.graph_runner import StepGraphRunner
from specmamba.engine.captured.step_inputs import StepInputs
from specmamba.verify.result import StepOutput


class StubbedReplay(EagerReplay[StepOutput]):
    """Runs a step of each kind once; from then on its numbers are there at once, whatever is asked.

    The engine does all that it does beside a GPU: it writes and copies inputs, counts, ends, and makes texts, of which
    all steps of a kind decide the same tokens.
    """

    is_deferred = True

    def __init__(self, is_chained: bool) -> None:
        """``is_chained``: a step may be launched before the one before it was read."""
        super().__init__(has_fixed_shapes=True)
        self._is_chained = is_chained
        self._results: dict[Hashable, StepOutput] = {}
        self.num_stubbed = 0  # steps so far that did nothing

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object] | None,
        then: NextPart | None = None,
    ) -> StepOutput:
        whole = key, None if then is None else then.key
        if whole not in self._results:
            self._results[whole] = super().run(key, function, clear, fill, then)
        else:
            self.num_stubbed += 1
            if fill is not None:
                fill()
        return self._results[whole]

    def may_follow(self, key: Hashable, then: NextPart) -> bool:
        return self._is_chained and (key, then.key) in self._results


@contextmanager
def stubbed(graphs: StepGraphRunner, is_chained: bool) -> Iterator[StubbedReplay]:
    """Let the captured steps of an idle engine on a CPU do nothing, but for the first one of a kind.

    What it puts out means nothing, and what it leaves in a prefix cache neither.
    """
    replay, inputs = graphs.replay, graphs.inputs
    trees, max_nodes = inputs.trees, inputs.forced_output_ids.shape[1]
    graphs.replay = stub = StubbedReplay(is_chained)
    graphs.inputs = StepInputs(graphs.buckets[-1], max_nodes, torch.device("cpu"), is_mirrored=True)
    graphs.inputs.trees = trees
    try:
        yield stub
    finally:
        graphs.replay, graphs.inputs = replay, inputs
