"""Elastic pools: how far each of the two may grow, and where they have to stay as they are."""

from __future__ import annotations

import logging
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from specmamba.cache.memory.demand import Demand, largest_fitting
from specmamba.cache.pool_memory.cuda_driver import driver_of
from specmamba.cache.shapes import CacheShape
from specmamba.config import EngineConfig
from specmamba.processes.unused_memory import SYSTEM_PAGE

logger = logging.getLogger("specmamba")

FEWEST_SLOTS = 1  # of the state pool where KV has all other memory: a request that runs alone
MAX_WASTE = 0.03  # of the pools, in the chunks of a GPU's memory at the ends of layers: above it, they keep their sizes


@dataclass(frozen=True, slots=True)
class SplitBounds:
    """What KV and states share. The padding page and the padding slot are not in it."""

    pool_bytes: int  # that pages and slots may take together
    page_bytes: int
    slot_bytes: int
    most_pages: int  # the pool is made for so many, and takes memory for those that it has
    most_state_slots: int
    chunk_bytes: int = 0  # of memory that is mapped into the pools; 0: the system gives memory to what is written

    def fits(self, num_pages: int, num_slots: int) -> bool:
        """Whether there can be so many pages and slots at the same time."""
        num_bytes = num_pages * self.page_bytes + num_slots * self.slot_bytes
        return num_pages <= self.most_pages and num_slots <= self.most_state_slots and num_bytes <= self.pool_bytes


def elastic_chunk(config: EngineConfig, shape: CacheShape, device: torch.device) -> int | None:
    """Return the bytes of the chunks in which elastic pools take memory from each other; None: the pools are fixed.

    0: the operating system gives memory to what is written, on a CPU.
    """
    if (reason := why_fixed(config, shape, device.type)) is not None:
        if config.elastic_pools == "on":
            logger.warning("--elastic-pools on: KV and states keep their sizes: %s", reason)
        return None
    if device.type == "cpu":
        return 0
    driver = driver_of(device)
    return None if driver is None else driver.granularity


def why_fixed(config: EngineConfig, shape: CacheShape, device_type: str) -> str | None:
    """Return why the pools keep their sizes; None: they are elastic."""
    given = [name for name in ("max_total_tokens", "max_mamba_cache_size") if getattr(config, name) is not None]
    if config.elastic_pools == "off":
        return "--elastic-pools off"
    if not shape.kv_bytes_per_token or not shape.state_bytes_per_slot:
        return "the model has only one of keys and values and recurrent states"
    if given:
        return f"--{given[0].replace('_', '-')} sets a size"
    if device_type == "cuda" and config.elastic_pools == "auto":
        return "on a GPU --elastic-pools on lets them share memory, which has not been measured there"
    if device_type == "cuda" and torch.version.hip is not None:
        return "only NVIDIA's driver maps memory into a pool, not that of AMD GPUs"
    if device_type not in ("cpu", "cuda") or sys.platform != "linux":
        return "only Linux gives back a part of a pool"
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY or _is_strict():
        return "address space is limited on this system"
    return None


def _is_strict() -> bool:
    """Whether the system counts memory that is reserved and not used."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def reserve_tables(demand: Demand, budget_bytes: int, chunk_bytes: int) -> Demand:
    """Return a demand whose tables and pools' ends have room for the most pages that KV can grow to.

    ``chunk_bytes``: as ``elastic_chunk`` has it.
    """
    with_ends = demand.with_ends(chunk_bytes or SYSTEM_PAGE)
    fewest = with_ends.fewest_pages

    def fits(num_pages: int) -> bool:
        return with_ends.total_bytes(num_pages, FEWEST_SLOTS) <= budget_bytes

    most = largest_fitting(range(fewest, max(fewest, demand.most_pages) + 1), fits) or fewest
    reserved = with_ends.for_pages(most)
    return reserved if reserved.fewest_bytes <= budget_bytes else demand


def bounds_of(
    demand: Demand, budget_bytes: int, num_pages: int, num_slots: int, chunk_bytes: int
) -> SplitBounds | None:
    """Return the bounds of pools that start with these sizes.

    Args:
        demand: of ``reserve_tables``.
        budget_bytes: limit of weights and pools together.
        num_pages, num_slots: at the start.
        chunk_bytes: as ``elastic_chunk`` has it.

    Returns:
        None: there is memory for all KV that is useful, or chunks would waste more than ``MAX_WASTE``.
    """
    if not demand.table_pages or num_pages >= demand.most_pages:
        return None
    page_bytes, slot_bytes = demand.kv_bytes(1) - demand.kv_bytes(0), demand.shape.state_bytes_per_slot
    of_both = num_pages * page_bytes + num_slots * slot_bytes
    pool_bytes = budget_bytes - demand.total_bytes(num_pages, num_slots) + of_both
    if chunk_bytes and demand.end_bytes > MAX_WASTE * pool_bytes:
        share = f"{100 * demand.end_bytes / pool_bytes:.1f} %"
        logger.info("KV and states keep their sizes: chunks of %s bytes could waste %s of them", chunk_bytes, share)
        return None
    most_pages = min(demand.table_pages, (pool_bytes - FEWEST_SLOTS * slot_bytes) // page_bytes)
    useful = demand.most_state_slots(most_pages)
    most_slots = min(useful, (pool_bytes - demand.fewest_pages * page_bytes) // slot_bytes)
    most = max(num_pages, most_pages), max(num_slots, most_slots)
    return SplitBounds(pool_bytes, page_bytes, slot_bytes, *most, chunk_bytes)
