"""Memory that the C library keeps after large bodies, given back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import threading

_one_at_a_time = threading.Lock()


def give_back_memory() -> None:
    """Harmless where the C library has no ``malloc_trim``, and while another thread is at it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and _one_at_a_time.acquire(blocking=False):
        try:
            trim(ctypes.c_size_t(0))
        finally:
            _one_at_a_time.release()


def give_back_memory_later() -> None:
    """The same on a thread, some tenths of a second later: what has just been answered is still in use here."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, loop.run_in_executor, None, give_back_memory)
