"""Choosing tokens: penalties, filters and sampling at every node of a draft tree."""

from specmamba.kernels.sampling.torch_ops import penalize, probabilities, sample, uniform

__all__ = ["penalize", "probabilities", "sample", "uniform"]
