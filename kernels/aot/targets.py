"""The GPUs that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One kind of GPU, in Triton's words, and what a block of threads may have there."""

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str
    warp_size: int
    max_shared: int  # bytes of shared memory (AMD: LDS) that one block can be given


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, max_shared=163 * 1024),  # of the 164 KB, 1 KB is the driver's
        Target("sm_90", "cuda", 90, 32, max_shared=227 * 1024),
        Target("gfx942", "hip", "gfx942", 64, max_shared=64 * 1024),
    )
}
