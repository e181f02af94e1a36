"""What to change when the memory is not enough: settings that were tried, each with the largest value that works."""

from __future__ import annotations

from math import ceil

from specmamba.cache.memory_demand import Demand, largest_setting

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
