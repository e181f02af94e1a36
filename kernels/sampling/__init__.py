"""Choosing tokens: penalties, filters, drawing and accepting at every node of a draft tree."""

from specmamba.kernels.sampling.torch_ops import penalize, probabilities, sample, uniform
from specmamba.kernels.sampling.torch_rejection import draw_children, residual_choice, sibling_rank

# What random numbers are for; the counters of a stream are its user's.
CHOICE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, SYNTHETIC_STREAM = range(4)

__all__ = [
    "ACCEPT_STREAM",
    "CHOICE_STREAM",
    "DRAFT_STREAM",
    "SYNTHETIC_STREAM",
    "draw_children",
    "penalize",
    "probabilities",
    "residual_choice",
    "sample",
    "sibling_rank",
    "uniform",
]
