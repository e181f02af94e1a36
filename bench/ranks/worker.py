"""A process with one engine, perhaps rank 0 of several, which decodes and counts what this rank exchanges.

Requests are those of ``llama_cpp/worker.py``, and "decode".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specmamba import SamplingParams
from specmamba.bench.llama_cpp.worker import Fields, Worker, main
from specmamba.errors import SpecmambaError

KINDS = ("all_reduce", "all_gather", "broadcast")  # methods of an engine's ranks, each with a tensor first


@dataclass(slots=True)
class Exchanged:
    """Exchanges of one kind."""

    calls: int = 0
    nbytes: int = 0  # of this rank's tensors; of parts that are joined, those of the widest part
    seconds: float = 0.0  # in them, with the time in which this rank waits for the others

    def since(self, before: Exchanged) -> Exchanged:
        """What was added."""
        return Exchanged(self.calls - before.calls, self.nbytes - before.nbytes, self.seconds - before.seconds)


class Exchanges:
    """Counts of all exchanges of an engine's ranks.

    Those over shared memory are counted where they are made, in captured steps too. For others the methods of the
    object are replaced, for this process only.
    """

    def __init__(self, ranks: Any) -> None:
        """``ranks``: of the engine, whose layers call the methods that are replaced here."""
        self._counts: Callable[[], Mapping[str, Any] | None] = ranks.counts
        self.is_over_memory = self._counts() is not None
        self.by_kind = {kind: Exchanged() for kind in KINDS}
        for kind in KINDS if not self.is_over_memory else ():
            setattr(ranks, kind, self._counted(getattr(ranks, kind), self.by_kind[kind]))

    def snapshot(self) -> dict[str, Exchanged]:
        """The counts until now."""
        if (found := self._counts()) is not None:
            return {kind: Exchanged(*found[kind]) for kind in KINDS}
        return {kind: Exchanged(**asdict(counts)) for kind, counts in self.by_kind.items()}

    @staticmethod
    def _counted(exchange: Callable[..., Any], counts: Exchanged) -> Callable[..., Any]:
        def counted(x: Any, *others: Any) -> Any:
            nbytes = x.nbytes if not others else x.nbytes // x.shape[-1] * max(others[0])
            began = time.perf_counter()
            result = exchange(x, *others)
            counts.seconds += time.perf_counter() - began
            counts.calls += 1
            counts.nbytes += nbytes
            return result

        return counted


class RankWorker(Worker):
    """The engine and what is asked of it. All methods raise SpecmambaError."""

    def load(self, flags: Fields) -> Fields:
        """As ``Worker.load``."""
        facts = super().load(flags)
        ranks = self.llm.engine.ranks
        self._exchanges = Exchanges(ranks) if ranks.size > 1 else None
        return facts | {"ranks": ranks.size, "dtype": self.llm.engine.describe()["dtype"]}

    def decode(self, prompts: list[list[int]], max_tokens: int) -> Fields:
        """Continue prompts together, greedily, and time the steps after the one that gives the last first token.

        Returns:
            {"tokens", "steps", "seconds"} of these steps, "exchanges", the fields of ``Exchanged`` by kind, and
            "is_over_memory": whether they go over shared memory.
        """
        engine, exchanges = self.llm.engine, self._exchanges
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"bench-{number}", prompt, params)
        waiting = {f"bench-{number}" for number in range(len(prompts))}
        while waiting:
            waiting -= {delta.request_id for delta in engine.step() if delta.token_ids}
        before, began = exchanges.snapshot() if exchanges else {}, time.perf_counter()
        tokens = steps = 0
        while engine.has_unfinished_requests:
            for delta in engine.step():
                if delta.error is not None:
                    raise SpecmambaError(delta.error)
                tokens += len(delta.token_ids)
            steps += 1
        seconds = time.perf_counter() - began
        after = exchanges.snapshot() if exchanges else {}
        found = {kind: asdict(after[kind].since(before[kind])) for kind in after}
        is_over_memory = exchanges is not None and exchanges.is_over_memory
        counts = {"tokens": tokens, "steps": steps, "seconds": seconds}
        return {**counts, "exchanges": found, "is_over_memory": is_over_memory}


if __name__ == "__main__":
    main(RankWorker())
