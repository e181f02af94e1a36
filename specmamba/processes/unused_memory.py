"""Memory that this process holds and does not need: back to the operating system.

Linux alone has the calls with the meaning that is needed here, and glibc the one for freed memory. Elsewhere, and where
the system refuses, nothing happens: all of this only makes a process smaller.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

SYSTEM_PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20  # of Linux on the usual processors, where its pages have 4 KiB
_HUGE_PAGES, _NO_HUGE_PAGES, _JOIN_PAGES = 14, 15, 25  # of <sys/mman.h>; mmap does not name them on every system
_HEAD = re.compile(r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<access>\S{4}) \S+ \S+ \d+ *(?P<file>.*)")
_OWN_PAGES = ("Anonymous", "Private_Dirty", "Swap")  # of a mapping: pages that are not those of its file


def return_freed_memory() -> None:
    """Return freed memory to the system, in every thread's part of the heap. Only glibc has a call for that."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def give_back_pages(address: int, num_bytes: int) -> int:
    """Give back the pages that lie in a range whole. What is read there next is zeros, or the mapped file again.

    Returns:
        The bytes that were given back; 0 where the system has no such call, and the content stays.
    """
    first = -(-address // SYSTEM_PAGE) * SYSTEM_PAGE
    last = (address + num_bytes) // SYSTEM_PAGE * SYSTEM_PAGE
    if last <= first or sys.platform != "linux":
        return 0
    status = _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    return 0 if status else last - first


def end_huge_pages_at(begin: int, end: int, limit: int) -> None:
    """Let the system use huge pages from address ``begin`` on, and none that reaches behind ``end``, up to ``limit``.

    So what is written before ``end`` takes no memory behind it, but for a part of a small page.
    """
    if sys.platform != "linux":
        return
    first, last = -(-begin // SYSTEM_PAGE) * SYSTEM_PAGE, limit // SYSTEM_PAGE * SYSTEM_PAGE
    border = max(first, end // HUGE_PAGE * HUGE_PAGE)
    for start, stop, advice in ((first, border, _HUGE_PAGES), (border, last, _NO_HUGE_PAGES)):
        if stop > start:
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


def join_pages(address: int) -> bool:
    """Put the small pages of ``HUGE_PAGE`` bytes from an address on into one huge page, with what is in them.

    The address is a multiple of it. Nothing happens before Linux 6.1, where the system finds such pages in minutes,
    nor where huge pages are off, which the call alone would not respect, nor where no huge page is free.

    Returns:
        Whether they are one huge page now.
    """
    if sys.platform != "linux" or not _has_huge_pages():
        return False
    return not _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE), _JOIN_PAGES)


def drop_library_pages() -> int:
    """Let go of the pages of programs and libraries that are as in their files. Returns their bytes.

    Most of them were read once, while modules were imported. Those that are used again come back at their next use,
    from the system's page cache, a few microseconds for 64 KiB. A mapping with a single page of its own (relocations,
    data) is left as it is, and so are mapped files without code. No other thread may load a library meanwhile: a
    mapping that gets its relocations right now would lose them.
    """
    if sys.platform != "linux":
        return 0
    try:
        clean = [*_clean_mappings(_loaded_files())]
    except OSError:  # a system without these files, or that forbids them
        return 0
    return sum(num_resident for begin, end, num_resident in clean if give_back_pages(begin, end - begin))


def _loaded_files() -> set[str]:
    """The files of which code is mapped."""
    with Path("/proc/self/maps").open(errors="replace") as lines:
        heads = [head for line in lines if (head := _HEAD.match(line)) is not None]
    return {head["file"] for head in heads if "x" in head["access"] and head["file"].startswith("/")}


def _clean_mappings(files: Container[str]) -> Iterator[tuple[int, int, int]]:
    """Begin, end and resident bytes of private read-only mappings of ``files`` without pages of their own."""
    with Path("/proc/self/smaps").open(errors="replace") as lines:
        head: re.Match[str] | None = None
        num_resident = 0
        for line in lines:  # a head, then lines as "Rss:  4 kB", the last of which is VmFlags
            if (found := _HEAD.match(line)) is not None:
                is_wanted = found["file"] in files and found["access"][1] == "-" and found["access"][3] == "p"
                head = found if is_wanted else None
            elif head is not None:
                name, _, value = line.partition(":")
                if name == "Rss":
                    num_resident = 1024 * int(value.split()[0])
                elif name in _OWN_PAGES and int(value.split()[0]):
                    head = None
                elif name == "VmFlags" and num_resident:
                    yield int(head["begin"], 16), int(head["end"], 16), num_resident


@cache
def _has_huge_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:  # a kernel without them
        return False


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
