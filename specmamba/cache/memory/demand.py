"""The bytes that a configuration needs, and advice for a memory that is too small."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from specmamba.cache.shapes import MISSED_TOKENS, CacheShape, missed_room, pending_token_capacity
from specmamba.config import TEXT_ALGORITHMS, EngineConfig

# Acceptance by rejection holds this many distributions over the vocabulary for every node of a step.
DISTRIBUTIONS_PER_NODE = 6
LOGIT_BYTES = 4
GRAPH_BYTES = 64 << 20  # of the pool of graphs: workspaces of libraries, and rounding of what PyTorch takes at a time
COUNT_BYTES = 5  # per token of the vocabulary: its count in the output, and whether the prompt has it (for penalties)
SLOT_BYTES = 8  # int64: the KV slot of a position, the slot of a cached token, a token of a drafter
HISTORY_BYTES = 4  # int32: a token of the text that drafts are copied from
AUTOMATON_BYTES = 200  # per token of a running request's text in a suffix automaton, where little of it repeats
ALLOCATOR_BYTES = 16  # per page: the stack of free pages, holders, pins

# Upper bounds of what the prefix cache can use: as much KV as running requests may hold, and at least a few contexts; a
# few states for each of them (ends of prompts and answers), and states at chunk ends and branch points between those.
CACHED_CONTEXTS = 4
CACHED_STATES_PER_REQUEST = 4
TOKENS_PER_STATE = 64

MAX_FRACTION = 0.95  # the rest is for the activations of a step
# settings that can be lowered, in the order in which they are when one of them is not enough
LOWERABLE = (
    "context_length",
    "max_total_tokens",
    "max_mamba_cache_size",
    "max_running_requests",
    "cuda_graph_max_bs",
)


@dataclass(frozen=True, slots=True)
class Demand:
    """A configuration and the sizes of its model: all that decides the bytes but the numbers of pages and state slots.

    The bytes are those of one device; on a GPU the host also has a copy of the request table, in its own memory.
    """

    config: EngineConfig
    shape: CacheShape
    model_context: int
    vocab_size: int
    max_nodes: int
    num_lookahead_slots: int
    weight_bytes: int
    table_pages: int = 0  # pages that tables have room for, if that is more than the pool has; 0: the pools are fixed
    graph_token_bytes: int = 0  # of one token in a captured step on a GPU; 0: graphs have no memory of their own
    end_page: int = 0  # bytes of the system's pages, of which each layer of elastic pools takes the last one whole

    @property
    def context(self) -> int:
        """Prompt and output tokens of a request, if the KV pool is large enough."""
        return self.config.context_length or self.model_context

    @property
    def given_pages(self) -> int | None:
        tokens = self.config.max_total_tokens
        return None if tokens is None else tokens // self.config.page_size

    @property
    def fewest_pages(self) -> int:
        """Smallest useful number of pages: for a full context if --context-length is given, else for two tokens."""
        return self.pages_of(self.config.context_length or 2)

    @property
    def fewest_state_slots(self) -> int:
        """State slots that are asked for, else one per running request."""
        return self.config.max_mamba_cache_size or self.config.max_running_requests

    @property
    def fewest_bytes(self) -> int:
        """Bytes with the smallest pools."""
        return self.total_bytes(max(self.fewest_pages, self.given_pages or 0), self.fewest_state_slots)

    @property
    def most_pages(self) -> int:
        """Largest useful number of pages."""
        running = self.config.max_running_requests
        cached = 0 if self.config.disable_radix_cache else max(running, CACHED_CONTEXTS)
        return (running + cached) * self.pages_of(self.context)

    def most_state_slots(self, num_pages: int) -> int:
        """Largest useful number of state slots beside ``num_pages`` pages."""
        config = self.config
        if config.disable_radix_cache:
            return config.max_running_requests
        distance = min(TOKENS_PER_STATE, config.chunked_prefill_size)
        if config.mamba_radix_cache_strategy == "extra_buffer":
            distance = min(distance, config.mamba_track_interval)
        return self.usual_state_slots + num_pages * config.page_size // distance

    @property
    def usual_state_slots(self) -> int:
        """State slots for running requests, and a few cached states for each."""
        cached = 0 if self.config.disable_radix_cache else CACHED_STATES_PER_REQUEST
        return (1 + cached) * self.config.max_running_requests

    def state_slots_beside(self, num_pages: int) -> int:
        """State slots by --mamba-full-memory-ratio; at least the running requests and one, at most what is useful."""
        share = self.config.mamba_full_memory_ratio * self.kv_bytes(num_pages)
        most = self.most_state_slots(num_pages)
        by_ratio = min(share / max(1, self.shape.state_bytes_per_slot), most)  # a float: the ratio may be very large
        fewest = self.config.max_running_requests + (0 if self.config.disable_radix_cache else 1)
        return max(fewest, int(by_ratio))

    def pages_of(self, num_tokens: int) -> int:
        """Pages for a request of ``num_tokens`` tokens and one draft."""
        return -(-(num_tokens + self.num_lookahead_slots) // self.config.page_size)

    def kv_bytes(self, num_pages: int) -> int:
        return (num_pages + 1) * self.config.page_size * self.shape.kv_bytes_per_token  # page 0 is padding

    def state_bytes(self, num_state_slots: int) -> int:
        return (num_state_slots + 1) * self.shape.state_bytes_per_slot

    @property
    def spec_bytes(self) -> int:
        is_records = self.config.speculative_state == "records"
        per_row = self.shape.record_bytes(self.max_nodes) if is_records else self.shape.snapshot_bytes(self.max_nodes)
        return (self.config.max_running_requests + 1) * per_row

    @property
    def draft_bytes(self) -> int:
        """Bytes of a draft model besides its KV: states and records of every row, and one state to copy from."""
        draft = self.shape.draft_model
        if draft is None:
            return 0
        rows = self.config.max_running_requests + 1
        return rows * self._draft_model_bytes(self.max_nodes) + draft.state_bytes_per_slot

    @property
    def graph_bytes(self) -> int:
        """Bytes of the logits that captured steps hand from the forward to the decision: float32 at the most."""
        return self.config.largest_captured_batch * self._logit_bytes(self.max_nodes)

    @property
    def graph_pool_bytes(self) -> int:
        """Bytes of the memory that captured steps on a GPU keep, by those of the largest, estimated.

        Graphs of other batch sizes and kinds use the same memory, since no two of them run at the same time.
        """
        largest = self.config.largest_captured_batch
        if not (largest and self.graph_token_bytes):
            return 0
        return GRAPH_BYTES + largest * self._graph_request_bytes(self.max_nodes)

    def table_bytes(self, num_pages: int) -> int:
        """Bytes of all tables and buffers per row, and of the bookkeeping of pages and cached tokens."""
        config, rows = self.config, self.config.max_running_requests
        num_pages = max(num_pages, self.table_pages)
        positions = min(self.context + self.num_lookahead_slots, num_pages * config.page_size)
        per_position = SLOT_BYTES + (HISTORY_BYTES if config.speculative_algorithm in TEXT_ALGORITHMS else 0)
        per_row = positions * per_position + COUNT_BYTES * self.vocab_size
        per_row += self._drafter_bytes(self.max_nodes)
        per_page = ALLOCATOR_BYTES
        if not config.disable_radix_cache:  # the tree's keys and slots, and the pages of its nodes
            per_page += 2 * SLOT_BYTES * config.page_size + SLOT_BYTES
        of_texts = 0
        if config.speculative_algorithm == "suffix":  # texts that run are as long as their KV
            per_page += AUTOMATON_BYTES * config.page_size
            of_texts = 0 if config.disable_radix_cache else config.suffix_rules.shared_mib << 20
        of_rows = (rows + 1) * per_row + rows * self._distribution_bytes(self.max_nodes)
        return of_rows + of_texts + (num_pages + 1) * per_page

    def draft_token_bytes(self, spec_bytes: Callable[[int], int]) -> int:
        """Bytes that one more node would add to one running request.

        Args:
            spec_bytes: maps a number of nodes to the bytes of the speculation state of one running request.
        """
        parts = [spec_bytes, self._drafter_bytes, self._draft_model_bytes, self._distribution_bytes]
        if self.config.largest_captured_batch:
            parts += [self._logit_bytes, self._graph_request_bytes]
        return sum(part(self.max_nodes + 1) - part(self.max_nodes) for part in parts)

    def total_bytes(self, num_pages: int, num_state_slots: int) -> int:
        pools = self.kv_bytes(num_pages) + self.state_bytes(num_state_slots) + self.spec_bytes + self.draft_bytes
        graphs = self.graph_bytes + self.graph_pool_bytes
        return self.weight_bytes + pools + graphs + self.table_bytes(num_pages) + self.end_bytes

    @property
    def end_bytes(self) -> int:
        """Bytes behind the ends of elastic pools: pages of the system that are used in part."""
        tensors = 2 if self.shape.kv_dtype is None else 4  # of a layer: keys and values, and scales of either
        return self.end_page * (tensors * self.shape.num_kv_layers + 2 * self.shape.num_state_layers + 1)

    def with_ends(self, end_page: int) -> Demand:
        """Copy for elastic pools in pages of the system of so many bytes."""
        return replace(self, end_page=end_page)

    def for_pages(self, num_pages: int) -> Demand:
        """Copy whose tables have room for so many pages at least."""
        return replace(self, table_pages=num_pages)

    def with_changes(self, **changes: object) -> Demand:
        """Copy with other settings, which are not validated."""
        return replace(self, config=self.config.model_copy(update=changes))

    def _drafter_bytes(self, max_nodes: int) -> int:
        """Bytes of a draft head's pending and missed tokens of one request, with the target's states before them.

        Where sizes are fixed, states before the tokens that were pending before a step are kept too, for steps that are
        launched behind it.
        """
        is_sized = self.config.speculative_adaptive == "auto"
        missed = missed_room(max_nodes) + MISSED_TOKENS if is_sized else 0  # copied where rows come back
        if self.shape.draft_context:
            return missed * (self.shape.draft_context * self.shape.dtype.itemsize + SLOT_BYTES)
        if not self.shape.draft_features or self.shape.draft_model is not None:
            return 0
        num_tokens = pending_token_capacity(max_nodes) + (missed or max_nodes)
        return num_tokens * (self.shape.draft_features * self.shape.dtype.itemsize + SLOT_BYTES)

    def _draft_model_bytes(self, max_nodes: int) -> int:
        """Bytes of a draft model for one running request: its state, the records to roll it back, pending tokens."""
        draft = self.shape.draft_model
        if draft is None:
            return 0
        # a level of a tree may run more nodes than a verify has
        records = draft.record_bytes(max(max_nodes, self.num_lookahead_slots))
        return draft.state_bytes_per_slot + records + 2 * SLOT_BYTES

    def _logit_bytes(self, max_nodes: int) -> int:
        """Bytes of the logits of one request in a captured step."""
        return LOGIT_BYTES * self.vocab_size * max_nodes

    def _graph_request_bytes(self, max_nodes: int) -> int:
        """Bytes of one request in the memory of graphs: activations, and logits once more, or what is made of them."""
        if not self.graph_token_bytes:
            return 0
        return max_nodes * self.graph_token_bytes + self._logit_bytes(max_nodes)

    def _distribution_bytes(self, max_nodes: int) -> int:
        """Bytes of the distributions in a step of one request."""
        if self.config.speculative_accept == "target" or self.max_nodes == 1:
            return 0
        if self.config.speculative_algorithm in TEXT_ALGORITHMS:  # what stands in a text is not drawn
            return 0
        return DISTRIBUTIONS_PER_NODE * 4 * self.vocab_size * max_nodes


def largest_setting(demand: Demand, budget_bytes: int, field: str, values: range) -> int | None:
    """Return the largest of the ascending values of a setting with which the smallest pools fit, or None."""
    return largest_fitting(values, lambda value: demand.with_changes(**{field: value}).fewest_bytes <= budget_bytes)


def largest_fitting(values: range, fits: Callable[[int], bool]) -> int | None:
    """Return the last of ascending values that fits, given that all values below one that fits do too, or None."""
    count = bisect_right(values, 0, key=lambda value: 0 if fits(value) else 1)
    return values[count - 1] if count else None


def explain_shortage(demand: Demand, budget_bytes: int) -> str:
    """Say what the smallest pools need, what is allowed, and each change that is enough alone (else a combination)."""
    config = demand.config
    pages, slots = max(demand.fewest_pages, demand.given_pages or 0), demand.fewest_state_slots
    parts = [
        f"{mib(demand.kv_bytes(pages))} for {pages * config.page_size} tokens of KV",
        f"{mib(demand.state_bytes(slots))} for {slots} recurrent states",
        f"{mib(demand.spec_bytes)} for the speculation of {config.max_running_requests} requests",
        f"{mib(demand.table_bytes(pages))} for their tables",
    ]
    if demand.graph_bytes:
        parts.append(f"{mib(demand.graph_bytes + demand.graph_pool_bytes)} for captured steps")
    if demand.draft_bytes:
        parts.insert(3, f"{mib(demand.draft_bytes)} for the draft model's states")
    if demand.weight_bytes:
        parts.insert(0, f"{mib(demand.weight_bytes)} for the weights")
    return (
        f"weights and the smallest pools need {mib(demand.fewest_bytes)} MiB ({', '.join(parts)}), but "
        f"--mem-fraction-static {config.mem_fraction_static} allows {max(0, budget_bytes) >> 20} MiB: "
        + " or ".join(_remedies(demand, budget_bytes) or ["free some memory or use a smaller model"])
    )


def explain_contradiction(demand: Demand, budget_bytes: int) -> str:
    """Say what --max-total-tokens is too small for, and what to change."""
    config, enough = demand.config, demand.fewest_pages * demand.config.page_size
    problem = f"--max-total-tokens {config.max_total_tokens} is too small"
    raised = demand.with_changes(max_total_tokens=enough)
    remedies = [f"set at least {enough}"] if raised.fewest_bytes <= budget_bytes else []
    context = (demand.given_pages or 0) * config.page_size - demand.num_lookahead_slots
    if context < 2:
        problem += " to run any request"
    else:
        problem += f" for --context-length {config.context_length} and one draft"
        if demand.with_changes(context_length=context).fewest_bytes <= budget_bytes:
            remedies.append(f"lower --context-length to {context}")
    if remedies:
        return f"{problem}: {' or '.join(remedies)}"
    return f"{problem}: set at least {enough}. Then {explain_shortage(raised, budget_bytes)}"


def mib(num_bytes: int) -> int:
    """Convert to MiB, rounded up, so that a size that a message asks for is enough."""
    return -(-num_bytes // (1 << 20))


def _remedies(demand: Demand, budget_bytes: int) -> list[str]:
    remedies = []
    for field in LOWERABLE:
        value = largest_setting(demand, budget_bytes, field, _lower_values(demand, field))
        if value is not None:
            remedies.append(f"lower {_flag(field)} to {value}")
    records = demand.with_changes(speculative_state="records")
    if demand.config.speculative_state == "snapshots" and records.fewest_bytes <= budget_bytes:
        remedies.append("choose --speculative-state records")
    direct = demand.with_changes(disable_cuda_graph=True)
    if demand.graph_pool_bytes and direct.fewest_bytes <= budget_bytes:
        remedies.append("give --disable-cuda-graph")
    if not remedies:
        remedies = _all_together(demand, budget_bytes)
    return remedies + _larger_fraction(demand, budget_bytes)


def _all_together(demand: Demand, budget_bytes: int) -> list[str]:
    """Return one remedy that combines several changes, or none."""
    changes = []
    if demand.config.speculative_state == "snapshots":
        changes.append("choose --speculative-state records")
        demand = demand.with_changes(speculative_state="records")
    for field in LOWERABLE:
        values = _lower_values(demand, field)
        if not values:
            continue
        value = largest_setting(demand, budget_bytes, field, values)
        lowered = values[0] if value is None else value
        changes.append(f"lower {_flag(field)} to {lowered}")
        if value is not None:
            return [" and ".join(changes)]
        demand = demand.with_changes(**{field: lowered})
    return []


def _larger_fraction(demand: Demand, budget_bytes: int) -> list[str]:
    if budget_bytes <= 0:
        return []
    free_bytes = budget_bytes / demand.config.mem_fraction_static
    fraction = ceil(1000 * (demand.fewest_bytes + 1) / free_bytes) / 1000
    return [f"raise --mem-fraction-static to {fraction}"] if fraction <= MAX_FRACTION else []


def _lower_values(demand: Demand, field: str) -> range:
    """Return the values that a setting can be lowered to; none if it is not given or is at its minimum."""
    now: int | None = getattr(demand.config, field)
    if now is None:
        return range(0)
    if field == "max_total_tokens":
        page_size = demand.config.page_size
        return range(demand.fewest_pages * page_size, now, page_size)
    return range(2 if field == "context_length" else 1, now)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
