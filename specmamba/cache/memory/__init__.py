"""The memory plan: how many bytes each pool gets, decided once at start-up."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specmamba.cache.memory.demand import Demand, explain_contradiction, explain_shortage, largest_fitting
from specmamba.cache.memory.elastic import SplitBounds, bounds_of, reserve_tables
from specmamba.cache.shapes import CacheShape
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import TableRow, aligned, readable


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of all pools. Running requests and the prefix cache share KV pages and state slots.

    There is a row for every running request, and a state slot unless ``--max-mamba-cache-size`` asks for fewer. The KV
    pool may be too small for a full context of every running request.
    """

    num_rows: int
    num_state_slots: int
    num_pages: int
    page_size: int
    context_length: int  # prompt and output tokens that one request can have
    max_nodes: int  # largest number of nodes of a draft tree, the root included
    num_lookahead_slots: int  # KV positions from the root on that one step may write
    caches_prefixes: bool
    budget_bytes: int  # limit of the sum of all following bytes
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    spec_bytes: int
    table_bytes: int  # tables and buffers per request, and the bookkeeping of pages and cached tokens
    speculative_state: Literal["records", "snapshots"]
    record_bytes_per_request: int  # speculation buffers of one running request, for either choice
    snapshot_bytes_per_request: int
    record_bytes_per_draft_token: int  # what one more draft token would add to one running request, for either choice
    snapshot_bytes_per_draft_token: int
    draft_bytes: int = 0  # states and records of a draft model
    graph_bytes: int = 0  # logits between the two parts of captured steps
    graph_pool_bytes: int = 0  # what graphs of a GPU keep, estimated: activations of the largest captured step
    largest_captured_batch: int = 0  # requests of the largest captured step; 0: none is captured
    kv_cache_dtype: str = "auto"  # of stored keys and values; auto: the model's
    elastic: SplitBounds | None = None  # of pools that start with these sizes; None: they keep them
    end_bytes: int = 0  # behind the ends of elastic pools

    @property
    def num_kv_tokens(self) -> int:
        """KV tokens that running requests and the prefix cache share."""
        return self.num_pages * self.page_size

    @property
    def num_running_requests(self) -> int:
        """Requests that can run at the same time if their KV fits."""
        return min(self.num_rows, self.num_state_slots if self.elastic is None else self.elastic.most_state_slots)

    @property
    def num_cached_states(self) -> int:
        """States that can be cached while the largest number of requests runs."""
        return max(0, self.num_state_slots - self.num_running_requests) if self.caches_prefixes else 0

    @property
    def total_bytes(self) -> int:
        pools = self.kv_bytes + self.state_bytes + self.spec_bytes + self.draft_bytes + self.table_bytes
        return self.weight_bytes + pools + self.graph_bytes + self.graph_pool_bytes + self.end_bytes

    @property
    def spec_bytes_per_request(self) -> int:
        """Bytes of the speculation buffers of one running request, for the chosen kind of speculation state."""
        is_records = self.speculative_state == "records"
        return self.record_bytes_per_request if is_records else self.snapshot_bytes_per_request

    @property
    def draft_token_bytes_per_request(self) -> int:
        """Bytes that one more draft token would add to one running request, for the chosen kind."""
        is_records = self.speculative_state == "records"
        return self.record_bytes_per_draft_token if is_records else self.snapshot_bytes_per_draft_token

    @property
    def draft_token_bytes(self) -> int:
        """Bytes that one more draft token would add to all rows, the padding row included."""
        return (self.num_rows + 1) * self.draft_token_bytes_per_request

    def describe_lines(self) -> list[str]:
        """Format the sizes as a table, one line per pool, which the engine logs at start-up."""
        total = f"of {readable(self.budget_bytes)} that --mem-fraction-static allows"
        return aligned(
            [
                ("weights", readable(self.weight_bytes), ""),
                *self._pool_rows(),
                *self._elastic_rows(),
                *self._draft_rows(),
                *self._graph_rows(),
                ("request tables", readable(self.table_bytes), f"{self.num_rows} rows, and the lists of pages"),
                ("total", readable(self.total_bytes), total),
                *self._request_rows(),
            ]
        )

    def _pool_rows(self) -> list[TableRow]:
        per_token = self.kv_bytes // ((self.num_pages + 1) * self.page_size)
        per_state = self.state_bytes // (self.num_state_slots + 1)
        shared = ", running and cached" if self.caches_prefixes else ""
        form = "" if self.kv_cache_dtype == "auto" else f" in {self.kv_cache_dtype}"
        kv = f"{self.num_kv_tokens:,} tokens of {readable(per_token)}{form}{shared}"
        if not self.kv_bytes:
            kv = f"no layer has keys and values; {self.num_kv_tokens:,} tokens are numbered{shared}"
        states = f"{self.num_running_requests} to run"
        if self.caches_prefixes:
            states += f", {self.num_cached_states:,} to cache"
        nodes = "plain decoding" if self.max_nodes == 1 else f"trees of up to {self.max_nodes} nodes"
        records, snapshots = self.record_bytes_per_request, self.snapshot_bytes_per_request
        per_request = f"{readable(self.spec_bytes_per_request)} per running request {self._other(records, snapshots)}"
        return [
            ("KV pool", readable(self.kv_bytes), kv),
            ("recurrent states", readable(self.state_bytes), f"{readable(per_state)} each: {states}"),
            ("speculation", readable(self.spec_bytes), f"{self.speculative_state} for {nodes}: {per_request}"),
        ]

    def _elastic_rows(self) -> list[TableRow]:
        if self.elastic is None:
            return []
        most = f"up to {self.elastic.most_pages * self.page_size:,} tokens, or {self.elastic.most_state_slots:,} states"
        if self.elastic.chunk_bytes:
            chunk = readable(self.elastic.chunk_bytes)
            most += f"; ends of layers in chunks of {chunk} take up to {readable(self.end_bytes)} more"
        return [("elastic pools", readable(self.elastic.pool_bytes), f"what KV and states share, {most}")]

    def _draft_rows(self) -> list[TableRow]:
        if not self.draft_bytes:
            return []
        return [("draft model", readable(self.draft_bytes), f"its states and records for {self.num_rows} rows")]

    def _graph_rows(self) -> list[TableRow]:
        if not self.graph_bytes:
            return []
        held = f"logits between forward and decision, of up to {self.largest_captured_batch} requests"
        rows: list[TableRow] = [("captured steps", readable(self.graph_bytes), held)]
        if self.graph_pool_bytes:
            rows.append(("graphs", readable(self.graph_pool_bytes), "what they keep of activations, estimated"))
        return rows

    def _request_rows(self) -> list[TableRow]:
        records, snapshots = self.record_bytes_per_draft_token, self.snapshot_bytes_per_draft_token
        per_request = f"{readable(self.draft_token_bytes_per_request)} per running request"
        contexts = self.num_kv_tokens // (self.context_length + self.num_lookahead_slots)
        full = f"at once; {'KV' if self.kv_bytes else 'room'} for {contexts} of the full {self.context_length:,} tokens"
        return [
            ("running requests", f"{self.num_running_requests}", full),
            (
                "one more draft token",
                readable(self.draft_token_bytes),
                f"{per_request} {self._other(records, snapshots)}",
            ),
        ]

    def _other(self, records: int, snapshots: int) -> str:
        if self.speculative_state == "records":
            return f"(snapshots would take {readable(snapshots)})"
        return f"(records would take {readable(records)})"


def plan_memory(
    config: EngineConfig,
    shape: CacheShape,
    model_context: int,
    vocab_size: int,
    max_nodes: int,
    num_lookahead_slots: int,
    budget_bytes: int,
    weight_bytes: int = 0,
    elastic_chunk: int | None = None,
    graph_token_bytes: int = 0,
) -> MemoryPlan:
    """Size the pools for a configuration.

    Args:
        config: the limits that the user set.
        shape: gives bytes per token and per request.
        model_context: tokens that the model was made for.
        vocab_size: size of the token counts that penalties need.
        max_nodes: nodes of a draft tree, root included; 1 without drafting.
        num_lookahead_slots: KV positions from the root on that one step may write.
        budget_bytes: limit of weights and pools together.
        weight_bytes: bytes of the weights.
        elastic_chunk: bytes of the chunks in which KV and states take memory from each other, 0 where the system gives
            memory to what is written (``memory.elastic.elastic_chunk``); None: they do not.
        graph_token_bytes: of one token in a captured step on a GPU; 0: graphs have no memory of their own.

    Raises:
        ConfigError: the limits contradict each other or do not fit the memory; the message names settings that work.
    """
    if config.context_length is not None and config.context_length > model_context:
        raise ConfigError(
            f"--context-length {config.context_length} is more than the {model_context} tokens this model was made for"
        )
    if config.kv_cache_dtype != "auto" and not shape.num_kv_layers:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: no layer of this model keeps keys and values: drop it"
        )
    of_model = shape, model_context, vocab_size
    demand = Demand(
        config, *of_model, max_nodes, num_lookahead_slots, weight_bytes, graph_token_bytes=graph_token_bytes
    )
    if demand.given_pages is not None and demand.given_pages < demand.fewest_pages:
        raise ConfigError(explain_contradiction(demand, budget_bytes))
    if demand.fewest_bytes > budget_bytes:
        raise ConfigError(explain_shortage(demand, budget_bytes))
    pages, slots = _size_pools(demand, budget_bytes)
    elastic = None
    if elastic_chunk is not None:
        reserved = reserve_tables(demand, budget_bytes, elastic_chunk)
        sizes = _size_pools(reserved, budget_bytes)
        elastic = bounds_of(reserved, budget_bytes, *sizes, elastic_chunk)
        if elastic is not None:
            demand, (pages, slots) = reserved, sizes
    longest = pages if elastic is None else elastic.most_pages
    return MemoryPlan(
        num_rows=config.max_running_requests,
        num_state_slots=slots,
        num_pages=pages,
        page_size=config.page_size,
        # a request that is admitted must fit when it runs alone
        context_length=min(demand.context, longest * config.page_size - num_lookahead_slots),
        max_nodes=max_nodes,
        num_lookahead_slots=num_lookahead_slots,
        caches_prefixes=not config.disable_radix_cache,
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        kv_bytes=demand.kv_bytes(pages),
        state_bytes=demand.state_bytes(slots),
        spec_bytes=demand.spec_bytes,
        table_bytes=demand.table_bytes(pages),
        speculative_state=config.speculative_state,
        record_bytes_per_request=shape.record_bytes(max_nodes),
        snapshot_bytes_per_request=shape.snapshot_bytes(max_nodes),
        record_bytes_per_draft_token=demand.draft_token_bytes(shape.record_bytes),
        snapshot_bytes_per_draft_token=demand.draft_token_bytes(shape.snapshot_bytes),
        draft_bytes=demand.draft_bytes,
        graph_bytes=demand.graph_bytes,
        graph_pool_bytes=demand.graph_pool_bytes,
        largest_captured_batch=config.largest_captured_batch,
        kv_cache_dtype=config.kv_cache_dtype,
        elastic=elastic,
        end_bytes=demand.end_bytes,
    )


def _size_pools(demand: Demand, budget_bytes: int) -> tuple[int, int]:
    """Return the numbers of pages and of state slots: given ones as they are, else as large as is useful and fits.

    If neither is given, the states get their ratio of the KV's bytes; if the KV pool reaches its largest useful size,
    they also get memory for a few cached states per running request. Without attention layers KV takes no bytes, and
    all remaining memory goes to states. ``demand.fewest_bytes`` must fit ``budget_bytes``.
    """
    pages = demand.given_pages
    if pages is None:
        pages = _derive_pages(demand, budget_bytes)
        has_plenty = pages >= demand.most_pages
    else:
        has_plenty = True
    slots = demand.config.max_mamba_cache_size
    if slots is None:
        slots = _derive_state_slots(demand, budget_bytes, pages, has_plenty)
    return pages, slots


def _derive_pages(demand: Demand, budget_bytes: int) -> int:
    """Return the most pages that fit with their share of states; at least the fewest, which then get fewer states."""

    def fits(num_pages: int) -> bool:
        slots = demand.config.max_mamba_cache_size or demand.state_slots_beside(num_pages)
        return demand.total_bytes(num_pages, slots) <= budget_bytes

    fewest = demand.fewest_pages
    return largest_fitting(range(fewest, max(fewest, demand.most_pages) + 1), fits) or fewest


def _derive_state_slots(demand: Demand, budget_bytes: int, num_pages: int, has_plenty: bool) -> int:
    has_kv = demand.shape.kv_bytes_per_token > 0
    wanted = demand.state_slots_beside(num_pages) if has_kv else demand.most_state_slots(num_pages)
    if has_plenty:
        wanted = max(wanted, demand.usual_state_slots)
    fewest = demand.fewest_state_slots
    slots = range(fewest, wanted + 1)
    return largest_fitting(slots, lambda num_slots: demand.total_bytes(num_pages, num_slots) <= budget_bytes) or fewest


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_on_machine(), _free_in_container(), _free_in_process())


def _free_on_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """Return the bytes that the control group (version 2) of this process may still allocate."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(stat["inactive_file"]) + int(stat["active_file"])  # page cache counts as used
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        return 1 << 62
    return max(0, limit - current + reclaimable)


def _free_in_process() -> int:
    """Return the bytes of address space that this process may still take (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not taken.exists():
        return 1 << 62
    return max(0, limit - int(taken.read_text().split()[0]) * resource.getpagesize())
