"""Ranks that exchange tensors: on CPUs over memory that they share, or by gloo; on GPUs by NCCL.

Imported where there are several. They meet by torch.distributed, which also exchanges what native code does not. What
the host has or wants goes by gloo on GPUs too: it neither waits for kernels nor depends on a GPU that hangs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn import functional as F

from specmamba.errors import ConfigError
from specmamba.kernels.exchange import SUMMED, Count
from specmamba.parallel.control import JOIN_TIMEOUT_S
from specmamba.parallel.ranks import Ranks
from specmamba.parallel.shared_memory import SharedMemory, share

# A rank that ends closes its connections, and one that stops is found by its missing beats (``control.py``); so this
# only ends an exchange that nothing else ends.
TIMEOUT = timedelta(minutes=30)
JOIN_TIMEOUT = timedelta(seconds=JOIN_TIMEOUT_S)
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of torch.distributed, by the device of what is exchanged


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
        self._memory: SharedMemory | None = None  # None: all exchanges are those of torch.distributed
        try:
            store = None if store_file is None else FileStore(store_file, size)
            if store is not None:
                store.set_timeout(JOIN_TIMEOUT)
            own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
            dist.init_process_group(
                BACKENDS[device.type], rank=rank, world_size=size, store=store, timeout=JOIN_TIMEOUT, device_id=own
            )
            self.smallest(0)  # initialization ends on one rank while others still connect
            dist.distributed_c10d._set_pg_timeout(TIMEOUT)
            if device.type == "cpu":
                self._memory = share(rank, size, self._broadcast, self.smallest)
        except (RuntimeError, ValueError) as error:
            self.abort()
            line = str(error).splitlines()[0]
            raise ConfigError(f"--tp-size {size}: rank {rank} cannot reach the others: {line}") from error

    @property
    def is_recordable(self) -> bool:
        """As ``Ranks.is_recordable``: over shared memory alone."""
        return self._memory is not None

    def counts(self) -> Mapping[str, Count] | None:
        """As ``Ranks.counts``."""
        return None if self._memory is None else self._memory.exchange.counts()

    def all_reduce(self, x: Tensor) -> Tensor:
        """As ``Ranks.all_reduce``. Over shared memory ranks are added in order, and rounded once."""
        summed = x if x.is_contiguous() else x.contiguous()
        if self._memory is not None and x.dtype in SUMMED:
            return self._memory.exchange.sum(summed)
        dist.all_reduce(summed)
        return summed

    def all_gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """As ``Ranks.all_gather``. By torch.distributed narrower parts travel with padding."""
        if self._memory is not None:
            return self._memory.exchange.gather(x, widths)
        most = max(widths)
        own = F.pad(x, (0, most - x.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in widths]
        dist.all_gather(parts, own)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """As ``Ranks.broadcast``."""
        if self._memory is not None and x.is_contiguous():
            return self._memory.exchange.broadcast(x)
        return self._broadcast(x)

    @staticmethod
    def _broadcast(x: Tensor) -> Tensor:
        dist.broadcast(x, 0)
        return x

    def tell(self, message: bytes) -> bool:
        """As ``Ranks.tell``."""
        if self._memory is not None:
            self._memory.exchange.tell(message)
        return self._memory is not None

    def told(self, milliseconds: int) -> bytes | None:
        """As ``Ranks.told``."""
        return None if self._memory is None else self._memory.exchange.told(milliseconds)

    def smallest(self, number: int) -> int:
        """As ``Ranks.smallest``."""
        of_all = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(of_all, dist.ReduceOp.MIN)
        return int(of_all)

    def agree(self, what: str, value: str) -> None:
        """As ``Ranks.agree``."""
        digest = list(hashlib.sha256(value.encode()).digest())
        own = torch.tensor(digest, dtype=torch.int64)
        differs = not torch.equal(own, self.broadcast(own.clone()))
        if self.smallest(-int(differs)):
            raise ConfigError(f"--tp-size {self.size}: the ranks differ in {what}: start them alike")

    def end(self) -> None:
        """As ``Ranks.end``.

        Connections of gloo close with the process that ends. Kernels of NCCL do not notice that: they would wait, and
        the host for them, until they are aborted.
        """
        if (memory := self._memory) is not None:
            memory.exchange.end()
        if self._device.type == "cuda" and (group := dist.group.WORLD) is not None:
            group.abort()

    def close(self) -> None:
        """As ``Ranks.close``."""
        self._leave_memory()
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """As ``Ranks.abort``."""
        self._leave_memory()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _leave_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
