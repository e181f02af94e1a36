"""What the C library does with memory that operators free."""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_TRIM_BYTES = 256 << 20
_MMAP_BYTES = 32 << 20  # the most that it takes


def keep_freed_memory() -> bool:
    """Have it keep what it would give back to the system, for the whole process. Whether it does so.

    The results of a step's operators are freed and asked for again at every step. By default glibc gives part of them
    back each time, on other threads than the first more than there: with 32 requests of the demo on an engine thread
    500 page faults a step, 6 % of its time. What has been set by glibc's own environment variables stays. Other C
    libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc" or _is_set_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables
