"""What elastic pools cost: a move of memory from one pool to the other, and a step beside that of fixed pools.

- **Moves**: on an engine in which no request runs, 1, 2, 4 ... slots are gained in place of pages, and as many bytes of
  pages in place of slots. In a move of kind ``free``, what goes is free: nothing is copied. In one of kind ``held``,
  all of it is held, and is copied to lower pages or slots first. ``moved_bytes`` is what the other pool has more,
  ``copied_bytes`` what was copied for it; ``ms`` is the time until the device has done it. On a GPU a move also waits
  for work that was launched before: here there is none. On a CPU the operating system gives memory when it is first
  written, which is no part of a move.
- **Steps**: full batches of 1, and of ``--concurrency``, on an engine with elastic pools, whose memory has moved to and
  fro before, and on one with ``--elastic-pools off``, in turns; ``ratio`` is the one over the other. Both have the
  memory of ``--swing-tokens``, and steps are captured where the flags say so.

The first round of either warms up. Figures are medians over ``--rounds`` others, with their ranges.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.bench.prefix.engines import PrefixBenchConfig, sharing_memory, start_elastic_engine, start_engine
from specmamba.bench.prefix.texts import TextSource
from specmamba.errors import ConfigError
from specmamba.measure.command import in_turns
from specmamba.measure.full_batch import Job, run_full_batch
from specmamba.measure.report import median_with_range, progress_bar
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba import LLM

Pages = NDArray[np.int64]
Pools = Any  # of an engine: ``engine.pools``

OWNER = "benchmark"
PROMPT_TOKENS, STEP_TOKENS = 128, 128  # of each request whose steps are measured
MOST_SLOTS = 64  # of the largest move
KINDS = ("free", "held")
TO = ("states", "pages")


def measure_elastic(config: PrefixBenchConfig, source: TextSource) -> dict[str, Any]:
    """Measure moves, then steps.

    Raises:
        ConfigError: pools are not elastic here, or not in so little memory, or a request does not fit it.
    """
    with sharing_memory(config, config.swing_tokens), start_elastic_engine(config, "elastic") as llm:
        plan = llm.engine.memory_plan
        assert plan.elastic is not None
        sizes = {
            "tokens": config.swing_tokens,
            "rounds": config.rounds,
            "pool_bytes": plan.elastic.pool_bytes,
            "page_bytes": plan.elastic.page_bytes,
            "slot_bytes": plan.elastic.slot_bytes,
            "chunk_bytes": plan.elastic.chunk_bytes,
            "end_bytes": plan.end_bytes,
        }
        moves = measure_moves(llm.engine.pools, config.rounds)
        with start_engine(config, elastic_pools="off") as fixed:
            steps = _measure_steps(config, {"elastic": llm, "fixed": fixed}, source)
    return sizes | {"moves": moves, "steps": steps}


def measure_moves(pools: Pools, num_rounds: int) -> list[dict[str, Any]]:
    """Measure moves between unused elastic pools, which have the sizes of the start afterwards.

    Returns:
        For each kind, size and direction an object of ``to``, ``kind``, ``slots``, ``moved_bytes``, ``copied_bytes``
        and ``ms`` (``median`` and ``range``).
    """
    found: dict[tuple[str, str, int], list[_Move]] = {}
    with torch.inference_mode():
        for number in range(num_rounds + 1):
            for kind in KINDS:
                for count in _counts(pools):
                    for to, move in zip(TO, _there_and_back(pools, count, kind == "held"), strict=True):
                        if number and move is not None:
                            found.setdefault((to, kind, count), []).append(move)
    return [_figures(*which, moves) for which, moves in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class _Move:
    seconds: float
    moved_bytes: int
    copied_bytes: int


def _figures(to: str, kind: str, count: int, moves: list[_Move]) -> dict[str, Any]:
    return {
        "to": to,
        "kind": kind,
        "slots": count,
        "moved_bytes": moves[0].moved_bytes,
        "copied_bytes": moves[0].copied_bytes,
        "ms": median_with_range([1e3 * move.seconds for move in moves], 4),
    }


def _counts(pools: Pools) -> Iterator[int]:
    """Slots of moves: powers of two, as far as a quarter of the pools allows."""
    bounds = pools.split.bounds
    most = min(MOST_SLOTS, bounds.pool_bytes // 4 // bounds.slot_bytes)
    count = 1
    while count <= most:
        yield count
        count *= 2


def _there_and_back(pools: Pools, count: int, is_held: bool) -> tuple[_Move | None, _Move | None]:
    """Move so many slots from KV to states, then back; None where these pools have no memory for it."""
    split = pools.split
    split.restore()
    split.gain_pages(split.spare_bytes // split.bounds.page_bytes, pools.states.num_free)  # so that no memory is spare
    there = _timed(pools, lambda: split.gain_slots(count, 0), _HeldPages(pools) if is_held else None)
    if there is None or there.moved_bytes < count * split.bounds.slot_bytes:
        split.restore()
        return None, None
    num_pages = count * split.bounds.slot_bytes // split.bounds.page_bytes
    back = _timed(pools, lambda: split.gain_pages(num_pages, 0), _HeldSlots(pools, count) if is_held else None)
    split.restore()
    return there, None if back is None or back.moved_bytes < num_pages * split.bounds.page_bytes else back


def _timed(pools: Pools, move: Callable[[], bool], holder: _HeldPages | _HeldSlots | None) -> _Move | None:
    """Time a move while a holder, if there is one, stands on what goes."""
    split = pools.split
    bounds = split.bounds
    if holder is not None:
        split.followers.append(holder)
        holder.hold()
    try:
        before, slots, pages = split.stats, pools.states.num_slots, pools.kv.allocator.num_pages
        _settle(pools)
        began = time.perf_counter()
        has_moved = move()
        _settle(pools)
        seconds = time.perf_counter() - began
        now = split.stats
    finally:
        if holder is not None:
            holder.release()
            split.followers.remove(holder)
    if not has_moved or now.num_moves == before.num_moves:
        return None
    num_slots, num_pages = pools.states.num_slots - slots, pools.kv.allocator.num_pages - pages
    moved = max(num_slots * bounds.slot_bytes, num_pages * bounds.page_bytes)
    copied_pages = (now.moved_tokens - before.moved_tokens) // pools.kv.page_size
    copied = copied_pages * bounds.page_bytes + (now.moved_states - before.moved_states) * bounds.slot_bytes
    return _Move(seconds, moved, copied)


def _settle(pools: Pools) -> None:
    device = pools.states.recurrent.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(eq=False)
class _HeldPages:
    """Holds the upper half of all pages, so that those at the end move."""

    pools: Pools
    pages: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def hold(self) -> None:
        allocator = self.pools.kv.allocator
        pages = np.sort(allocator.allocate(allocator.num_free))
        allocator.release(pages[: len(pages) // 2], pinned=True)
        self.pages = pages[len(pages) // 2 :]

    def release(self) -> None:
        self.pools.kv.allocator.release(self.pages, pinned=True)

    def pages_moved(self, now: Pages) -> None:
        self.pages = now[self.pages]

    def state_moved(self, slot: int, now: int) -> bool:
        return False


@dataclass(eq=False)
class _HeldSlots:
    """Holds the last ``count`` slots, which move to lower ones."""

    pools: Pools
    count: int
    slots: set[int] = field(default_factory=set)

    def hold(self) -> None:
        states = self.pools.states
        slots = [states.reserve(OWNER) for _ in range(states.num_free)]
        for slot in slots[: -self.count]:  # the lowest are given first
            states.free(slot, OWNER)
        self.slots = set(slots[-self.count :])

    def release(self) -> None:
        for slot in self.slots:
            self.pools.states.free(slot, OWNER)

    def pages_moved(self, now: Pages) -> None:
        pass

    def state_moved(self, slot: int, now: int) -> bool:
        if slot not in self.slots:
            return False
        self.slots.remove(slot)
        self.slots.add(now)
        return True


def _measure_steps(config: PrefixBenchConfig, engines: dict[str, LLM], source: TextSource) -> list[dict[str, Any]]:
    sizes = sorted({1, config.concurrency})
    found = []
    with progress_bar("steps", len(sizes) * (config.rounds + 1)) as advance:
        for size in sizes:
            times: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(config.rounds + 1):
                jobs = _jobs(config, source, size, number)
                for name in in_turns(list(engines), number):
                    step_ms = run_full_batch(engines[name], jobs).step_ms
                    engines[name].flush_cache()
                    if number:
                        times[name].append(step_ms)
                advance()
            ratios = [one / other for one, other in zip(times["elastic"], times["fixed"], strict=True)]
            figures = {f"{name}_ms": median_with_range(values, 4) for name, values in times.items()}
            captured = engines["elastic"].workbench.replays_steps
            found.append({"requests": size, "captured": captured, **figures, "ratio": median_with_range(ratios, 4)})
    return found


def _jobs(config: PrefixBenchConfig, source: TextSource, size: int, number: int) -> list[Job]:
    """Requests of one full batch.

    Raises:
        ConfigError: they do not fit the memory.
    """
    draw = random.Random(f"{config.seed}/elastic/{number}")
    if size * (PROMPT_TOKENS + STEP_TOKENS) > config.swing_tokens // 2:
        raise ConfigError(
            f"--swing-tokens {config.swing_tokens}: {size} requests of {PROMPT_TOKENS + STEP_TOKENS} tokens do not "
            "fit half of it: raise it, or lower --concurrency"
        )
    params = SamplingParams(max_tokens=STEP_TOKENS, temperature=0.0, ignore_eos=True)
    return [Job(source.cut(PROMPT_TOKENS, draw), params) for _ in range(size)]
