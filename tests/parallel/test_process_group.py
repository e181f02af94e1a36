"""The group of ranks on GPUs: NCCL for tensors there, gloo for what the host has, and an end that waits for nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specmamba.errors import ConfigError
from specmamba.parallel import process_group
from specmamba.parallel.process_group import ProcessRanks


class FakeGroup:
    """In place of the group of all ranks."""

    def __init__(self) -> None:
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ProcessRanks, dict[str, Any]]]:
    """One rank of a GPU that is not there, whose group has the part for the host alone; and what it was made with."""
    given, make = dict[str, Any](), dist.init_process_group

    def make_for_host(backend: str, **settings: Any) -> None:
        given.update(settings, backend=backend)
        make(dict(part.split(":") for part in backend.split(","))["cpu"], **settings | {"device_id": None})

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "init_process_group", make_for_host)
    ranks = ProcessRanks(0, 1, torch.device("cuda"), str(tmp_path / "store"))
    yield ranks, given
    ranks.close()


def test_tensors_of_a_gpu_go_by_nccl_and_what_the_host_has_by_gloo(
    on_gpu: tuple[ProcessRanks, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers and digests are no tensors of the device, which this machine may not even have."""
    ranks, given = on_gpu
    assert given["backend"] == "cpu:gloo,cuda:nccl"
    assert given["device_id"] == torch.device("cuda", 3)  # the rank's own
    assert given["timeout"] == process_group.JOIN_TIMEOUT
    assert not ranks.is_recordable
    assert ranks.smallest(7) == 7
    ranks.agree("flags", "the same")
    monkeypatch.setattr(ranks, "smallest", lambda number: -1)  # as if another rank had other flags
    with pytest.raises(ConfigError, match="--tp-size 1: the ranks differ in flags: start them alike"):
        ranks.agree("flags", "others")


def test_kernels_that_wait_for_a_lost_rank_are_aborted(
    on_gpu: tuple[ProcessRanks, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the thread that watches the ranks; on a CPU the connections that close are enough."""
    ranks, group = on_gpu[0], FakeGroup()
    with monkeypatch.context() as patch:
        patch.setattr(dist.distributed_c10d._world, "default_pg", group)
        watcher = threading.Thread(target=ranks.end)
        watcher.start()
        watcher.join(60)
        assert group.num_aborts == 1
        patch.setattr(ranks, "_device", torch.device("cpu"))
        ranks.end()
        assert group.num_aborts == 1


@pytest.mark.gpu
def test_one_rank_exchanges_on_a_gpu(tmp_path: Path) -> None:
    """What goes by NCCL and what goes by gloo, the second while the GPU is busy; the group can be made again."""
    device = torch.device("cuda")
    for attempt in range(2):
        ranks = ProcessRanks(0, 1, device, str(tmp_path / f"store-{attempt}"))
        try:
            x = torch.arange(12, device=device, dtype=torch.bfloat16).view(3, 4)
            assert torch.equal(ranks.all_reduce(x.clone()), x)
            assert torch.equal(ranks.all_reduce(x.t()), x.t())
            assert torch.equal(ranks.all_gather(x, (4,)), x)
            assert torch.equal(ranks.broadcast(x.clone()), x)
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(1 << 30)
            ended.record()
            assert ranks.smallest(5) == 5
            ranks.agree("flags", "x")
            assert not ended.query()
            torch.cuda.synchronize()
        finally:
            if attempt:
                ranks.end()
                ranks.abort()
            else:
                ranks.close()
        assert not dist.is_initialized()
