"""Runs the parts of ``specmamba bench gpu`` one after the other, within its time, and writes what it has after each."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmamba.bench.gpu.plan import DEMO, Block, Budget, dry_plan, full_plan
from specmamba.bench.gpu.sanitizer import TOOLS, check_tools
from specmamba.errors import ConfigError
from specmamba.measure.report import write_json

if TYPE_CHECKING:
    from specmamba.bench.gpu.rows import Load

NO_TIME = "no time"
DISK_BYTES = {"qwen3.5-4b": 8e9, "qwen3.5-9b": 16e9}  # of a checkpoint, in bfloat16
# products have at least 16 rows: those behind N nodes x heads of a key head are padding, in registers
SMALL_TEST = "tests/kernels/triton/test_paged_attention_triton.py::test_fewer_rows_than_a_product"
DRY_TEST = "tests/project/test_layering.py::test_the_walk_follows_the_links"
TEXTS, DRY_TEXTS = (8, 96), (1, 12)  # prompts, and tokens of each
MAX_TESTS_S = 240.0
MAX_TOOL_S = 60.0
MAX_ERROR_TEXT = 200  # characters


@dataclass
class Session:
    """One run. ``report`` grows; ``path`` holds what it has after every row."""

    report: dict[str, Any]
    path: Path
    budget: Budget
    is_dry: bool
    say: Callable[[str], None]

    def save(self) -> None:
        """Raises ConfigError: the file cannot be written."""
        self.report["seconds"] = self.budget.limit_s - self.budget.left_s
        write_json(self.path, self.report)

    def leave_out(self, what: str, why: str) -> None:
        """Report a part that is left out."""
        self.report["left_out"].append({"what": what, "why": why})
        self.say(f"left out: {what}: {why}")
        self.save()

    def fail(self, what: str, error: Exception) -> None:
        """Report a part that could not run; the next parts run all the same."""
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_TEXT]
        self.report["failed"].append({"what": what, "error": text})
        self.say(f"could not run: {what}: {text}")
        self.save()


def run_all(session: Session) -> None:
    """Run the smallest trees, tests, the sanitizer, texts, operators and rows: correctness first, then speed."""
    parts = {
        "small trees": _run_small_trees,
        "tests": _run_tests,
        "sanitizer": _run_sanitizer,
        "texts": _run_texts,
        "operators": _run_operators,
    }
    for name, part in parts.items():
        estimate = session.budget.estimate(name)
        if not session.budget.fits(estimate):
            session.leave_out(name, NO_TIME)
            continue
        session.say(f"{name} ...")
        try:
            part(session)
        except Exception as error:  # noqa: BLE001 - an error in one part must not stop the others
            session.fail(name, error)
        session.save()
    run_rows(session)


def _run_small_trees(session: Session) -> None:
    """Trees whose nodes and heads have fewer rows than a product, over memory that holds NaN."""
    _report_tests(session, "small_trees", lambda _: [SMALL_TEST])


def _run_tests(session: Session) -> None:
    """All tests that need a GPU; in a dry run a single small one."""
    _report_tests(session, "tests", lambda root: [DRY_TEST] if session.is_dry else ["-m", "gpu", *gpu_tests(root)])


def _report_tests(session: Session, part: str, arguments_of: Callable[[Path], list[str]]) -> None:
    """Run tests of the checkout, and report them as a part."""
    from specmamba.bench.ops.suite import checkout, run_pytest

    root = checkout()
    outcome = run_pytest(root, arguments_of(root), min(MAX_TESTS_S, session.budget.left_s))
    session.report[part] = {"passed": outcome.is_green, "summary": outcome.summary, "failed": outcome.failed}
    session.say(f"  {outcome.summary}")


def _run_sanitizer(session: Session) -> None:
    """Tests of trees under compute-sanitizer's tools; a dry run has no GPU for them."""
    from specmamba.bench.ops.suite import checkout

    if session.is_dry:
        session.report["sanitizer"] = {tool: {"passed": None, "summary": "needs a GPU"} for tool in TOOLS}
        return
    session.report["sanitizer"] = check_tools(checkout(), min(MAX_TOOL_S, session.budget.left_s / len(TOOLS)))
    for tool, found in session.report["sanitizer"].items():
        session.say(f"  {tool}: {found['summary']}")


def gpu_tests(root: Path) -> list[str]:
    """The folder of the kernels' tests, and every other file with a test that needs a GPU.

    No others: a GPU's image may lack the packages that tests of the server and of grammars import.
    """
    kernels = root / "tests" / "kernels"
    files = sorted(file for file in root.glob("tests/**/test_*.py") if kernels not in file.parents)
    marked = [file for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf8")]
    return [str(path.relative_to(root)) for path in (kernels, *marked)]


def _run_operators(session: Session) -> None:
    from specmamba.bench.ops.measure import Effort
    from specmamba.bench.ops.suite import OPERATORS, REPEATS, checkout, device_of, find_red, report_of
    from specmamba.bench.ops.tables import print_report

    if session.is_dry:
        effort = Effort(1, 1, True, True, lambda *_: {})
    else:
        root, limit_s = checkout(), min(MAX_TESTS_S, session.budget.left_s)
        effort = Effort(5, REPEATS, True, False, lambda chosen, with_gpu: find_red(chosen, root, with_gpu, limit_s))
    found = report_of(OPERATORS, device_of("cpu" if session.is_dry else "cuda"), effort)
    session.report["operators"] = found
    if not session.is_dry:
        print_report(found)


def _run_texts(session: Session) -> None:
    from specmamba.bench.gpu.rows import compare_texts

    sizes = DRY_TEXTS if session.is_dry else TEXTS
    session.report["texts"] = compare_texts("cpu" if session.is_dry else "cuda", *sizes)


def run_rows(session: Session) -> None:
    """Run all blocks of the plan. A model is written before its first block and deleted after the last block of all."""
    folders: dict[str, tuple[Path | None, str | None]] = {}
    with ExitStack() as stack:
        for block in dry_plan() if session.is_dry else full_plan():
            if block.model not in folders:
                folders[block.model] = stack.enter_context(checkpoint(session, block.model))
            folder, why_not = folders[block.model]
            if why_not is not None:
                session.leave_out(block.name, why_not)
            else:
                run_block_in_time(session, block, folder)


def run_block_in_time(session: Session, block: Block, folder: Path | None) -> None:
    """Run the rows of one engine, or report why there are none."""
    from specmamba.bench.gpu.rows import run_block, with_speed_up

    if not session.budget.fits(session.budget.block_estimate(block)):
        session.leave_out(block.name, NO_TIME)
        return
    rows = session.report["rows"]
    try:
        for figures in run_block(block, folder, load_of(session.is_dry)):
            if "start_s" in figures:
                session.budget.has_measured(f"start {block.model}", figures["start_s"])
                continue
            session.budget.has_measured("row", figures["row_s"])
            rows.append(with_speed_up(figures, rows))
            session.say(_line(rows[-1]))
            session.save()
    except Exception as error:  # noqa: BLE001 - any error of a device is shown in the report
        session.fail(block.name, error)


def load_of(is_dry: bool) -> Load:
    """The load of the rows."""
    from specmamba.bench.gpu.rows import Load

    if is_dry:
        return Load("cpu", "float32", max_tokens=10, warm_up_tokens=6, stretches=1, context_length=256)
    return Load("cuda", "bfloat16", max_tokens=96, warm_up_tokens=32, stretches=3)


@contextmanager
def checkpoint(session: Session, model: str) -> Iterator[tuple[Path | None, str | None]]:
    """A model in a temporary folder.

    Yields:
        The folder, None for the demo, and why there is no folder, or None.
    """
    if model == DEMO:
        yield None, None
        return
    kind = f"write {model}"
    if not session.budget.fits(session.budget.estimate(kind)):
        yield None, NO_TIME
        return
    with tempfile.TemporaryDirectory(prefix="specmamba-gpu-") as parent:
        free = shutil.disk_usage(parent).free
        if free < DISK_BYTES[model]:
            yield None, f"{model} takes {DISK_BYTES[model] / 1e9:.0f} GB, and {parent} has {free / 1e9:.0f}"
            return
        folder = Path(parent) / model
        try:
            _write(session, model, folder)
        except (ConfigError, OSError, RuntimeError) as error:
            session.fail(kind, error)
            yield None, f"{model} was not written"
            return
        yield folder, None


def _write(session: Session, model: str, folder: Path) -> None:
    from specmamba.bench.inflate.__main__ import InflateConfig, inflate

    session.say(f"writing {model} ...")
    began = time.perf_counter()
    config = InflateConfig(out=folder, like=model, rounded=True, repeat_noise=True)  # type: ignore[arg-type]
    sizes = inflate(config)
    seconds = time.perf_counter() - began
    session.report["models"][model] = {
        "write_s": seconds,
        "bytes": sizes["bytes"][1],
        "parameters": sizes["parameters, target"][1],
    }
    session.say(f"  {sizes['bytes'][1] / 1e9:.1f} GB in {seconds:.0f} s")
    session.save()


def _line(row: dict[str, Any]) -> str:
    graphs = "graphs" if row["graphs"] else "eager"
    return (
        f"  {row['model']} {row['shape']} batch {row['batch_size']} {graphs} {row['state']}: "
        f"{row['tokens_per_second']:.1f} tokens/s, acceptance length {row['accept_length']:.2f}"
    )
