"""What all measuring programs share: the flags of reports, their files, and the facts about the machine in them.

A configuration that derives from ``ReportOptions`` has the flags ``--json FILE`` and ``--plot FILE.png``; both are
checked when the flags are read (``checked_file``), so that a long run does not fail when it writes its report.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

import specmamba
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".png", ".svg", ".pdf")
FIRST_LINE_S, NEXT_LINE_S = 1.5, 10.0  # of progress
Count = Annotated[int, Field(ge=1)]
# For benchmarks that run a text several times: a prefix cached by one run would make the next one faster.
NoRadixCache = Annotated[
    bool,
    Field(description="share no prefixes; on here, or a repeated text would find its own (--no-disable-radix-cache)"),
]
_ReportFile = Annotated[Path | None, Field(description="write all figures to this file")]

with warnings.catch_warnings():
    # The flag, SPECMAMBA_JSON and the key in a --config file are called "json", and so is a deprecated method of
    # pydantic, which nothing here calls.
    warnings.filterwarnings("ignore", 'Field name "json"', UserWarning)

    class JsonFile(BaseModel):
        """The flag ``--json``; ``config.json`` is the path or None."""

        json: _ReportFile = None  # type: ignore[assignment]

        @field_validator("json")
        @classmethod
        def _can_be_written(cls, path: Path | None) -> Path | None:
            return None if path is None else checked_file(path)


FixedDrafts = Annotated[Literal["auto", "off"], Field(description="auto: sizes of drafts follow cost and acceptance")]


class JsonOption(EngineConfig, JsonFile):
    """The engine's flags and ``--json``. Drafts have fixed sizes, unless a tool or its user says otherwise."""

    speculative_adaptive: FixedDrafts = "off"


def refuse_draft_flags(config: JsonOption, kept: Collection[str], instead: str) -> None:
    """Refuse flags of drafts, but for ``kept`` ones, in a command that sets them itself.

    Raises:
        ConfigError: some were given; it says that the command drafts ``instead``.
    """
    own = {"speculative_adaptive"} if config.speculative_adaptive == "off" else set()
    given = {name for name in config.model_fields_set if name.startswith("speculative_")} - set(kept) - own
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise ConfigError(f"{names}: this benchmark {instead}")


class ReportOptions(JsonOption):
    """The engine's flags, ``--json`` and ``--plot``; ``config.json`` and ``config.plot`` are paths or None."""

    plot: Annotated[Path | None, Field(description="draw the figures into this file: .png, .svg or .pdf")] = None

    @field_validator("plot")
    @classmethod
    def _can_be_drawn(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in PICTURE_FORMATS:
            raise ValueError(f"the name of a picture ends with {' or '.join(PICTURE_FORMATS)}")
        if path is not None:
            require_matplotlib("--plot")
        return None if path is None else checked_file(path)


def checked_file(path: Path) -> Path:
    """Check that a file can be written, without writing it. Raises ValueError with the reason."""
    try:
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise ValueError("this is a folder, not a file")
        exists = path.exists()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    if not os.access(path if exists else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: no permission")
    return path


def require(package: str, what: str) -> None:
    """Check that a package of the "bench" extra is there, without importing it.

    Raises:
        ConfigError: it is missing; the message says how to install it.
    """
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}, which is not installed: pip install 'specmamba[bench]'")


def require_matplotlib(what: str) -> None:
    """Check that matplotlib is there; ``ReportOptions`` does so when ``--plot`` is given."""
    require("matplotlib", what)


def machine() -> str:
    """Name the processor and the number of cores, for reports."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions(packages: Sequence[str] = ("specmamba", "torch", "transformers")) -> dict[str, str]:
    """Versions by package; specmamba's own also if it runs from a checkout. Raises PackageNotFoundError."""
    return {name: specmamba.__version__ if name == "specmamba" else version(name) for name in packages}


def median_with_range(values: Sequence[float], digits: int) -> dict[str, Any]:
    """{"median", "range": [smallest, largest]}, rounded to ``digits`` behind the point."""
    return {
        "median": round(statistics.median(values), digits),
        "range": [round(min(values), digits), round(max(values), digits)],
    }


def range_text(figure: Mapping[str, Any], number: Callable[[float], str]) -> str:
    """A figure of ``median_with_range`` as "median (smallest-largest)", each written by ``number``."""
    low, high = map(number, figure["range"])
    return f"{number(figure['median'])} ({low}-{high})"


def three_digits(value: float) -> str:
    """A number with three digits, or all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def distinct_4gram_ratio(tokens: Sequence[Hashable]) -> float:
    """Share of distinct runs of four tokens; far below 1 the text loops, which makes it easy to draft."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, q in 0..100, linear between the two nearest of ``values``; NaN when there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = q / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def split_numbers(value: object) -> object:
    """Split "1,2,4" of the command line or the environment; a single number, of a TOML file, becomes a tuple."""
    if isinstance(value, str):
        return tuple(value.split(","))
    return (value,) if isinstance(value, int | float) else value


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show on standard error how far a measurement is; call the yielded function once per finished part.

    A bar on a terminal; elsewhere a line after ``FIRST_LINE_S`` seconds and then one every ``NEXT_LINE_S`` at the most.
    """
    if not sys.stderr.isatty():
        lines = _ProgressLines(label, total)
        try:
            yield lines.advance
        finally:
            lines.end()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),  # a part may take minutes
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


class _ProgressLines:
    """Progress where standard error is a file or a pipe."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._next_at = time.monotonic() + FIRST_LINE_S
        self._timer = threading.Timer(FIRST_LINE_S, self._say)  # the first part may take long
        self._timer.daemon = True
        self._timer.start()

    def advance(self) -> None:
        self._done += 1
        if time.monotonic() >= self._next_at:
            self._say()

    def end(self) -> None:
        self._timer.cancel()

    def _say(self) -> None:
        self._next_at = time.monotonic() + NEXT_LINE_S
        print(f"{self._label or 'measuring'}: {self._done} of {self._total}", file=sys.stderr, flush=True)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report; NaN and infinities become null.

    Raises:
        ConfigError: the file cannot be written; the message names ``--json``.
    """
    try:
        path.write_text(json.dumps(_without_nan(report), indent=2, allow_nan=False) + "\n", "utf8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from None


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a matplotlib figure to draw on, and write it to ``path`` at the end.

    Args:
        path: ends with one of ``PICTURE_FORMATS``.
        width: inches.
        height: inches.

    Raises:
        ConfigError: the file cannot be written; the message names ``--plot``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}") from None


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value
