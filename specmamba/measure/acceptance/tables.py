"""The figures of the acceptance benchmark as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.measure.prompts import looping_warning, sampling_name
from specmamba.measure.report import picture

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Figures = Mapping[str, Any]
WIDTH = 124  # characters that the table needs
BAR = 40  # characters of the longest bar
MAX_SHOWN = 10  # differences


def print_report(report: Mapping[str, Any]) -> None:
    """Print a table with a row per configuration, then details, notes and warnings."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # a narrow terminal folds lines, but no figure is cut off
    configurations = report["configurations"]
    console.print(title(configurations[0]), markup=False, soft_wrap=True)
    console.print(_table(report))
    if len(configurations) == 1:
        _print_histogram(console, configurations[0])
    for line in _remarks(report):
        console.print(line, markup=False, soft_wrap=True)


def title(figures: Figures) -> str:
    """Describe the run in one line."""
    synthetic = figures["synthetic_acceptance"]
    sampling = sampling_name(figures["temperature"])
    label = "" if synthetic is None else f"synthetic acceptance {synthetic:g}, "
    return (
        f"{label}{figures['model']}, {figures['dtype']} on {figures['device']}, {figures['algorithm']} drafts, "
        f"{figures['state']}, {sampling}, {figures['num_prompts']} prompts x {figures['max_tokens']} tokens, "
        f"batch {figures['batch_size']}, median of {figures['rounds']} rounds"
    )


def _table(report: Mapping[str, Any]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    name = "accepted" + ("" if report["configurations"][0]["synthetic_acceptance"] is None else "\n(synthetic)")
    speeds = ("tokens/s", "speed-up\n(range)", "whole\ncall")
    columns = (*speeds, "draft\nms", "verify\nms", "commit\nms", "break-\neven", "4-grams")
    table = Table("steps, topk,\ntokens", name, *columns, "text", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns[:-1]:
        column.no_wrap = True
        column.justify = "right" if column.header in (name, *columns) else "left"
    table.add_row(*_plain_cells(report["plain"]), end_section=True)
    for figures in report["configurations"]:
        table.add_row(*_cells(figures))
    if "adaptive" in report:
        table.add_section()
        table.add_row(*_adaptive_cells(report["adaptive"]))
    return table


def _plain_cells(plain: Figures) -> list[str]:
    return ["plain", "1.00", f"{plain['tokens_per_second']:.1f}", "1", "1", *_times(plain), "", _share(plain), ""]


def _cells(figures: Figures) -> list[str]:
    low, high = figures["speedup_range"]
    return [
        shape_name(figures),
        f"{figures['accept_length']:.2f}",
        f"{figures['speculative_tokens_per_second']:.1f}",
        f"{figures['speedup']:.2f} ({low:.2f}-{high:.2f})",
        f"{figures['end_to_end_speedup']:.2f}",
        *_times(figures),
        f"{figures['break_even_accept_length']:.2f}",
        _share(figures),
        _verdict(figures),
    ]


def _adaptive_cells(figures: Figures) -> list[str]:
    length, whole = f"{figures['accept_length']:.2f}", f"{figures['end_to_end_speedup']:.2f}"
    return [shape_name(figures), length, "", "", whole, "", "", "", "", _share(figures), _verdict(figures)]


def shape_name(figures: Figures) -> str:
    """The shape of the drafts in the notation of published tables: (steps, topk, nodes)."""
    if "nodes_per_request" in figures:
        return "adaptive"
    return f"({figures['num_steps']}, {figures['topk']}, {figures['num_draft_tokens']})"


def _times(figures: Figures) -> list[str]:
    return [f"{figures[name]:.2f}" for name in ("draft_ms", "verify_ms", "commit_ms")]


def _share(figures: Figures) -> str:
    return f"{figures['distinct_4gram_ratio']:.2f}"


def _verdict(figures: Figures) -> str:
    counts = figures["lossless"]
    if counts is None:
        return "not compared"
    shown = {"identical": "same", "near_tie": "near tie", "diverged": "DIVERGED"}
    return ", ".join(f"{counts[kind]} {word}" for kind, word in shown.items() if counts[kind])


def _print_histogram(console: Console, figures: Figures) -> None:
    shares = ", ".join(f"{d}: {share:.0%}" for d, share in enumerate(figures["acceptance_per_position"], 1))
    console.print(f"steps that accepted at least so many drafts: {shares}", markup=False)
    histogram = figures["accept_length_histogram"]
    total, largest = sum(histogram), max(histogram)
    for accepted, count in enumerate(histogram):
        bar = "#" * round(BAR * count / largest)
        console.print(f"  exactly {accepted:>2}  {count / total:>4.0%}  {bar}", markup=False)


def _remarks(report: Mapping[str, Any]) -> list[str]:
    configurations = [*report["configurations"], *([report["adaptive"]] if "adaptive" in report else [])]
    lines = [f"note: {note}" for note in report["notes"]]
    lines += _about_near_ties(configurations)
    for figures in configurations:
        lines += _about_divergences(figures)
    if "adaptive" in report:
        lines += _about_sizes(report["adaptive"])
    run = configurations[0]
    if run["synthetic_acceptance"] is None:
        lines += looping_warning(min(f["distinct_4gram_ratio"] for f in configurations), run["replay"])
    lines.append(
        "tokens/s and speed-up: decoding in full batches, without prefill, queues and text; whole call: with all"
    )
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines.append(f"{run['machine']}, threads: {run['threads']}; {versions}")
    return lines


def _about_near_ties(configurations: Sequence[Figures]) -> list[str]:
    """Compare the largest shift of the near ties with its bound."""
    ties = [each for figures in configurations for each in figures["differences"] if each["kind"] == "near_tie"]
    if not ties:
        return []
    worst = max(ties, key=lambda tie: tie["shift"] / tie["bound"])
    off, explained = worst["shift"], worst["bound"]
    return [f"near ties: logits that are off by {off:.2g} explain each of them, and rounding explains {explained:.2g}"]


def _about_divergences(figures: Figures) -> list[str]:
    """Describe the divergences, at most ``MAX_SHOWN`` of them."""
    diverged = [each for each in figures["differences"] if each["kind"] == "diverged"]
    lines = [
        f"diverged: {shape_name(figures)}, prompt {each['prompt']}, token {each['position']}: plain has "
        f"{_token(each['plain_token'])}, speculative {_token(each['speculative_token'])}; logits would have to be off "
        f"by {each['shift']:.3g}, and rounding explains {each['bound']:.3g} (texts part at token "
        f"{each['first_position']})"
        for each in diverged[:MAX_SHOWN]
    ]
    if len(diverged) > MAX_SHOWN:
        lines.append(f"diverged: {shape_name(figures)}: {len(diverged) - MAX_SHOWN} more, all in --json FILE")
    return lines


def _about_sizes(figures: Figures) -> list[str]:
    """Say what was decided, and what it brought."""
    (low, high), (worst, best) = figures["end_to_end_speedup_range"], figures["over_best_fixed_range"]
    bounds = f"({figures['num_steps']}, {figures['topk']}, {figures['num_draft_tokens']})"
    fixed = f"({figures['best_fixed'].replace(',', ', ')})"
    sizes = (
        f"{figures['nodes_per_request']:.2f} nodes per request and step, drafts {figures['draft_depth']:.2f} deep, "
        f"{figures['plain_share']:.0%} of the steps plain"
    )
    speeds = (
        f"{figures['end_to_end_tokens_per_second']:.1f} tokens/s, {figures['end_to_end_speedup']:.2f} of plain "
        f"({low:.2f}-{high:.2f}), {figures['over_best_fixed']:.2f} of {fixed}, the best fixed shape "
        f"({worst:.2f}-{best:.2f})"
    )
    return [f"adaptive, at most {bounds}: {sizes}", f"adaptive, whole calls: {speeds}"]


def _token(token: int | None) -> str:
    return "the end of the text" if token is None else f"token {token}"


def plot_report(path: Path, report: Mapping[str, Any]) -> None:
    """Plot acceptance per position, and speed-up over acceptance length with the break-even points.

    Raises:
        ConfigError: the file cannot be written; the message names ``--plot``.
    """
    configurations = report["configurations"]
    with picture(path, 11, 4.6) as figure:
        left, right = figure.subplots(1, 2)
        _plot_positions(left, configurations)
        _plot_speed(right, configurations)
        figure.suptitle(title(configurations[0]), fontsize=9, wrap=True)


def _plot_positions(axes: Any, configurations: Sequence[Figures]) -> None:
    for figures in configurations:
        shares = figures["acceptance_per_position"]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=shape_name(figures))
    deepest = max(len(figures["acceptance_per_position"]) for figures in configurations)
    axes.set(
        xlabel="drafts accepted, at least",
        ylabel="share of verify steps" + _synthetic_label(configurations),
        ylim=(0, 1.02),
        xticks=range(1, deepest + 1, max(1, deepest // 8)),
    )
    axes.grid(alpha=0.3)
    axes.legend(title="(steps, topk, tokens)")


def _plot_speed(axes: Any, configurations: Sequence[Figures]) -> None:
    """Plot speed-up over acceptance length; a cross marks the break-even length, at which the speed-up is 1."""
    for i, figures in enumerate(configurations):
        color = f"C{i % 10}"
        low, high = figures["speedup_range"]
        x, y = figures["accept_length"], figures["speedup"]
        axes.errorbar(x, y, yerr=[[max(0.0, y - low)], [max(0.0, high - y)]], fmt="o", color=color, capsize=3)
        axes.annotate(shape_name(figures), (x, y), xytext=(6, 4), textcoords="offset points")
        axes.plot([figures["break_even_accept_length"], x], [1, y], ":", color=color)
        axes.plot(figures["break_even_accept_length"], 1, "x", color=color)
    axes.axhline(1, color="black", linewidth=0.8, label="plain; x: break-even acceptance length")
    axes.set(xlabel="acceptance length" + _synthetic_label(configurations), ylabel="speed-up over plain")
    axes.margins(x=0.2, y=0.15)
    axes.grid(alpha=0.3)
    axes.legend()


def _synthetic_label(configurations: Sequence[Figures]) -> str:
    return "" if configurations[0]["synthetic_acceptance"] is None else " (synthetic)"
