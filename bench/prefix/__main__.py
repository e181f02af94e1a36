"""What the prefix cache spares: hit rates against an oracle, time to first token with and without it, and its costs.

    specmamba bench prefix [--workloads shared,chat,branch,agent,pressure,ttft,disk,writing,costs,swing,elastic]
                           [--json FILE] [--plot FILE.png] [any engine flag]

Every wave of requests runs on an engine with the cache and on one without, in turns, with greedy decoding, and the
outputs are compared. In float32 (the default here) a text that differs is an error: the exit status is 1. The pools
hold everything of a workload that can be cached, except for ``pressure``, which gets a share of that and runs with both
eviction policies; the engine without the cache has enough memory there too. workloads.py describes the workloads,
texts.py the oracle, figures.py each figure; ``ttft`` is in run.py, ``costs`` in costs.py and decoding.py; ``disk`` is
in disk.py and ``writing`` in writing.py: with ``--hicache-storage-backend mooncake`` they measure a store in place of
the disk. Only where they are named: ``swing``, in splits.py, and ``elastic``, in elastic_costs.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmamba.bench.prefix.engines import SHARING, PrefixBenchConfig
from specmamba.errors import ConfigError
from specmamba.measure.command import Page, put_out, run_command, versions_text
from specmamba.measure.report import range_text

PROG = "specmamba bench prefix"
Figures = Mapping[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 when a text differs in float32, 130 after Ctrl-C."""
    return run_command(PROG, PrefixBenchConfig, arguments, _run)


def _run(config: PrefixBenchConfig) -> int:
    report = measure_and_report(config)
    put_out(config, report, print_report, plot_report)
    return 1 if report["dtype"] == "float32" and report["different_texts"] else 0


def measure_and_report(config: PrefixBenchConfig) -> dict[str, Any]:
    """Measure everything that was asked for; the report as a JSON object. Raises SpecmambaError."""
    from specmamba.bench.prefix.costs import measure_costs
    from specmamba.bench.prefix.disk import measure_disk
    from specmamba.bench.prefix.elastic_costs import measure_elastic
    from specmamba.bench.prefix.engines import start_cold_engine
    from specmamba.bench.prefix.figures import full_report
    from specmamba.bench.prefix.run import measure_ttft, run_workloads
    from specmamba.bench.prefix.splits import measure_swing
    from specmamba.bench.prefix.texts import read_source
    from specmamba.bench.prefix.writing import measure_writing

    with start_cold_engine(config) as cold:
        source = read_source(config.prompts, cold.engine.tokenizer)
        names = [name for name in config.workloads if name in SHARING]
        plays = run_workloads(config, cold, source, names) if names else []
        ttft = measure_ttft(config, cold, source) if "ttft" in config.workloads else None
        disk = measure_disk(config, cold, source) if "disk" in config.workloads else None
        description, num_threads = cold.engine.describe(), cold.engine.num_threads
        context_length = cold.engine.context_length
    writing = measure_writing(config, source, context_length) if "writing" in config.workloads else None
    costs = measure_costs(config, source) if "costs" in config.workloads else None
    swing = measure_swing(config, source) if "swing" in config.workloads else None
    elastic = measure_elastic(config, source) if "elastic" in config.workloads else None
    return full_report(config, description, num_threads, source, plays, ttft, disk, writing, costs, swing, elastic)


def print_report(report: Figures) -> None:
    """Print a row per workload, then time to first token, costs, and remarks."""
    page = Page()
    page.lines(title(report))
    if report["workloads"]:
        page.table(
            (
                *("workload", "requests\n(wave)", "prompt\ntokens", "hit\nrate", "oracle", "ratio"),
                *("first token, ms\nwith (p50/p90)", "without\n(p50/p90)", "p50\nratio", "missed because"),
                *("evicted\ntokens/states", "nodes/states\nat the end", "text"),
            ),
            [_cells(figures) for figures in report["workloads"]],
            text_columns=(0, 12),
        )
    page.lines(
        *_about_ttft(report["ttft"]),
        *_about_disk(report["disk"]),
        *_about_writing(report["writing"]),
        *_about_costs(report["costs"]),
        *_about_swing(report["swing"]),
        *_about_elastic(report["elastic"]),
        *_remarks(report),
    )


def title(report: Figures) -> str:
    """What was run, in one line."""
    return (
        f"{report['model']}, {report['dtype']} on {report['device']}, {report['algorithm']} drafts of "
        f"{report['num_draft_tokens']} nodes, {report['strategy']}, pages of {report['page_size']}, chunks of "
        f"{report['chunked_prefill_size']}, waves of at least {report['concurrency']} while so many ask, "
        f"{report['output_tokens']} new tokens each"
    )


def label_of(figures: Figures) -> str:
    """A workload's name, with the policy where it has been run with both."""
    name: str = figures["workload"]
    return f"{name} {figures['cache_eviction']}" if name == "pressure" else name


def _cells(figures: Figures) -> list[str]:
    misses = [f"{reason} {count}" for reason, count in figures["miss_reasons"].items() if count]
    different = figures["different_texts"]
    times = figures["ttft_ms"]
    return [
        label_of(figures),
        f"{figures['requests']} ({figures['largest_wave']})",
        str(figures["prompt_tokens"]),
        f"{figures['hit_rate']:.3f}",
        f"{figures['oracle_hit_rate']:.3f}",
        _number(figures["ratio_to_oracle"]),
        *("{p50:.1f}/{p90:.1f}".format(**times[name]) for name in ("with_cache", "without_cache")),
        _number(figures["ttft_ratio"]),
        "\n".join(misses) or "-",
        f"{figures['evicted_tokens']}/{figures['evicted_states']}",
        f"{figures['num_nodes']}/{figures['num_states']}",
        "same" if not different else f"{different} DIFFER",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _about_ttft(ttft: Figures | None) -> list[str]:
    if ttft is None:
        return []
    lines = []
    for name, who in (("ttft_shared", "from the third user on"), ("ttft_second_user", "second user")):
        low, high = ttft[f"{name}_ratio_range"]
        times = ttft[f"{name}_ms"]
        lines.append(
            f"first token of a prompt of {ttft['prompt_tokens']} tokens that shares {ttft['shared_tokens']}, {who}: "
            f"{ttft[f'{name}_ratio']:.3f} of cold ({low:.3f}-{high:.3f}; {times['with_cache']:.1f} of "
            f"{times['without_cache']:.1f} ms), {ttft[f'{name}_cached_tokens']} tokens cached"
        )
    return lines


def _about_disk(disk: Figures | None) -> list[str]:
    if disk is None:
        return []
    place = disk["place"]
    names = {
        "writing": "computed, and written meanwhile",
        "memory": "from the pools",
        "host": "from host memory",
        "disk": "from disk, the files in the page cache",
        "disk_dropped": "from disk, the files out of the page cache",
        "store": "from the store",
        "restart": f"from the {place}, after a restart",
    }
    lines = [
        f"first token of a prompt of {disk['prompt_tokens']} tokens, {name}: {disk[f'{kind}_ratio']:.3f} of cold "
        f"({disk[f'{kind}_ratio_range'][0]:.3f}-{disk[f'{kind}_ratio_range'][1]:.3f})"
        for kind, name in names.items()
        if f"{kind}_ratio" in disk
    ]
    costs = (
        f"host memory: copying a prompt there takes {disk['evict_ratio']:.3f} of computing it; "
        f"{place}: {disk['written_bytes_per_token']} bytes a token, loading takes {disk['load_share']:.0%} of the time "
        f"to a first token from the {place}; {disk['cached_tokens']} tokens cached, {disk['lost_writes']} writes lost"
    )
    return [*lines, costs]


def _about_writing(writing: Figures | None) -> list[str]:
    if writing is None:
        return []
    ratios = [f"{name} {range_text(writing[f'{name}_ratio'], '{:.3f}'.format)}" for name in ("p50", "p99")]
    line = (
        f"time between tokens of {writing['streams']} streams while prefixes of {writing['prompt_tokens']} tokens go "
        f"to the {writing['place']}, over that without it: {', '.join(ratios)}; {writing['written_bytes']} bytes "
        f"written, {writing['lost_writes']} writes lost"
    )
    return [line]


def _about_costs(costs: Figures | None) -> list[str]:
    if costs is None:
        return []
    tree, engine = costs["tree"], costs["engine"]
    growth = "" if tree["growth"] is None else f", growing as its length to the power of {tree['growth']:.2f}"
    if tree["last_doubling"] is not None:
        growth = f", {tree['last_doubling']:.2f}x that of half of it"
    about_tree = (
        f"tree: a prompt of {tree['tokens'][-1]} tokens takes {tree['insert_ms'][-1]:.2f} ms to insert in chunks of "
        f"{tree['chunk_tokens']} and {tree['match_ms'][-1]:.2f} ms to match, {tree['share_of_prefill'][-1]:.3%} of its "
        f"prefill at {engine['prefill_us_per_token']:.0f} us a token{growth}"
    )
    about_engine = (
        f"engine: of {engine['prefill_ms']:.1f} ms to the first token of a prompt of {engine['tokens']} tokens that "
        f"finds nothing, the cache takes {engine['share']:.3%} (admission {engine['acquire_ms']:.2f} ms, chunk ends "
        f"{engine['leave_chunk_ms']:.2f} ms)"
    )
    return [about_tree, about_engine, *(_about_decoding(name, each) for name, each in costs["decode"].items())]


def _about_decoding(strategy: str, decode: Figures) -> str:
    shares = ", ".join(f"{name} {share:.2%}" for name, share in decode["shares"].items())
    interval = decode["track_interval"]
    left = ""
    if interval is not None:
        each = f"{decode['states_left']} in all, {decode['leave_ms_per_state']:.2f} ms each"
        left = f", a state every {interval} tokens, {each}"
    return (
        f"decoding, {strategy}: of a step of {decode['step_ms']:.2f} ms with {decode['requests']} requests, "
        f"bookkeeping takes {decode['bookkeeping_share']:.2%} ({shares}; {decode['steps']} steps{left})"
    )


def _about_swing(swing: Figures | None) -> list[str]:
    if swing is None:
        return []
    lines = []
    for half in ("short", "long"):
        for name, figures in swing["splits"].items():
            each = figures[half]
            lines.append(
                f"swing, {half} requests, {'ratio ' * (name != 'elastic')}{name}: {each['hit_tokens']} of "
                f"{each['prompt_tokens']} tokens cached, {each['preemptions']} preemptions, "
                f"{range_text(each['tokens_per_second'], '{:.0f}'.format)} tokens/s; at the end KV of "
                f"{each['kv_pool_tokens']} tokens, {each['state_slots']} states"
            )
        over = range_text(swing[half]["speed_over_best"], "{:.3f}".format)
        lines.append(f"swing, {half} requests: elastic pools have {over} of the speed of the best fixed split")
    moved = swing["splits"]["elastic"]
    line = f"{moved['moves']} times, copying {moved['moved_tokens']} tokens and {moved['moved_states']} states"
    return [*lines, f"swing: the line between elastic pools moved {line}"]


def _about_elastic(elastic: Figures | None) -> list[str]:
    if elastic is None:
        return []
    lines = [
        f"{move['moved_bytes'] / 2**20:.2f} MiB of {'pages' if move['to'] == 'states' else 'slots'} become "
        f"{move['to']}, {move['copied_bytes'] / 2**20:.2f} MiB copied: {range_text(move['ms'], '{:.3f}'.format)} ms"
        for move in elastic["moves"]
    ]
    for step in elastic["steps"]:
        ratio = range_text(step["ratio"], "{:.3f}".format)
        lines.append(
            f"a step of {step['requests']} requests{', captured' * step['captured']}, elastic pools over fixed ones: "
            f"{ratio} ({step['elastic_ms']['median']:.3f} and {step['fixed_ms']['median']:.3f} ms)"
        )
    return lines


def _remarks(report: Figures) -> list[str]:
    lines = []
    for figures in report["workloads"]:
        lost = figures["lost_most"]
        if lost:
            worst = lost[0]
            lines.append(
                f"{label_of(figures)}: furthest behind the oracle is request {worst['request']} ({worst['kind']}), "
                f"{worst['hit_tokens']} of {worst['oracle_tokens']} tokens"
            )
    if any(figures["workload"] == "pressure" for figures in report["workloads"]):
        lines.append("pressure: without the cache, the engine has roomy memory: its first tokens wait for no room")
    if report["different_texts"]:
        verdict = "an error" if report["dtype"] == "float32" else "rounding, or an error: compare in float32"
        lines.append(f"DIFFERENT TEXTS: {report['different_texts']}, with the cache and without: {verdict}")
    text = f"{report['prompts']}, {report['text']['tokens']} tokens of {report['text']['documents']} documents"
    where = f"{report['machine']}, threads: {report['threads']}; {versions_text(report)}"
    return [*lines, f"{where}; text: {text}, seed {report['seed']}"]


def plot_report(path: Path, report: Figures) -> None:
    """Hit rates beside the oracle's, and time to first token beside that without the cache, by workload.

    Raises:
        ConfigError: the file cannot be written; the message names ``--plot``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workloads = report["workloads"]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    places = range(len(workloads))
    _bars(left, [each["hit_rate"] for each in workloads], -0.2, "cache")
    _bars(left, [each["oracle_hit_rate"] for each in workloads], 0.2, "oracle")
    left.set(ylabel="share of prompt tokens spared", ylim=(0, 1))
    for name, shift in (("with_cache", -0.2), ("without_cache", 0.2)):
        times = [each["ttft_ms"][name] for each in workloads]
        bars = _bars(right, [each["p50"] for each in times], shift, name.replace("_", " "))
        right.plot([i + shift for i in places], [each["p90"] for each in times], "_", color=bars, markersize=12)
    right.set(ylabel="time to first token, ms: median, and 90th percentile")
    for axes in (left, right):
        axes.set_xticks(list(places), [label_of(each).replace(" ", "\n") for each in workloads])
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
    figure.suptitle(title(report), fontsize=8, wrap=True)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}") from None


def _bars(axes: Any, values: list[float], shift: float, label: str) -> Any:
    """Draw bars beside others; their colour."""
    bars = axes.bar([i + shift for i in range(len(values))], values, width=0.38, label=label)
    return bars.patches[0].get_facecolor()


if __name__ == "__main__":
    sys.exit(main())
