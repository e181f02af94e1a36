"""The report of ``specmamba tune tree`` for people: tables and a picture. figures.py defines them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from specmamba.measure.prompts import PLAIN, looping_warning, sampling_name
from specmamba.measure.report import picture
from specmamba.trees import StaticTree

STEADY = 1.2  # factor of drift above which other programs have probably run on the machine
FITTING = 10.0  # percent; a larger median error of the cost model means that the measurement was disturbed


def print_report(report: Mapping[str, Any]) -> None:
    """Print tables of acceptance, costs, trees (predicted against measured) and contestants, then remarks."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has no width
    console.print(
        f"{report['model']}, {report['dtype']}, {report['machine']}, {report['threads']} threads; "
        f"{report['num_prompts']} texts of {report['max_tokens']} tokens, {sampling_name(report['temperature'])}, "
        f"{report['speculative_state']}, seed {report['seed']}, page size {report['page_size']}",
        markup=False,
    )
    console.print(_acceptance_table(report))
    console.print(_cost_table(report))
    if report["sizing"] is not None:
        console.print(_sizing_table(report["sizing"]["times"]))
    console.print(_tree_table(report))
    if any(len(result["contestants"]) > 1 for result in report["results"]):
        console.print(_contest_table(report))
    for line in _remarks(report):
        console.print(line, markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    return table


def _acceptance_table(report: Mapping[str, Any]) -> Any:
    odds = report["acceptance"]["probability"]
    table = _table("probability that the token has this rank", "depth", *map(str, range(len(odds[0]))), "samples")
    for depth, row in enumerate(odds):
        samples = str(report["acceptance"]["num_samples"][depth])
        table.add_row(str(depth + 1), *(f"{value:.3f}" for value in row), samples)
    return table


def _cost_table(report: Mapping[str, Any]) -> Any:
    columns = (
        "batch",
        "plain step",
        "verify of nodes",
        "draft of a chain by depth",
        "first part of a draft",
        "level of a draft by width",
        "model error",
    )
    table = _table("costs in ms; model error: median / worst", *columns)
    for size, cost in report["costs"].items():
        verify = cost["verify_ms"].get("tree", cost["verify_ms"]["chain"])
        base = cost["draft_base_ms"]
        model = cost["cost_model"]
        table.add_row(
            size,
            f"{cost['plain_step_ms']:.1f}",
            _curve(verify),
            _curve({depth: ms for depth, ms in cost["chain_draft_ms"].items() if int(depth)}),
            f"{base.get('tree', base['chain']):.1f}",
            _curve(cost["draft_level_ms"]),
            f"{model['median_error_percent']:.0f} / {model['worst_error_percent']:.0f} %",
        )
    return table


def _sizing_table(times: Mapping[str, Any]) -> Any:
    columns = "requests", "draft by depth", "rest of the step by nodes of all requests", "whole step of chains by depth"
    table = _table("times of steps for --speculative-adaptive auto, in ms", *columns)
    for size, own in times.items():
        table.add_row(size, *(_curve(own[name], 2) for name in ("draft_ms", "verify_ms", "chain_step_ms")))
    return table


def _curve(values: Mapping[int, float], digits: int = 1) -> str:
    return ", ".join(f"{x}: {ms:.{digits}f}" for x, ms in values.items()) or "-"


def _tree_table(report: Mapping[str, Any]) -> Any:
    columns = "batch", "nodes", "by depth", "accepted", "step ms", "tokens/s", "off", "speed-up", "off"
    table = _table("chosen trees: predicted -> measured", *columns)
    for result in report["results"]:
        tree = StaticTree(parents=result["parents"], ranks=result["ranks"])
        predicted, measured = result["predicted"], result["measured"]
        table.add_row(
            str(result["batch_size"]),
            str(tree.num_nodes),
            "-".join(str(tree.depths.count(depth)) for depth in range(max(tree.depths) + 1)),
            f"{predicted['accept_length']:.2f} -> {measured['accept_length']:.2f}",
            f"{predicted['step_ms']:.1f} -> {measured['step_ms']:.1f}",
            f"{predicted['tokens_per_second']:.0f} -> {measured['tokens_per_second']:.0f}",
            f"{result['deviation_percent']:+.0f} %",
            f"{predicted['speedup']:.2f} -> {measured['speedup']:.2f}",
            f"{result['speedup_deviation_percent']:+.0f} %",
        )
    return table


def _contest_table(report: Mapping[str, Any]) -> Any:
    table = _table("measured in turns", "batch", "drafts", "accepted", "step ms", "tokens/s", "speed-up", "tree is")
    for result in report["results"]:
        rows = {"tree": result["measured"], **result["contestants"]}
        for name, row in rows.items():
            ratio = result["measured"]["speedup"] / row["speedup"]
            table.add_row(
                str(result["batch_size"]),
                name,
                f"{row['accept_length']:.2f}",
                f"{row['step_ms']:.1f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['speedup']:.2f}",
                "" if name == "tree" else f"{ratio:.2f}x",
            )
        table.add_section()
    return table


def _remarks(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"wrote {report['tree_file']}: use it with --speculative-tree {report['tree_file']}",
        f"the trees were checked on {report['check_text']}",
    ]
    if report["sizing"] is not None:
        lines += _about_sizing(report["sizing"])
    if report["dropped_share"]:
        lines.append(
            f"acceptance was not recorded behind an end of text, so {report['dropped_share']:.0%} of the tokens were "
            "dropped"
        )
    for result in report["results"]:
        lines += _about_result(result)
    lines += _about_costs(report["costs"])
    return lines + looping_warning(report["distinct_4gram_ratio"], report["replay"])


def _about_sizing(sizing: Mapping[str, Any]) -> list[str]:
    """Say for which server the file of times holds."""
    file, plan = sizing["file"], sizing["drafts"]
    found = "wrote times of steps to" if sizing["is_new"] else "read times of steps of an earlier run from"
    flags = " ".join([*sizing["flags"], f"--speculative-adaptive auto --speculative-costs {file}"])
    bounds = (
        f"{plan['algorithm']} drafts of at most {plan['num_steps']} steps, topk {plan['topk']} and "
        f"{plan['num_draft_tokens']} nodes, {sizing['num_running_requests']} requests, {sizing['threads']} threads"
    )
    lines = [
        f"{found} {file}: with the model of this run, specmamba serve {flags} starts from them",
        f"they hold for {bounds}: with others, or on another machine, a server measures its own",
    ]
    curves = [list(times["chain_step_ms"].values()) for times in sizing["times"].values()]
    if any(before > STEADY * after for curve in curves for before, after in pairwise(curve)):
        lines.append(
            f"warning: {file}: steps with a longer chain took less time; something else ran here: delete it, and "
            "tune again on an idle machine"
        )
    return lines


def _about_result(result: Mapping[str, Any]) -> list[str]:
    lines, size = [], result["batch_size"]
    if len(result["parents"]) == 1:
        lines.append(f"batch size {size}: no draft pays for itself")
    drift = result["machine_drift"]
    if not 1 / STEADY < drift < STEADY:
        lines.append(
            f"warning: batch size {size}: a plain step took {drift:.1f}x as long when costs were measured as now; "
            "something else runs here: tune again when the machine is idle, or with more --rounds"
        )
    for name, row in result["contestants"].items():
        ratio = row["speedup"] / result["measured"]["speedup"]
        if ratio > 1 and name != PLAIN:
            lines.append(f"batch size {size}: {name} was {ratio:.2f}x as fast as the tree")
    return lines


def _about_costs(costs: Mapping[str, Any]) -> list[str]:
    errors = {size: cost["cost_model"]["median_error_percent"] for size, cost in costs.items()}
    return [
        f"warning: batch size {size}: the costs do not fit together, by {error:.0f} % in the median; something else "
        "runs here, so do not trust this tree: tune again when the machine is idle"
        for size, error in errors.items()
        if error > FITTING
    ]


def plot_report(path: Path, report: Mapping[str, Any]) -> None:
    """Plot acceptance by depth and rank as a heat map, and the predicted speed over nodes for every batch size.

    Raises:
        ConfigError: the file cannot be written; the message names ``--plot``.
    """
    with picture(path, 12, 4.6) as figure:
        left, right = figure.subplots(1, 2)
        _plot_acceptance(figure, left, report["acceptance"]["probability"])
        for result in report["results"]:
            _plot_speeds(right, result)
        right.set(xlabel="nodes of the tree, root included", ylabel="tokens per second and request")
        right.set_title("predicted speed; star: chosen, cross: measured")
        right.set_ylim(0, 1.1 * right.get_ylim()[1])
        right.grid(alpha=0.3)
        right.legend(title="batch size")
        figure.suptitle(f"{report['model']}, {report['dtype']}, {sampling_name(report['temperature'])}")


def _plot_acceptance(figure: Any, axes: Any, odds: Sequence[Sequence[float]]) -> None:
    image = axes.imshow(odds, cmap="viridis", vmin=0, aspect="auto")
    figure.colorbar(image, ax=axes)
    highest = max(map(max, odds))
    for depth, row in enumerate(odds):
        for rank, value in enumerate(row):
            color = "black" if value > 0.6 * highest else "white"
            axes.text(rank, depth, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(odds[0])))
    axes.set_yticks(range(len(odds)), range(1, len(odds) + 1))
    axes.set(xlabel="rank in the draft head's list", ylabel="depth", title="probability of the token that came")


def _plot_speeds(axes: Any, result: Mapping[str, Any]) -> None:
    size = result["batch_size"]
    speeds = {int(nodes): speed / size for nodes, speed in result["predicted_tokens_per_second_by_nodes"].items()}
    (line,) = axes.plot(list(speeds), list(speeds.values()), label=str(size))
    nodes = len(result["parents"])
    axes.plot(nodes, result["predicted"]["tokens_per_second"] / size, "*", ms=14, color=line.get_color())
    axes.plot(nodes, result["measured"]["tokens_per_second"] / size, "x", ms=9, color=line.get_color())
    plain = result["contestants"][PLAIN]["tokens_per_second"] / size
    axes.plot(1, plain, "x", ms=9, color=line.get_color())
