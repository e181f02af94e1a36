"""Replay of captured steps on a CPU: a list of native calls, run by one function on threads of its own."""

from specmamba.kernels.replay.lowering import lower
from specmamba.kernels.replay.tape import Tape, Threads, is_available

__all__ = ["Tape", "Threads", "is_available", "lower"]
