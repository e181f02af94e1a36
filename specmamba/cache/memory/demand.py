"""The bytes that a configuration needs, the largest pools that fit, and what to change when the memory is too small."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from specmamba.cache.shapes import CacheShape, pending_capacity
from specmamba.config import EngineConfig

# Acceptance by rejection holds that many distributions over the vocabulary for every node of a step.
DISTRIBUTIONS_PER_NODE = 6
COUNT_BYTES = 5  # a token's count in an output, and whether a prompt has it: for penalties
SLOT_BYTES = 8  # a position's KV slot, a cached token's slot, a token of a drafter: int64
HISTORY_BYTES = 4  # a token of the text that an n-gram drafter looks through
ALLOCATOR_BYTES = 16  # of a page: the stack of free pages, holders, pins

# What can be of use. The prefix cache keeps as much KV as running requests may hold, at least a few contexts; a few
# states for each of them (ends of prompts and answers), and chunk ends and branch points between those.
CACHED_CONTEXTS = 4
CACHED_STATES_PER_REQUEST = 4
TOKENS_PER_STATE = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """A configuration, with what it serves. Pages and state slots are what is left to decide.

    The bytes are those of one device; on a GPU the host's copy of the request table comes on top, in its own memory.
    """

    config: EngineConfig
    shape: CacheShape
    model_context: int
    vocab_size: int
    max_nodes: int
    num_lookahead_slots: int
    weight_bytes: int

    @property
    def context(self) -> int:
        """Prompt and output tokens of a request that no KV pool limits."""
        return self.config.context_length or self.model_context

    @property
    def given_pages(self) -> int | None:
        tokens = self.config.max_total_tokens
        return None if tokens is None else tokens // self.config.page_size

    @property
    def fewest_pages(self) -> int:
        """Pages without which nothing runs: for a full context where one is asked for, else for two tokens."""
        return self.pages_of(self.config.context_length or 2)

    @property
    def fewest_state_slots(self) -> int:
        """As many as are asked for, else one per running request."""
        return self.config.max_mamba_cache_size or self.config.max_running_requests

    @property
    def fewest_bytes(self) -> int:
        """What has to be there at the least."""
        return self.total_bytes(max(self.fewest_pages, self.given_pages or 0), self.fewest_state_slots)

    @property
    def most_pages(self) -> int:
        """More KV is of no use."""
        running = self.config.max_running_requests
        cached = 0 if self.config.disable_radix_cache else max(running, CACHED_CONTEXTS)
        return (running + cached) * self.pages_of(self.context)

    def most_state_slots(self, num_pages: int) -> int:
        """More states are of no use beside so many pages."""
        config = self.config
        if config.disable_radix_cache:
            return config.max_running_requests
        distance = min(TOKENS_PER_STATE, config.chunked_prefill_size)
        if config.mamba_radix_cache_strategy == "extra_buffer":
            distance = min(distance, config.mamba_track_interval)
        return self.usual_state_slots + num_pages * config.page_size // distance

    @property
    def usual_state_slots(self) -> int:
        """States for running requests, and a few cached ones for each."""
        cached = 0 if self.config.disable_radix_cache else CACHED_STATES_PER_REQUEST
        return (1 + cached) * self.config.max_running_requests

    def state_slots_beside(self, num_pages: int) -> int:
        """States by the ratio of bytes; at least what can run, and one to keep; at most what can be of use."""
        share = self.config.mamba_full_memory_ratio * self.kv_bytes(num_pages)
        most = self.most_state_slots(num_pages)
        by_ratio = min(share / max(1, self.shape.state_bytes_per_slot), most)  # the ratio may be astronomic
        fewest = self.config.max_running_requests + (0 if self.config.disable_radix_cache else 1)
        return max(fewest, int(by_ratio))

    def pages_of(self, num_tokens: int) -> int:
        """Pages for a request of so many tokens and one draft."""
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
        """What a draft model keeps beside its KV: states and records, and one state more to copy from."""
        draft = self.shape.draft_model
        if draft is None:
            return 0
        rows = self.config.max_running_requests + 1
        return rows * self._draft_model_bytes(self.max_nodes) + draft.state_bytes_per_slot

    def table_bytes(self, num_pages: int) -> int:
        """Everything that is kept per row, and the bookkeeping of pages and of cached tokens."""
        config, rows = self.config, self.config.max_running_requests
        positions = min(self.context + self.num_lookahead_slots, num_pages * config.page_size)
        per_position = SLOT_BYTES + (HISTORY_BYTES if config.speculative_algorithm == "ngram" else 0)
        per_row = positions * per_position + COUNT_BYTES * self.vocab_size
        per_row += self._drafter_bytes(self.max_nodes)
        per_page = ALLOCATOR_BYTES
        if not config.disable_radix_cache:  # the tree's keys and slots, and the pages of its nodes
            per_page += 2 * SLOT_BYTES * config.page_size + SLOT_BYTES
        return (rows + 1) * per_row + rows * self._distribution_bytes(self.max_nodes) + (num_pages + 1) * per_page

    def draft_token_bytes(self, spec_bytes: Callable[[int], int]) -> int:
        """What one more node would take for one running request.

        Args:
            spec_bytes: bytes of the speculation state of one running request, by nodes.
        """
        parts = spec_bytes, self._drafter_bytes, self._draft_model_bytes, self._distribution_bytes
        return sum(part(self.max_nodes + 1) - part(self.max_nodes) for part in parts)

    def total_bytes(self, num_pages: int, num_state_slots: int) -> int:
        pools = self.kv_bytes(num_pages) + self.state_bytes(num_state_slots) + self.spec_bytes + self.draft_bytes
        return self.weight_bytes + pools + self.table_bytes(num_pages)

    def with_changes(self, **changes: object) -> Demand:
        """The same with other settings, which are taken as they are."""
        return replace(self, config=self.config.model_copy(update=changes))

    def _drafter_bytes(self, max_nodes: int) -> int:
        """What a draft head keeps of one request: tokens up to the root, and the target's states before them."""
        if not self.shape.draft_features or self.shape.draft_model is not None:
            return 0
        return pending_capacity(max_nodes) * (self.shape.draft_features * self.shape.dtype.itemsize + SLOT_BYTES)

    def _draft_model_bytes(self, max_nodes: int) -> int:
        """What a draft model keeps of one running request: its state, records that roll it back, tokens to run."""
        draft = self.shape.draft_model
        return 0 if draft is None else draft.state_bytes_per_slot + draft.record_bytes(max_nodes) + 2 * SLOT_BYTES

    def _distribution_bytes(self, max_nodes: int) -> int:
        """The distributions of one request's step."""
        if self.config.speculative_accept == "target":
            return 0
        return DISTRIBUTIONS_PER_NODE * 4 * self.vocab_size * max_nodes


def size_pools(demand: Demand, budget_bytes: int) -> tuple[int, int]:
    """Pages and state slots: what is given as it is, the rest as large as memory allows and use asks for.

    Where neither is given, the states get their ratio of the KV's bytes, and of what the KV has no use for as much as
    makes a few per running request. Without attention tokens take no bytes, and all that is left is the states'.
    ``demand.fewest_bytes`` must fit.
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


def largest_setting(demand: Demand, budget_bytes: int, field: str, values: range) -> int | None:
    """The largest of the ascending values of a setting at which the smallest pools fit; None: none of them."""
    return _largest(values, lambda value: demand.with_changes(**{field: value}).fewest_bytes <= budget_bytes)


def _derive_pages(demand: Demand, budget_bytes: int) -> int:
    """As many as fit with the states that belong to them; where not even the fewest do, there are fewer states."""

    def fits(num_pages: int) -> bool:
        slots = demand.config.max_mamba_cache_size or demand.state_slots_beside(num_pages)
        return demand.total_bytes(num_pages, slots) <= budget_bytes

    fewest = demand.fewest_pages
    return _largest(range(fewest, max(fewest, demand.most_pages) + 1), fits) or fewest


def _derive_state_slots(demand: Demand, budget_bytes: int, num_pages: int, has_plenty: bool) -> int:
    has_kv = demand.shape.kv_bytes_per_token > 0
    wanted = demand.state_slots_beside(num_pages) if has_kv else demand.most_state_slots(num_pages)
    if has_plenty:
        wanted = max(wanted, demand.usual_state_slots)
    fewest = demand.fewest_state_slots
    slots = range(fewest, wanted + 1)
    return _largest(slots, lambda num_slots: demand.total_bytes(num_pages, num_slots) <= budget_bytes) or fewest


def _largest(values: range, fits: Callable[[int], bool]) -> int | None:
    """The last of ascending values that fits, where everything below one that fits does too."""
    count = bisect_right(values, 0, key=lambda value: 0 if fits(value) else 1)
    return values[count - 1] if count else None


MAX_FRACTION = 0.95  # a step's activations come on top of weights and pools
# what can be lowered, in the order in which several of them are
LOWERABLE = ("context_length", "max_total_tokens", "max_mamba_cache_size", "max_running_requests")


def explain_shortage(demand: Demand, budget_bytes: int) -> str:
    """What the smallest pools take, what there is, and every change that helps on its own (else: all together)."""
    config = demand.config
    pages, slots = max(demand.fewest_pages, demand.given_pages or 0), demand.fewest_state_slots
    parts = [
        f"{mib(demand.kv_bytes(pages))} for {pages * config.page_size} tokens of KV",
        f"{mib(demand.state_bytes(slots))} for {slots} recurrent states",
        f"{mib(demand.spec_bytes)} for the speculation of {config.max_running_requests} requests",
        f"{mib(demand.table_bytes(pages))} for their tables",
    ]
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
    """What --max-total-tokens has no room for, and what to change."""
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
    """Rounded up: what is said to be needed is enough."""
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
    if not remedies:
        remedies = _all_together(demand, budget_bytes)
    return remedies + _larger_fraction(demand, budget_bytes)


def _all_together(demand: Demand, budget_bytes: int) -> list[str]:
    """One remedy of several changes, or none."""
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
    """What a setting can be lowered to; nothing for one that is not given or as low as it goes."""
    now: int | None = getattr(demand.config, field)
    if now is None:
        return range(0)
    if field == "max_total_tokens":
        page_size = demand.config.page_size
        return range(demand.fewest_pages * page_size, now, page_size)
    return range(2 if field == "context_length" else 1, now)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
