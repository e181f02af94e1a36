"""The report of a comparison with llama.cpp as tables."""

from __future__ import annotations

from collections.abc import Iterator

from specmamba.measure.command import Page, Report, versions_text

BUSY = 0.5  # processes that ran before the benchmark, on average over a minute
MB = 1e6


def print_report(report: Report) -> None:
    """Print what ran, a table for each setting, and one of first tokens."""
    page = Page()
    page.lines(*_title(report))
    for setting in report["settings"]:
        page.lines("", *_setting_lines(setting))
        page.table(
            ("decoding", "specmamba, tokens/s", "accepted", "llama.cpp, tokens/s", "accepted", "ratio"),
            [_row(setting, mode) for mode in setting["specmamba"]],
        )
        page.lines(*_summary(setting))
    if report["first_tokens"]:
        page.lines("", "time to the first token, ms; ratio: specmamba over llama.cpp, smaller is better")
        page.table(
            ("format", "llama.cpp's", "prompt", "decoding", "specmamba", "llama.cpp", "ratio"),
            [_first_token_row(row) for row in report["first_tokens"]],
            text_columns=(0, 1, 3),
        )


def _title(report: Report) -> Iterator[str]:
    native, llama = report["native"], report["llama_cpp"]
    threads, load = report["threads"], report["load_average"]
    kernels = f"{native['level']} ({native['origin']})" if native["level"] else f"PyTorch ({native['reason']})"
    work = f"{report['max_tokens']} new tokens, {report['num_prompts']} prompts, {report['rounds']} rounds in turns"
    yield f"{report['model']}, {work}; medians (smallest to largest)"
    yield f"{report['machine']}; {versions_text(report)}; kernels {kernels}; threads {threads['specmamba']}"
    features = " ".join(llama["cpu_features"] or ["unknown features"])
    yield f"llama.cpp {llama['version']}, {llama['compiler']}: {features}; threads {threads['llama_cpp']}"
    if load > BUSY:
        yield (
            f"warning: {load:.1f} other processes ran when this began: threads that wait for each other then lose "
            "most of their time; measure on an idle machine"
        )


def _setting_lines(setting: Report) -> Iterator[str]:
    weights, speed = setting["weight_bytes"], setting["memory_gb_per_s"]
    compared = f"{setting['format']} against {setting['gguf']}"
    yield f"{compared}, temperature {setting['temperature']:g}, batch {setting['batch']}"
    own_ms = weights["specmamba"] / speed["median"] / 1e6
    yield (
        f"weights {weights['specmamba'] / MB:.1f} MB, GGUF {weights['llama_cpp'] / MB:.1f} MB with its MTP block; "
        f"memory delivers weights with {_spread(speed, 1)} GB/s: {own_ms:.2f} ms for all"
    )


def _row(setting: Report, mode: str) -> tuple[str, ...]:
    cells = [mode]
    for side in ("specmamba", "llama_cpp"):
        figures = setting[side].get(mode)
        cells += (
            ["", ""] if figures is None else [_spread(figures["tokens_per_s"], 1), f"{figures['accept_length']:.2f}"]
        )
    ratio = setting["ratios"].get(mode)
    return (*cells, "" if ratio is None else _spread(ratio, 2))


def _summary(setting: Report) -> Iterator[str]:
    best = setting["best"]
    yield f"best over best: {_spread(best['ratio'], 2)}, {best['specmamba']} over llama.cpp's {best['llama_cpp']}"
    for mode, same in setting["equal_tokens"].items():
        yield f"{mode}: the texts agree for {_spread(same, 0)} tokens"


def _first_token_row(row: Report) -> tuple[str, ...]:
    times = (_spread(row[side], 1) for side in ("specmamba_ms", "llama_cpp_ms"))
    return row["format"], row["gguf"], str(row["num_tokens"]), row["mode"], *times, _spread(row["ratio"], 2)


def _spread(figures: Report, digits: int) -> str:
    low, high = figures["range"]
    return f"{figures['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
