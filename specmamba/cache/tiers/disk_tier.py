"""Entries on disk: found by their prefixes, loaded, written and evicted by threads of their own."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from specmamba.cache.tiers.codec import EntryError, encode, encoded_bytes, read_entry
from specmamba.cache.tiers.entry import Entry, EntryLayout
from specmamba.cache.tiers.entry_folder import EntryFile, EntryFolder
from specmamba.cache.tiers.entry_index import Name, Stored
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.threaded_tier import CLOSE_S, ThreadedTier
from specmamba.cache.tiers.tier import Load, WritePolicy
from specmamba.cache.tiers.tier_stats import LostWrite, TierMiss, TierStats

logger = logging.getLogger("specmamba")

SCAN_INTERVAL_S = 2.0  # between two looks for what other processes have written
CLOCK_STEP_NS = 10**9  # a file that was used later than this from now was used before the clock went back


class DiskTier(ThreadedTier):
    """The entries of one layout in a folder that other processes, and other models, may use too.

    Whatever is wrong with the disk is counted, and is a miss or a write that is lost.
    """

    def __init__(
        self,
        path: Path,
        layout: EntryLayout,
        max_bytes: int,
        max_tokens: int,
        policy: WritePolicy = "write_through",
    ) -> None:
        """Read the headers of all entries.

        Args:
            path: of the folder; made if need be.
            layout: of this engine's entries.
            max_bytes: of all files. What was used longest ago is removed for what is new.
            max_tokens: of a segment that is read.
            policy: as ``Tier`` has it.

        Raises:
            ConfigError: the folder cannot be used.
        """
        super().__init__("disk", layout, max_bytes, policy)
        self._folder, self.secret = EntryFolder.open(path)
        self._max_tokens = max_tokens
        self._scanned, self._seen = 0.0, -1
        self._will_scan = False  # a look for what other processes have written waits or runs
        with suppress(OSError):
            self._folder.remove_leftovers()
        self._scan()

    def find(self, text: PrefixHasher) -> list[Stored]:
        """Return the entries that hold the longest beginning of a text, those that are being written included."""
        if self._is_scan_due and not self._will_scan:  # one at a time: the disk may not answer for long
            self._will_scan = True  # before the reader can have done it
            if not self._reader.put(self._scan_in_turn, 0):
                self._will_scan = False
        with self._lock:
            return self._index.find(self.layout.fingerprint, text)

    def why_absent(self, text: PrefixHasher) -> TierMiss:
        """Return why ``find`` finds nothing: "fingerprint" if other models or settings have entries of the text."""
        with self._lock:
            others = self._index.fingerprints - {self.layout.fingerprint}
        for fingerprint in others:
            text.restart()
            with self._lock:
                if self._index.find(fingerprint, text):
                    return "fingerprint"
        return "absent"

    def stats(self) -> TierStats:
        """Return sizes now and counts since the start."""
        in_flight = self._reader.num_bytes + self._writer.num_bytes
        with self._lock:
            return self._counts.stats(len(self._index), self._index.num_bytes, self._max_bytes, in_flight)

    def describe_line(self) -> str:
        """Return a line for the report at start."""
        stats, gib = self.stats(), 1 << 30
        return (
            f"prefixes on disk: {stats.num_entries} entries in {stats.num_bytes / gib:.2f} GiB of "
            f"{stats.max_bytes / gib:.2f}, {self.policy}"
        )

    def close(self) -> None:
        """Write what was put, and end the threads; a disk that does not answer is left alone after ``CLOSE_S``."""
        if not self._writer.close(CLOSE_S):
            logger.warning("--hicache-storage-dir: the disk does not answer, and the newest prefixes are not on it")
        self._reader.close(0.0)

    # ---- on the reader's thread --------------------------------------------------------------------------------------

    def _read_chain(self, load: Load) -> tuple[Entry, ...] | TierMiss:
        entries: list[Entry] = []
        for stored in load.chain:
            try:
                entries.append(self._read_one(stored, with_state=stored is load.chain[-1]))
            except FileNotFoundError:
                self._forget(stored)
                return "vanished"
            except EntryError as error:
                self._drop(stored, error)
                return error.fault
            except (OSError, MemoryError) as error:
                logger.warning("an entry of the prefix cache cannot be read: %s", error)
                return "unreadable"
        self._touch(load.chain)
        return tuple(entries)

    def _read_one(self, stored: Stored, with_state: bool) -> Entry:
        if (coming := self._coming.get(stored.key)) is not None:
            return coming
        with self._folder.read(stored.name) as stream:
            entry = read_entry(stream, self.layout, self._max_tokens, with_state)
        if entry.key != stored.key:
            raise EntryError("damaged", "it is another entry than its name says")
        if (entry.parent, entry.start, entry.end) != (stored.parent, stored.start, stored.end):
            self._forget(stored)
            self._look_for(stored.key)
            raise FileNotFoundError("another engine has stored this text in other segments")
        return entry

    def _touch(self, chain: Sequence[Stored]) -> None:
        for stored in chain:
            stored.used = time.time_ns()
            with suppress(OSError):
                self._folder.touch(stored.name)

    def _drop(self, stored: Stored, error: EntryError) -> None:
        """Remove a file that is not what it was, so that it is found by no request any more."""
        logger.warning("an entry of the prefix cache is not used: %s", error)
        self._forget(stored)
        if error.fault == "damaged":
            with self._lock:
                self._counts.damaged += 1
            with suppress(OSError):
                self._folder.remove(stored.name)

    @property
    def _is_scan_due(self) -> bool:
        return time.monotonic() - self._scanned > SCAN_INTERVAL_S

    def _scan_in_turn(self) -> None:
        try:
            self._scan_if_due()
        finally:
            self._will_scan = False

    def _scan_if_due(self) -> None:
        """Scan the folder unless that was done a short time ago, or no file has come or gone since."""
        if not self._is_scan_due:
            return
        self._scanned = time.monotonic()
        with suppress(OSError):
            changed = self._folder.changed()
            # the clock of files has steps, so a change may come after a look and have its time
            if changed != self._seen or abs(time.time_ns() - changed) < 10**9:
                self._scan()

    def _scan(self) -> None:
        """Make the index what the folder is now: other processes write and remove files too.

        What was put, or written to the end, since the listing began may be missing in it, and stays.
        """
        with self._lock:
            written = [stored for stored in self._index if stored.key not in self._coming]
        try:
            self._seen = self._folder.changed()
            files = {file.name: self._used_by_now(file) for file in self._folder.list()}
        except OSError:
            files = {}  # the folder is gone
        with self._lock:
            self._index.limit_use(time.time_ns())
            for stored in written:
                file = files.get(stored.name)
                # of another size: another engine has stored this text in other segments
                if (file is None or file.nbytes != stored.nbytes) and self._index.get(stored.name) is stored:
                    self._index.remove(stored.name)
            for name, found in files.items():
                if (known := self._index.get(name)) is not None:
                    known.used = max(known.used, found.used)
            unknown = [found for name, found in files.items() if self._index.get(name) is None]
        for found in unknown:
            self._read_header(found)

    def _used_by_now(self, file: EntryFile) -> EntryFile:
        """Let a file that was used before the clock went back count as used now: else it would leave after all others.

        It gets the time of now, since other processes, and later ones, read it too.
        """
        now = time.time_ns()
        if file.used <= now + CLOCK_STEP_NS:
            return file
        with suppress(OSError):
            self._folder.touch(file.name)
        return replace(file, used=now)

    def _look_for(self, key: bytes) -> None:
        name: Name = (self.layout.fingerprint, key)
        with suppress(OSError):  # it is not there (any more)
            self._read_header(self._used_by_now(self._folder.described(name)))

    def _read_header(self, file: EntryFile) -> None:
        """Add a file to the index; one that is damaged is removed, one of another format counts and is not used."""
        fingerprint, key = file.name
        stored = Stored(fingerprint, key, b"", 0, 0, 0, 0, file.nbytes, file.used)
        try:
            header, nbytes = self._folder.header(file.name)
            stored = Stored.of(header, nbytes, file.used)
        except OSError:
            return
        except EntryError as error:
            if error.fault == "damaged":
                self._drop(stored, error)
                return
        with self._lock:
            if self._index.get(file.name) is None:
                self._index.add(stored)

    # ---- on the writer's thread --------------------------------------------------------------------------------------

    def _write(self, entry: Entry, stored: Stored) -> None:
        lost: LostWrite | None = "failed"
        try:
            if self._make_room(stored):
                file = self._folder.write(stored.name, encode(entry))
                lost = None
            else:
                lost = "too_large"
        except OSError as error:
            logger.warning("a prefix cannot be written to disk: %s", error.strerror)
            lost = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "failed"
        finally:
            if lost is not None:
                self._give_up(entry, stored, lost)
        if lost is None:
            with self._lock:
                self._came(entry)
                stored.used = file.used
                self._counts.writes += 1
                self._counts.written_bytes += file.nbytes

    def _make_room(self, new: Stored) -> bool:
        """Remove entries until a new one fits beside those that are left; False if it cannot."""
        self._scan_if_due()  # others write into the same budget
        while True:
            with self._lock:
                waiting = sum(encoded_bytes(entry) for key, entry in self._coming.items() if key != new.key)
                if self._index.num_bytes - waiting <= self._max_bytes:
                    return True
                victim = self._index.oldest({(self.layout.fingerprint, key) for key in self._coming})
                if victim is None:
                    return False
                self._index.remove(victim.name)
                self._counts.evictions += 1
            self._folder.remove(victim.name)
