"""A process that times steps of an older version, for ``host_time.py``; the older version is on its path.

Uses nothing but what versions since 2026-11-25 have. A line of JSON on standard input is answered by one on standard
output: first {"flags": the keywords of ``LLM``, "stubbed": whether steps do nothing}, then in each line a batch,
{"drafts", "prompts", "max_tokens", "temperature"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.measure.full_batch import Job, run_full_batch

_PR_SET_PDEATHSIG = 1


class _Read:
    """A read of numbers that are there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[list[Any]]:
        """The numbers as nested lists."""
        return [tensor.tolist() for tensor in self._tensors]


class OldStub:
    """Stands for the replay of any version: runs a step of each kind once, and then writes its inputs alone."""

    has_fixed_shapes = True
    is_deferred = False
    seconds = 0.0
    num_unreplayed = 0

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def serve(self, is_serving: bool = True) -> None:
        """As newer versions tell a replay."""

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        clear: Callable[[], object],
        fill: Callable[[], object],
        then: Any = None,
    ) -> Any:
        """The result of the first run of this kind; steps have had a second part since 2026-11-25."""
        fill()
        whole = key, None if then is None else then.key
        if whole not in self._results:
            self._results[whole] = function() if then is None else then.function(function())
        return self._results[whole]

    def read(self, tensors: Sequence[Tensor]) -> _Read:
        """Read tensors of the newest result, as steps do since 2026-11-27."""
        return _Read(tensors)

    def close(self) -> None:
        """Nothing is held."""


def put_stub(graphs: Any) -> None:
    """Let the captured steps of an engine do nothing; their numbers are copied once, as to a GPU."""
    graphs.replay.close()
    graphs.replay = OldStub()
    for columns in vars(graphs.inputs).values():
        if hasattr(columns, "_host") and columns._device is columns._host:
            columns._device = columns._host.clone()


def main() -> None:
    """Answer lines until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the answers
    given = json.loads(sys.stdin.readline())
    llm = LLM(**given["flags"])
    if given["stubbed"]:
        put_stub(llm.engine.runner.graph_runner)
    print("{}", file=output, flush=True)
    for line in sys.stdin:
        print(json.dumps(time_steps(llm, json.loads(line), given["stubbed"])), file=output, flush=True)


def time_steps(llm: LLM, batch: dict[str, Any], is_stubbed: bool) -> dict[str, float]:
    """Mean milliseconds of a step of a full batch, those outside of its replay, and tokens per second."""
    llm.workbench.use_drafts(**batch["drafts"])
    params = SamplingParams(max_tokens=batch["max_tokens"], temperature=batch["temperature"], seed=1, ignore_eos=True)
    stretch = run_full_batch(llm, [Job(tuple(prompt), params) for prompt in batch["prompts"]])
    if not is_stubbed and stretch.host_ms >= stretch.step_ms:
        raise RuntimeError("no step was replayed: this version has no native kernels here")
    speed = stretch.num_tokens / stretch.seconds
    return {"step_ms": stretch.step_ms, "host_ms": stretch.host_ms, "tokens_per_second": speed}


if __name__ == "__main__":
    main()
