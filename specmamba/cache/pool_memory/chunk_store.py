"""The memory that elastic pools of a GPU share: chunks that are created once, and mapped where they are needed."""

from __future__ import annotations

import math
import weakref

import torch

from specmamba.cache.pool_memory.cuda_driver import CudaDriver


class ChunkStore:
    """Chunks of ``chunk_bytes`` each that nothing is mapped to. All are created here, so none can lack later.

    They go back to the device when the store and all ranges that took from it are gone.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, num_chunks: int) -> None:
        """Take the memory.

        Args:
            driver: of the device.
            device: whose work is waited for before chunks move.
            num_chunks: to create.

        Raises:
            DriverError: there is too little memory.
        """
        self.driver, self.device, self.chunk_bytes = driver, device, driver.granularity
        self._handles: list[int] = []
        weakref.finalize(self, _release, driver, self._handles).atexit = False
        for _ in range(num_chunks):
            self._handles.append(driver.create())
        self._free = self._handles.copy()

    @property
    def num_chunks(self) -> int:
        return len(self._handles)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def whole(self, count: int, *entry_bytes: int) -> int:
        """Round a number of entries up, so that they fill chunks whole in each of the tensors with such entries.

        Layers of so many entries begin with a chunk, and tensors of one pool have equally many.
        """
        step = math.lcm(*(self.chunk_bytes // math.gcd(self.chunk_bytes, each) for each in entry_bytes if each))
        return -(-count // step) * step

    def take(self, count: int) -> list[int]:
        """Take free chunks. Raises RuntimeError: fewer are free, which the arithmetic of the budget excludes."""
        if count > len(self._free):
            raise RuntimeError(f"{count} chunks of memory are needed, and {len(self._free)} are free")
        first = len(self._free) - count
        taken, self._free = self._free[first:], self._free[:first]
        return taken

    def put(self, handles: list[int]) -> None:
        """Return chunks that were unmapped."""
        self._free += handles

    def settle(self) -> None:
        """Wait until the device has done all that was launched on any stream, copies and captured steps included.

        What a thread launches later reads tables that do not name what is unmapped now. This also lets the calls that
        follow find the device's context in a thread that has used none so far.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _release(driver: CudaDriver, handles: list[int]) -> None:
    for handle in handles:
        driver.release(handle)
