"""Figures of ranks that share a model: speeds by round, and what a rank sends and waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specmamba.measure.report import median_with_range

Decoded = Mapping[str, Any]  # what ``RankWorker.decode`` returns
DIGITS = 3


def sent_bytes(kind: str, nbytes: float, num_ranks: int, is_over_memory: bool = False) -> float:
    """Bytes that rank 0 sends in an exchange.

    Over shared memory it writes its tensor once. By gloo a sum goes around a ring twice, every time in all parts but
    one (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 3);
    parts that are joined go around it once; what rank 0 tells all others goes down a binomial tree. These are its bytes
    without headers, as counted with two and with four ranks.

    Args:
        kind: "all_reduce", "all_gather" or "broadcast".
        nbytes: of the rank's tensor.
        num_ranks: N.
        is_over_memory: whether ranks share memory.
    """
    if is_over_memory:
        return nbytes
    times = {
        "all_reduce": 2 * (num_ranks - 1) / num_ranks,
        "all_gather": num_ranks - 1,
        "broadcast": (num_ranks - 1).bit_length(),
    }
    return times[kind] * nbytes


def exchange_figures(decoded: Decoded, num_ranks: int) -> dict[str, float]:
    """Exchanges of one run.

    Returns:
        ``sent_bytes_per_token`` by rank 0, of all kinds; ``all_reduce_share`` and ``exchange_share`` of the time of a
        step; by kind ``..._per_step``, ``..._ms_per_step`` and ``..._bytes_per_token``.
    """
    tokens, steps, seconds, kinds = (decoded[name] for name in ("tokens", "steps", "seconds", "exchanges"))
    way = num_ranks, bool(decoded["is_over_memory"])
    sent = {kind: sent_bytes(kind, found["nbytes"], *way) / tokens for kind, found in kinds.items()}
    figures = {
        "sent_bytes_per_token": sum(sent.values()),
        "all_reduce_share": kinds["all_reduce"]["seconds"] / seconds,
        "exchange_share": sum(found["seconds"] for found in kinds.values()) / seconds,
    }
    for kind, found in kinds.items():
        figures[f"{kind}_per_step"] = found["calls"] / steps
        figures[f"{kind}_ms_per_step"] = 1e3 * found["seconds"] / steps
        figures[f"{kind}_bytes_per_token"] = sent[kind]
    return figures


def rows_of(played: Mapping[tuple[int, str], Sequence[Decoded]], num_ranks: int) -> list[dict[str, Any]]:
    """A row for each batch and way.

    Args:
        played: the rounds of each batch and way; of each batch, one process with the threads of one rank comes first,
            then one process with those of all of them, then the ranks.
        num_ranks: N.

    Returns:
        ``batch``, ``way`` and medians with ranges: ``tokens_per_second``, ``step_ms``, ``over_first``, the ratio of
        tokens per second to the first way in the same round, and of the ranks ``exchange_figures``.
    """
    rows, first = list[dict[str, Any]](), dict[int, list[float]]()
    for (batch, way), rounds in played.items():
        speeds = [decoded["tokens"] / decoded["seconds"] for decoded in rounds]
        of_first = first.setdefault(batch, speeds)
        ratios = [own / other for own, other in zip(speeds, of_first, strict=True)]
        row: dict[str, Any] = {"batch": batch, "way": way}
        row["tokens_per_second"] = median_with_range(speeds, DIGITS)
        row["step_ms"] = median_with_range([1e3 * each["seconds"] / each["steps"] for each in rounds], DIGITS)
        row["over_first"] = median_with_range(ratios, DIGITS)
        if rounds[0]["exchanges"]:
            found = [exchange_figures(decoded, num_ranks) for decoded in rounds]
            row |= {name: median_with_range([each[name] for each in found], DIGITS) for name in found[0]}
        rows.append(row)
    return rows
