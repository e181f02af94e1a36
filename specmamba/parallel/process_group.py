"""Ranks that exchange tensors by torch.distributed: gloo on CPUs, NCCL on GPUs. Imported where there are several."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn import functional as F

from specmamba.errors import ConfigError
from specmamba.parallel.control import JOIN_TIMEOUT_S
from specmamba.parallel.ranks import Ranks

# A rank that ends closes its connections, and one that stops is found by its missing beats (``control.py``); so this
# only ends an exchange that nothing else ends.
TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(seconds=JOIN_TIMEOUT_S)


class ProcessRanks(Ranks):
    """Processes of one machine in torch.distributed's default group.

    Raises:
        ConfigError: the group cannot be made.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store_file: str | None) -> None:
        """Join the group; waits until all ranks are connected.

        Args:
            rank, size: as for ``Ranks``.
            device: where the tensors are that are exchanged.
            store_file: in which the ranks find each other; None: as the environment says (``torchrun``).
        """
        super().__init__(rank, size)
        if dist.is_initialized():
            raise ConfigError(f"--tp-size {size}: another engine of this process has ranks: close it first")
        self._device = device
        try:
            store = None if store_file is None else FileStore(store_file, size)
            if store is not None:
                store.set_timeout(JOIN_TIMEOUT)
            backend = "nccl" if device.type == "cuda" else "gloo"
            own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
            dist.init_process_group(
                backend, rank=rank, world_size=size, store=store, timeout=JOIN_TIMEOUT, device_id=own
            )
            self.smallest(0)  # initialization ends on one rank while others still connect
            dist.distributed_c10d._set_pg_timeout(TIMEOUT)
        except (RuntimeError, ValueError) as error:
            self.abort()
            line = str(error).splitlines()[0]
            raise ConfigError(f"--tp-size {size}: rank {rank} cannot reach the others: {line}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """As ``Ranks.all_reduce``."""
        summed = x if x.is_contiguous() else x.contiguous()
        dist.all_reduce(summed)
        return summed

    def all_gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """As ``Ranks.all_gather``. Narrower parts travel with padding."""
        most = max(widths)
        own = F.pad(x, (0, most - x.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths]
        dist.all_gather(parts, own)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """As ``Ranks.broadcast``."""
        dist.broadcast(x, 0)
        return x

    def smallest(self, number: int) -> int:
        """As ``Ranks.smallest``."""
        of_all = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(of_all, dist.ReduceOp.MIN)
        return int(of_all)

    def agree(self, what: str, value: str) -> None:
        """As ``Ranks.agree``."""
        digest = list(hashlib.sha256(value.encode()).digest())
        own = torch.tensor(digest, dtype=torch.int64, device=self._device)
        differs = not torch.equal(own, self.broadcast(own.clone()))
        if self.smallest(-int(differs)):
            raise ConfigError(f"--tp-size {self.size}: the ranks differ in {what}: start them alike")

    def close(self) -> None:
        """As ``Ranks.close``."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """As ``Ranks.abort``."""
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
