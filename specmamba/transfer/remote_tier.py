"""Prompts of a decode server's requests, at the prefill servers that compute them: a tier that is only read."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specmamba.cache.tiers.entry import Buffers, Entry, EntryLayout
from specmamba.cache.tiers.entry_index import Change, Stored
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier import Load, TierName, WritePolicy
from specmamba.cache.tiers.tier_stats import TierCounts, TierMiss, TierStats
from specmamba.transfer.failure_log import FailureLog
from specmamba.transfer.handoff_stats import HandoffCounts, HandoffStats
from specmamba.transfer.peer_link import LinkError
from specmamba.transfer.transport import Connection, Transport
from specmamba.transfer.wanted import Source, Wanted

logger = logging.getLogger("specmamba")

MAX_PULLS = 64  # under way; further ones begin when one of them has ended
GIVE_UP_S = 10.0  # to tell a prefill server that a prompt is not wanted
MAX_BYTES_IN_FLIGHT = 1 << 30  # of these; a single prompt may be larger


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt that a request has not asked for yet."""

    request_id: str
    source: Source
    text: str  # its hash, as ``Wanted`` has it
    deadline: float  # of ``time.monotonic()``, after which the request does without


class RemoteTier:
    """What prefill servers have for the requests of this server. ``Tier`` has the contract.

    All calls come from the engine's thread; each pull has a thread of its own, which waits for the prefill server. What
    is expected counts as one entry, which begins where the pools end.
    """

    name: TierName = "remote"
    outlives = False
    policy: WritePolicy | None = None

    def __init__(self, layout: EntryLayout, transport: Transport, timeout_s: float) -> None:
        """Expect nothing yet.

        Args:
            layout: of the engine's entries.
            transport: to the prefill servers.
            timeout_s: how long a request waits for its prompt, from its arrival on.
        """
        self.layout, self._transport, self._timeout_s = layout, transport, timeout_s
        self._expected: dict[bytes, list[tuple[Expected, Stored]]] = {}  # by the key of the whole prompt
        self._key_of: dict[str, bytes] = {}  # by request
        self._lock = threading.Lock()  # guards the field below
        self._open: dict[Load, Connection] = {}  # pulls that have connected
        self._num_pulls = self._bytes_in_flight = 0
        self._counts, self.counts = TierCounts(), HandoffCounts()
        self._failures = FailureLog()

    # ---- for the engine ----------------------------------------------------------------------------------------------

    def expect(self, request_id: str, source: Source, text: PrefixHasher, shared_hash: str) -> None:
        """Note that a request's prompt is, or will be, at a prefill server.

        Args:
            request_id: of the request, once.
            source: the room.
            text: hasher of the prompt but for its last token, as ``find`` gets it.
            shared_hash: of the same text, under the key that the servers share, in hex.
        """
        end = text.num_tokens
        key = text.digest(end)
        sizes = end * self.layout.token_bytes, self.layout.state_bytes
        stored = Stored(self.layout.fingerprint, key, b"", 0, end, *sizes, nbytes=sum(sizes), used=0)
        expected = Expected(request_id, source, shared_hash, time.monotonic() + self._timeout_s)
        self._expected.setdefault(key, []).append((expected, stored))
        self._key_of[request_id] = key

    def dismiss(self, request_id: str) -> None:
        """Expect no prompt for a request any more; one that was not asked for is not held for it either."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return
        waiting = self._expected.get(key, [])
        own = next((pair for pair in waiting if pair[0].request_id == request_id), None)
        if own is not None:
            self._remove(key, own)
            self._start(lambda: self._give_up(own[0]))

    def handoff_stats(self) -> HandoffStats:
        """Return the counts of handoffs."""
        return self.counts.stats(self._num_pulls)

    # ---- for PrefixTiers ---------------------------------------------------------------------------------------------

    def look(self, text: PrefixHasher) -> None:
        """Do nothing: ``find`` knows what is expected."""

    def find(self, text: PrefixHasher) -> list[Stored]:
        """Return the prompt that this text is, if one is expected."""
        if not self._expected:
            return []
        waiting = self._expected.get(text.digest(text.num_tokens))
        return [waiting[0][1]] if waiting else []

    def has(self, key: bytes) -> bool:
        """Return False: nothing stays here."""
        return False

    def held(self) -> list[bytes]:
        """Return nothing: it is held by other processes."""
        return []

    def get(self, key: bytes) -> Entry | None:
        """Return None: it is held by other processes."""
        return None

    def forget(self) -> None:
        """Do nothing: it is held by other processes."""

    def changes(self, most: int) -> list[Change]:
        """Return nothing: nothing stays here."""
        return []

    def learn(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Do nothing: nothing stays here."""

    def why_absent(self, text: PrefixHasher) -> TierMiss | None:
        """Return None: most requests have no prompt elsewhere."""
        return None

    def note_use(self, chain: Sequence[Stored]) -> None:
        """Do nothing: nothing stays here."""

    def load(self, chain: Sequence[Stored], known: int = 0) -> Load | None:
        """Begin to pull a prompt, without the KV of its first ``known`` tokens."""
        key = chain[-1].key
        own = self._expected[key][0]
        expected = own[0]
        stored = replace(own[1], start=known, token_bytes=(own[1].end - known) * self.layout.token_bytes)
        load = Load([stored], max(0.0, expected.deadline - time.monotonic()))
        if self._num_pulls and (
            self._num_pulls >= MAX_PULLS or self._bytes_in_flight + load.nbytes > MAX_BYTES_IN_FLIGHT
        ):
            return None
        self._remove(key, own)
        self._num_pulls += 1
        self._bytes_in_flight += load.nbytes
        if not self._start(lambda: self._end(load, expected)):
            load.end("no_room")
        return load

    def release(self, load: Load) -> None:
        """Count a pull no more; where it goes on it is given up."""
        load.is_over = True
        self._num_pulls -= 1
        self._bytes_in_flight -= load.nbytes
        with self._lock:
            connection = self._open.get(load)
            if connection is not None:
                connection.hang_up()

    def allocate(self, num_tokens: int, parent: bytes) -> Buffers | None:
        """Return None: nothing is written here."""
        return None

    def put(self, entry: Entry) -> None:
        """Raise: nothing is written here, and ``allocate`` gives no memory for it."""
        raise NotImplementedError

    def wait_to_put(self, num_tokens: int, timeout_s: float) -> bool:
        """Return True: nothing is written here."""
        return True

    def waiting(self) -> set[bytes]:
        """Return nothing: nothing is written here."""
        return set()

    def count_hit(self, load: Load, num_tokens: int) -> None:
        """Count a prompt that is in the pools now."""
        seconds = time.monotonic() - load.began
        self._counts.hit(num_tokens, load.nbytes, seconds)
        self.counts.add(load.nbytes, seconds)

    def count_miss(self, reason: TierMiss) -> None:
        """Count a prompt that has not come."""
        self._counts.misses[reason] += 1
        self.counts.fail(reason)

    def stats(self) -> TierStats:
        """Return counts since the start."""
        return self._counts.stats(len(self._key_of), 0, 0, self._bytes_in_flight)

    def describe_line(self) -> str:
        """Return a line for the report at start."""
        return f"prompts from prefill servers, each waited for {self._timeout_s:g} s at the most"

    def drain(self) -> bool:
        """Return True: nothing is written here."""
        return True

    def close(self) -> None:
        """Give up what is under way."""
        self._transport.close()
        with self._lock:
            for connection in self._open.values():
                connection.hang_up()

    def _remove(self, key: bytes, own: tuple[Expected, Stored]) -> None:
        self._expected[key].remove(own)
        if not self._expected[key]:
            del self._expected[key]

    @staticmethod
    def _start(job: Callable[[], None]) -> bool:
        """Do a job on a thread; False: the system has none left, which must not end the engine."""
        # a daemon, so that a prefill server that does not answer cannot keep the process from exiting
        thread = threading.Thread(target=job, name="specmamba-pull", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("no thread for a prompt at a prefill server")
            return False
        return True

    # ---- threads of pulls --------------------------------------------------------------------------------------------

    def _end(self, load: Load, expected: Expected) -> None:
        result: tuple[Entry, ...] | TierMiss = "unreadable"
        try:
            result = self._pull(load, expected)
        except Exception:  # its request must not wait
            logger.exception("a prompt cannot be read from a prefill server")
        is_unwanted = load.is_over
        if isinstance(result, str) and not is_unwanted:
            self._failures.tell(expected.source, result)
        load.end(result)
        if is_unwanted and isinstance(result, str):
            self._give_up(expected)  # the prefill server may not have been asked yet

    def _pull(self, load: Load, expected: Expected) -> tuple[Entry, ...] | TierMiss:
        stored = load.chain[0]
        left = max(0.0, expected.deadline - time.monotonic())
        fingerprint = self.layout.fingerprint.hex()
        wanted = Wanted(expected.source.room, expected.text, fingerprint, stored.start, stored.end, left)
        try:
            connection = self._transport.connect(expected.source, expected.deadline)
        except LinkError as error:
            return error.reason
        try:
            with self._lock:
                self._open[load] = connection
            if load.is_over:
                return "slow"
            connection.poll(wanted)
            return (connection.read(wanted, self.layout),)
        except LinkError as error:
            return error.reason
        except MemoryError:
            return "no_room"
        finally:
            with self._lock:
                del self._open[load]
            connection.close()

    def _give_up(self, expected: Expected) -> None:
        """Tell the prefill server that a prompt is not wanted. Where it is not reached it holds it for its time."""
        try:
            connection = self._transport.connect(expected.source, time.monotonic() + GIVE_UP_S)
        except LinkError:
            return
        try:
            connection.abort(expected.source.room)
        except LinkError:
            return
        finally:
            connection.close()
