"""Who runs: first come, first served, with chunked prefill and preemption of the youngest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.state_pool import StatePool
from specmamba.engine.request import Request
from specmamba.errors import QueueFullError


@dataclass(frozen=True, slots=True)
class Run:
    """Known tokens [start, start + length) of a request, to be run by the next extend."""

    request: Request
    start: int
    length: int


class Scheduler:
    """Requests wait, then extend (their known tokens are run chunk by chunk), then verify until they end.

    A request that is admitted holds a row, a state slot, and KV for all its known tokens and one draft. When KV runs
    out later, the youngest request gives everything back and waits again, ahead of those that never ran; its output
    so far is kept and run again as known tokens.
    """

    def __init__(
        self,
        table: RequestTable,
        kv_pool: KVPool,
        state_pool: StatePool,
        num_slots: int,
        chunk_size: int,
        max_waiting: int,
        on_release: Callable[[int], None],
    ) -> None:
        """Args:
        num_slots: KV positions from a root's on that one step may write.
        on_release: called with a row that is about to be given back.
        """
        self._table, self._kv_pool, self._state_pool = table, kv_pool, state_pool
        self._num_slots, self._chunk_size, self._max_waiting = num_slots, chunk_size, max_waiting
        self._on_release = on_release
        self.waiting: deque[Request] = deque()
        self.extending: list[Request] = []
        self.verifying: list[Request] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            QueueFullError: too many are waiting.
        """
        admissible = min(self._table.num_free_rows, self._state_pool.num_free)  # at the next step; they hardly wait
        if len(self.waiting) - admissible >= self._max_waiting:
            raise QueueFullError(len(self.waiting))
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests in while there is memory for them; strictly in order, so that none is starved."""
        admitted = []
        while self.waiting and self._acquire(self.waiting[0]):
            request = self.waiting.popleft()
            admitted.append(request)
            (self.extending if request.num_to_extend else self.verifying).append(request)
        return admitted

    def next_runs(self) -> list[Run]:
        """The next chunk: the oldest request's tokens, and others' while the padded chunk stays within its size."""
        runs: list[Run] = []
        longest = 0
        for request in self.extending:
            wanted = min(request.num_to_extend, self._chunk_size)
            room = self._chunk_size // (len(runs) + 1)
            if runs and max(longest, wanted) > room:
                break
            longest = max(longest, wanted)
            runs.append(Run(request, request.num_run, wanted))
        return runs

    def finish_runs(self, runs: list[Run]) -> list[Request]:
        """Note that runs are done; returns the requests that are ready to verify now."""
        ready = []
        for run in runs:
            run.request.num_run += run.length
            if run.request.num_to_extend == 0:
                self.extending.remove(run.request)
                self.verifying.append(run.request)
                ready.append(run.request)
        return ready

    def make_room(self) -> None:
        """Give every verifying request KV for its next tree, preempting the youngest when there is none."""
        for request in sorted(self.verifying, key=lambda r: r.sequence_number):
            while request.row is not None and not self._grow(request):
                self.preempt(max((*self.extending, *self.verifying), key=lambda r: r.sequence_number))

    def preempt(self, request: Request) -> None:
        """Take everything back from a request and let it wait again, ahead of the others that wait."""
        self.release(request)
        request.num_run = 0
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def release(self, request: Request) -> None:
        """Free what a request holds, wherever it is; its place in any queue ends."""
        for queue in (self.waiting, self.extending, self.verifying):
            if request in queue:
                queue.remove(request)
        if request.row is not None:
            self._on_release(request.row)
            self._table.release(request.row)
            request.row = None
        if request.slot is not None:
            self._state_pool.free(request.slot, request.request_id)
            request.slot = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.extending or self.verifying)

    def _acquire(self, request: Request) -> bool:
        positions = request.num_tokens + self._num_slots
        if self._table.num_missing_pages(None, positions) > self._kv_pool.allocator.num_free:
            return False
        if not self._table.num_free_rows or not self._state_pool.num_free:
            return False
        request.row = self._table.allocate_row()
        request.slot = self._state_pool.allocate(request.request_id)
        return self._table.ensure(request.held_row, positions)

    def _grow(self, request: Request) -> bool:
        return self._table.ensure(request.held_row, request.root_position + self._num_slots)
