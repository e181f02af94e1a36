"""How far a result may be from the reference's: what rounding explains, whatever the CPU, and nothing else."""

from __future__ import annotations

import torch

FLOAT32_EPS = torch.finfo(torch.float32).eps


def tolerance(
    dtype: torch.dtype = torch.float32, *, terms: float = 80, roundings: float = 0, magnitude: float = 1
) -> dict[str, float]:
    """``rtol`` and ``atol`` for ``torch.testing.assert_close``.

    Two correct forms of an operator differ for three reasons, and each has its share:

    - The result is rounded to ``dtype`` at the end, perhaps to neighbouring values: eps(dtype) of the result.
    - Values on the way are rounded to ``dtype`` in one form and not in the other, or to neighbouring values: eps(dtype)
      of what they add to the result, for each of the ``roundings``.
    - Sums are formed in float32 in another order: eps(float32) of their largest part, for each of the ``terms``.

    The last two are relative to what is added up, which may be larger than the result where parts cancel: they count
    at the least as for a value of ``magnitude``.

    Args:
        dtype: of inputs and results.
        terms: additions in float32 one after the other, with those of the functions (exp, rsqrt) that are applied.
        roundings: how often values on the way are rounded to ``dtype``, weighted by how much they move the result.
        magnitude: of the parts that are added up.
    """
    eps = torch.finfo(dtype).eps
    on_the_way = roundings * eps + terms * FLOAT32_EPS
    return {"rtol": eps + on_the_way, "atol": on_the_way * magnitude}
