"""Bytes and operations of recurrences. Letters: B requests, N nodes, m pending records, H heads, G key heads, K x V."""

from __future__ import annotations

from specmamba.bench.ops.case import Case, Cost


def state_bytes(case: Case) -> int:
    """All states of a batch, float32: 4 B H K V."""
    return 4 * case["batch"] * case["heads"] * case["key"] * case["value"]


def record_bytes(case: Case, count: int) -> int:
    """So many records of every request: k [G, K], u [H, V] and a decay [H], float32."""
    return 4 * case["batch"] * count * (case["key_heads"] * case["key"] + case["heads"] * (case["value"] + 1))


def node_bytes(case: Case, count: int, is_delta: bool) -> int:
    """What nodes bring and say: two of [G, K], one of [H, V] and the decay (and beta) in, [H, V] out; float32."""
    gates = 2 if is_delta else 1
    per_node = 2 * case["key_heads"] * case["key"] + case["heads"] * (2 * case["value"] + gates)
    return 4 * case["batch"] * count * per_node


def verify_cost(case: Case, is_delta: bool) -> Cost:
    """The state is read once, and no state is written.

    Each row that reads the state (queries; with the delta rule keys too) takes 2 K V operations, as many products with
    m + N keys, and sums over m pending values; the nodes' own values take 2 N V for outputs and N V for the solver.
    """
    nodes, pending = case["nodes"], case["pending"]
    size = state_bytes(case) + record_bytes(case, pending + nodes) + node_bytes(case, nodes, is_delta)
    key, value, rows = case["key"], case["value"], 2 if is_delta else 1
    reads = rows * (2 * key * value + 2 * (pending + nodes) * key + 2 * pending * value)
    own = (3 if is_delta else 2) * nodes * value
    return Cost(size, case["batch"] * case["heads"] * nodes * (reads + own))


def snapshots_cost(case: Case, is_delta: bool) -> Cost:
    """Every node reads the state of its parent and writes its own; 3 K V operations to advance it, 2 K V a read."""
    nodes, rows = case["nodes"], 2 if is_delta else 1
    size = 2 * nodes * state_bytes(case) + node_bytes(case, nodes, is_delta)
    advance = (3 + 2 * rows) * case["key"] * case["value"]
    return Cost(size, case["batch"] * case["heads"] * nodes * advance)


def extend_cost(case: Case, is_delta: bool) -> Cost:
    """The state is read and written once. Operations as one token after the other would take them: the fewest."""
    tokens, rows = case["tokens"], 2 if is_delta else 1
    size = 2 * state_bytes(case) + node_bytes(case, tokens, is_delta)
    advance = (3 + 2 * rows) * case["key"] * case["value"]
    return Cost(size, case["batch"] * case["heads"] * tokens * advance)


def fold_cost(case: Case) -> Cost:
    """The state is read and written once, each record read once; 2 K V operations a record."""
    pending = case["pending"]
    flops = case["batch"] * case["heads"] * case["key"] * case["value"] * (2 * pending + 1)
    return Cost(2 * state_bytes(case) + record_bytes(case, pending), flops)
