"""Exchanges between processes of one machine over memory that they share. See README.md."""

from specmamba.kernels.exchange.native_ops import SUMMED, Count, Exchange, RankGoneError, is_available, num_bytes

__all__ = ["SUMMED", "Count", "Exchange", "RankGoneError", "is_available", "num_bytes"]
