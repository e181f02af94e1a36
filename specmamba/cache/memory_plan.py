"""Who gets how many bytes, decided once at start-up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specmamba.cache.shapes import CacheShape
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError

# Acceptance by rejection holds that many distributions over the vocabulary for every node of a step.
DISTRIBUTIONS_PER_NODE = 6


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of all pools. Every running request can have a row and a state; not every one a full context of KV."""

    num_rows: int
    num_state_slots: int
    num_pages: int
    page_size: int
    context_length: int  # prompt and output tokens that one request can have
    max_nodes: int  # nodes of a draft tree at the most, the root counted
    num_slots: int  # positions from the root on that one step may write
    kv_bytes: int
    state_bytes: int
    spec_bytes: int
    speculative_state: Literal["records", "snapshots"]
    record_bytes_per_request: int  # what either kind of speculation state takes (or would) for one running request
    snapshot_bytes_per_request: int

    @property
    def num_kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def spec_bytes_per_request(self) -> int:
        """Bytes of the speculation buffers of one running request, of the kind that was chosen."""
        is_records = self.speculative_state == "records"
        return self.record_bytes_per_request if is_records else self.snapshot_bytes_per_request

    def describe_lines(self) -> list[str]:
        """What the speculation state costs, and what the other kind would, for people at start-up."""
        costs = {"records": self.record_bytes_per_request, "snapshots": self.snapshot_bytes_per_request}
        chosen = costs.pop(self.speculative_state)
        ((other, other_bytes),) = costs.items()
        nodes = "plain decoding" if self.max_nodes == 1 else f"trees of up to {self.max_nodes} nodes"
        return [
            f"speculation state: {self.speculative_state}, for {nodes}",
            f"{_readable(chosen)} of it per running request ({other} would take {_readable(other_bytes)})",
        ]


def plan_memory(
    config: EngineConfig,
    shape: CacheShape,
    model_context: int,
    vocab_size: int,
    max_nodes: int,
    num_slots: int,
    free_bytes: int,
) -> MemoryPlan:
    """Size the pools for a configuration.

    Args:
        config: the limits the user set.
        shape: bytes per token and per request.
        model_context: tokens the model was made for.
        vocab_size: for the token counts that penalties need.
        max_nodes: nodes of a draft tree, root included; 1 without drafting.
        num_slots: KV positions that one step may write, from the root's on.
        free_bytes: what the pools may take, weights already subtracted.

    Raises:
        ConfigError: the limits contradict each other or the memory; the message has the smallest setting that works.
    """
    context = _context_length(config, model_context)
    rows = config.max_running_requests
    slots = config.max_mamba_cache_size or rows
    state_bytes = (slots + 1) * shape.state_bytes_per_slot
    record_bytes, snapshot_bytes = shape.record_bytes(max_nodes), shape.snapshot_bytes(max_nodes)
    spec_bytes = (rows + 1) * (record_bytes if config.speculative_state == "records" else snapshot_bytes)
    table_bytes = (rows + 1) * (8 * (context + num_slots) + 5 * vocab_size)  # KV slots; token counts for penalties
    if config.speculative_accept == "rejection":
        table_bytes += rows * max_nodes * vocab_size * 4 * DISTRIBUTIONS_PER_NODE
    page_bytes = max(1, shape.kv_bytes_per_token) * config.page_size
    affordable = (free_bytes - state_bytes - spec_bytes - table_bytes) // page_bytes - 1  # page 0 is padding
    if config.max_total_tokens is not None:
        pages = config.max_total_tokens // config.page_size
    else:
        pages = min(affordable, rows * -(-(context + num_slots) // config.page_size))
    smallest = -(-(2 + num_slots) // config.page_size)  # one prompt token, one output token
    if config.max_total_tokens is not None and pages < smallest:
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens} is too small to run any request: "
            f"set at least {smallest * config.page_size}"
        )
    if pages > affordable or affordable < smallest:
        pages = max(pages, smallest)
        needed = state_bytes + spec_bytes + table_bytes + (pages + 1) * page_bytes
        raise ConfigError(
            f"the pools need {_mib(needed)} MiB ({_mib(state_bytes)} for {slots} recurrent states, {_mib(spec_bytes)} "
            f"for the speculation of {rows} requests, the rest for {pages * config.page_size} tokens of KV and the "
            "requests' tables), but "
            f"--mem-fraction-static {config.mem_fraction_static} leaves {_mib(max(0, free_bytes))} MiB: "
            + _advice(config, smallest * config.page_size)
        )
    if config.context_length is not None and context > pages * config.page_size - num_slots:
        raise ConfigError(
            f"--context-length {context} needs a KV pool of {context + num_slots} tokens (one draft included), but it "
            f"has {pages * config.page_size}: lower --context-length, or give it more with --max-total-tokens or "
            "--mem-fraction-static"
        )
    context = min(context, pages * config.page_size - num_slots)  # any admitted request must fit alone
    return MemoryPlan(
        num_rows=rows,
        num_state_slots=slots,
        num_pages=pages,
        page_size=config.page_size,
        context_length=context,
        max_nodes=max_nodes,
        num_slots=num_slots,
        kv_bytes=(pages + 1) * page_bytes,
        state_bytes=state_bytes,
        spec_bytes=spec_bytes,
        speculative_state=config.speculative_state,
        record_bytes_per_request=record_bytes,
        snapshot_bytes_per_request=snapshot_bytes,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_on_machine(), _free_in_container())


def _free_on_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """What the control group (version 2) that this process runs in may still take."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(stat["inactive_file"]) + int(stat["active_file"])  # page cache counts as used
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        return 1 << 62
    return max(0, limit - current + reclaimable)


def _context_length(config: EngineConfig, model_context: int) -> int:
    if config.context_length is None:
        return model_context
    if config.context_length > model_context:
        raise ConfigError(
            f"--context-length {config.context_length} is more than the {model_context} tokens this model was made for"
        )
    return config.context_length


def _advice(config: EngineConfig, fewest_tokens: int) -> str:
    """What can be lowered, down to what; nothing that is as low as it goes."""
    lowest = {
        "--max-total-tokens": (config.max_total_tokens, fewest_tokens),
        "--max-running-requests": (config.max_running_requests, 1),
        "--max-mamba-cache-size": (config.max_mamba_cache_size, 1),
    }
    flags = [f"{flag} (from {now}, at least {least})" for flag, (now, least) in lowest.items() if now and now > least]
    lower = f"lower {', '.join(flags)}, or " if flags else ""
    records = "choose --speculative-state records, or " if config.speculative_state == "snapshots" else ""
    return lower + records + "raise --mem-fraction-static"


def _mib(num_bytes: int) -> int:
    """Rounded up: what is said to be needed is enough."""
    return -(-num_bytes // (1 << 20))


def _readable(num_bytes: int) -> str:
    """A size to compare with another: three digits or so."""
    size, unit = (num_bytes / (1 << 20), "MiB") if num_bytes >= 1 << 20 else (num_bytes / (1 << 10), "KiB")
    return f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"
