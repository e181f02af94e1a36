"""Every Triton kernel compiled for GPUs that need not be here, and the command that does it.

Each variant is in the sample of one target at least. CI compiles an eighth of each sample; ``SPECMAMBA_TEST_FULL=1``
compiles all variants for all targets.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'specmamba[gpu]'")

from specmamba.kernels.aot import command
from specmamba.kernels.aot.compile import Job, Outcome, find_operators, list_jobs
from specmamba.kernels.aot.table import (
    TARGETS,
    Resources,
    Table,
    Target,
    compare,
    read_amdgcn,
    read_ptxas_log,
    read_table,
    write_table,
)
from specmamba.kernels.gpu import Variant
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("forked_processes")

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
SAMPLED = ("sm_90", "sm_80", "sm_100", "gfx942")  # a fourth of a kernel's variants each: all take minutes for a target
OLDEST = os.environ.get("SPECMAMBA_TEST_TRITON")  # a folder with Triton 3.6, the oldest that is supported
KERNELS = ROOT / "kernels"
WITH_TRITON = sorted(file.parent.name for file in KERNELS.glob("*/triton_kernels.py"))

# Operators for the command: one that is as it should be, and one for everything that can be wrong.
EXAMPLE = dedent(
    """
    import os
    import triton
    import triton.language as tl
    from specmamba.kernels.gpu import Variant

    @triton.jit
    def centre(x, y, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        at = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
        block = tl.load(x + at)
        tl.store(y + at, block - tl.sum(block))

    @triton.jit
    def multiply(x, y, num_blocks, stride, SIZE: tl.constexpr, INNER: tl.constexpr):
        rows, inner = tl.arange(0, SIZE), tl.arange(0, INNER)
        result = tl.zeros((SIZE, SIZE), tl.float32)
        for i in range(num_blocks):
            left = tl.load(x + rows[:, None] * stride + (i * INNER + inner)[None, :])
            right = tl.load(x + (i * INNER + inner)[:, None] * stride + rows[None, :])
            result = tl.dot(left, right, result)
        tl.store(y + rows[:, None] * stride + rows[None, :], result)

    @triton.jit
    def wrong(x, SIZE: tl.constexpr):
        tl.store(x + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))

    def of_centre(name, rows, columns, num_warps, kind=Variant, **more):
        types = {"x": "*fp32", "y": "*fp32", "stride": "i64", "ROWS": "constexpr", "COLUMNS": "constexpr"}
        return kind(name, centre, types, {"ROWS": rows, "COLUMNS": columns}, num_warps, 1, **more)

    def of_multiply():
        types = {"x": "*bf16", "y": "*fp32", "num_blocks": "i32", "stride": "i64", "SIZE": "constexpr"}
        return Variant("oversize", multiply, {**types, "INNER": "constexpr"}, {"SIZE": 64, "INNER": 256}, 8, 4)

    class Deadly(Variant):
        def is_aligned(self, argument):
            os._exit(9)
    """
)
VARIANTS = {
    "fine": '[of_centre("16x64", 16, 64, 4)]',
    "aligned": '[of_centre("aligned", 16, 64, 4), of_centre("not", 16, 64, 4, unaligned=frozenset({"x", "stride"}))]',
    "spilling": '[of_centre("256x128 1 warp", 256, 128, 1)]',
    "oversize": "[of_multiply()]",
    "wrong": '[Variant("no such sizes", wrong, {"x": "*i32", "SIZE": "constexpr"}, {"SIZE": 16}, 4, 1)]',
    "signature": '[Variant("one too few", wrong, {"SIZE": "constexpr"}, {"SIZE": 16}, 4, 1)]',
    "deadly": '[of_centre("dies", 16, 64, 4, kind=Deadly)]',
    "listless": "[nothing]",
    "doubled": '[of_centre("16x64", 16, 64, 4), of_centre("16x64", 16, 64, 8)]',
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_python(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process in which kernels are compiled: tests themselves run them in the interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(map(str, filter(None, (path, ROOT))))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One process where every core has a test of its own."""
    jobs = ["--jobs", "1"] if "PYTEST_XDIST_WORKER" in os.environ else []
    return run_python("-m", "specmamba.kernels.aot", *arguments, *jobs, **environment)


@pytest.fixture
def run_examples(tmp_path: Path) -> Run:
    """The command over some of the ``VARIANTS``, with a table of its own in ``tmp_path``."""
    (tmp_path / "example.py").write_text(EXAMPLE)
    for name, variants in VARIANTS.items():
        (tmp_path / f"{name}.py").write_text(f"from example import *\n\ndef variants():\n    return {variants}\n")

    def run(names: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"""
            import sys
            from pathlib import Path
            from specmamba.kernels.aot.command import main
            sys.exit(main({[*arguments, "--jobs", "1"]}, dict(zip({names}, {names})), Path({str(tmp_path)!r})))
        """
        return run_python("-c", dedent(code), path=tmp_path)

    return run


# The project's own kernels


@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 compiles all variants, for minutes")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow
@pytest.mark.long
def test_every_variant_is_as_the_table_says(target: str) -> None:
    """Where the interpreter was asked for, it is turned off."""
    result = run_command("--target", target, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(operator in result.stdout for operator in WITH_TRITON)


def sample(part: int, parts: int = len(SAMPLED)) -> list[Job]:
    """One variant of every kernel that has few, and every fourth (``parts``) of those that have more."""
    by_kernel: dict[object, list[Job]] = {}
    for operator, module in find_operators().items():
        for variant in import_module(module).variants():
            by_kernel.setdefault(variant.kernel, []).append(Job(operator, module, variant.name))
    return [job for jobs in by_kernel.values() for job in jobs[part::parts] or [jobs[part % len(jobs)]]]


SAMPLE = """
import json, sys
from specmamba.kernels.aot.command import TABLES, flaws_of
from specmamba.kernels.aot.compile import Job, compile_jobs, compiler_versions
from specmamba.kernels.aot.table import TARGETS, Table, compare, read_table

target, jobs = TARGETS[sys.argv[1]], [Job(*names) for names in json.loads(sys.argv[2])]
outcomes = compile_jobs(jobs, target, 1, lambda outcome: None)
rows = {(o.job.operator, o.job.variant): o.resources for o in outcomes if o.resources is not None}
table = read_table(TABLES / f"{target.name}.json")
committed = Table(table.target, table.versions, {key: row for key, row in table.rows.items() if key in rows})
versions = compiler_versions(target)
differences = compare(committed, Table(target.name, versions, rows))
wrong = [f"{outcome.job}: {flaw}" for outcome in outcomes for flaw in flaws_of(outcome, target)]
assert versions["triton"].startswith(sys.argv[3]), versions
print(json.dumps(wrong + [difference.text for difference in differences if difference.fails]))
"""


@pytest.mark.skipif(IS_FULL, reason="all variants are compiled for all targets")
@pytest.mark.parametrize(("part", "target"), list(enumerate(SAMPLED)))
@pytest.mark.slow
@pytest.mark.long
def test_some_variants_are_as_the_table_says(part: int, target: str) -> None:
    """Every eighth of a part: the others are compiled by a full run alone, as is each for the other targets."""
    assert compile_sample(target, sample(part)[part::8]) == []


def compile_sample(target: str, jobs: Sequence[Job], version: str = "", path: Path | None = None) -> list[str]:
    """What is wrong with these variants; ``path`` has another Triton, of this version."""
    names = json.dumps([(job.operator, job.module, job.variant) for job in jobs])
    result = run_python("-c", SAMPLE, target, names, version, path=path)
    assert result.returncode == 0, result.stderr
    wrong: list[str] = json.loads(result.stdout)
    return wrong


@pytest.mark.skipif(OLDEST is None, reason="SPECMAMBA_TEST_TRITON names no folder with Triton 3.6")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow
@pytest.mark.long
def test_variants_compile_with_the_oldest_triton(target: str) -> None:
    """A fourth of a sample for sm_90, a twelfth for each of the others."""
    share = {"sm_90": slice(0, None, 4), "sm_80": slice(1, None, 12), "sm_100": slice(3, None, 12)}
    jobs = sample(0, parts=1) if IS_FULL else sample(0, parts=10)[share.get(target, slice(5, None, 12))]
    assert compile_sample(target, jobs, "3.6.", Path(str(OLDEST))) == []


@pytest.mark.parametrize("target", TARGETS)
def test_no_variant_spills(target: str) -> None:
    rows = read_table(command.TABLES / f"{target}.json").rows
    assert {key for key, row in rows.items() if row.spills} == set()


def test_every_variant_is_in_a_sample() -> None:
    jobs, failures = list_jobs(find_operators())
    samples = [set(sample(part)) for part in range(len(SAMPLED))]
    assert not failures
    assert set().union(*samples) == set(jobs)
    assert set(SAMPLED) == set(TARGETS)


@pytest.mark.parametrize("operator", WITH_TRITON)
def test_every_kernel_is_compiled_ahead_of_time(operator: str) -> None:
    """Or called by one that is; anything else is dead, or launched in a way that nothing here has compiled."""
    functions, live = compiled_functions()
    own = {function for function in functions if function[0].startswith(f"specmamba.kernels.{operator}.triton_")}
    assert any(module.endswith(".triton_kernels") for module, _ in own), "no triton.jit function in triton_kernels.py"
    assert own - live == set()


@cache
def compiled_functions() -> tuple[dict[Function, set[Function]], set[Function]]:
    """Every ``triton.jit`` function with what it mentions, and those that a variant needs."""
    modules = find_operators().values()
    roots = {(kernel.fn.__module__, kernel.fn.__name__) for module in modules for kernel in kernels_of(module)}
    functions = triton_functions()
    return functions, reachable(functions, roots)


def test_every_table_is_of_the_same_variants() -> None:
    tables = [read_table(command.TABLES / f"{target}.json") for target in TARGETS]
    assert {table.target for table in tables} == set(TARGETS)
    assert {operator for operator, _ in tables[0].rows} == set(WITH_TRITON)
    assert all(table.rows.keys() == tables[0].rows.keys() for table in tables)


Function = tuple[str, str]  # module, name


def kernels_of(module: str) -> Iterator[Any]:
    yield from (variant.kernel for variant in import_module(module).variants())


def triton_functions(kernels: Path = KERNELS) -> dict[Function, set[Function]]:
    """Every ``triton.jit`` function below a folder of operators, and what each mentions."""
    return {
        (module, node.name): mentioned(node, module, names)
        for file in kernels.glob("*/*.py")
        for module in [f"specmamba.kernels.{file.parent.name}.{file.stem}"]
        for tree in [ast.parse(file.read_text(encoding="utf8"))]
        for names in [imported_names(tree)]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(by) for by in node.decorator_list)
    }


def imported_names(tree: ast.Module) -> dict[str, Function]:
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def mentioned(function: ast.FunctionDef, module: str, names: dict[str, Function]) -> set[Function]:
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name):
                found.add(names.get(name, (module, name)))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in names:
                found.add((".".join(names[name]), attribute))
    return found - {(module, function.name)}


def reachable(functions: dict[Function, set[Function]], roots: set[Function]) -> set[Function]:
    live: set[Function] = set()
    waiting = list(roots)
    while waiting:
        function = waiting.pop()
        if function in functions and function not in live:
            live.add(function)
            waiting += functions[function]
    return live


@pytest.mark.slow
def test_a_kernel_without_a_variant_is_found(tmp_path: Path) -> None:
    for operator, text in {
        "one": """
            from specmamba.kernels.two import triton_kernels
            from specmamba.kernels.two.triton_kernels import add as plus
            @triton.jit
            def kernel(x): helper(x, triton_kernels.scale(x))
            @triton.jit
            def helper(x, y): plus(x, y)
            @jit
            def dead(x): kernel(x)
            def plain(x): dead(x)
        """,
        "two": """
            @triton.jit
            def add(x, y): return x + y
            @triton.jit
            def scale(x): return 2 * x
            @triton.jit
            def helper(x): scale(x)
        """,
    }.items():
        (tmp_path / operator).mkdir()
        (tmp_path / operator / "triton_kernels.py").write_text(dedent(text))
    functions = triton_functions(tmp_path)
    one, two = (f"specmamba.kernels.{operator}.triton_kernels" for operator in ("one", "two"))
    live = reachable(functions, {(one, "kernel")})
    assert live == {(one, "kernel"), (one, "helper"), (two, "add"), (two, "scale")}
    assert functions.keys() - live == {(one, "dead"), (two, "helper")}


# The command over examples


@pytest.mark.slow
def test_what_is_wrong_is_named(run_examples: Run) -> None:
    result = run_examples(list(VARIANTS), "--target", "sm_80", "--write")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    errors = dict(line.removeprefix("error: ").split(": ", 1) for line in lines)
    assert len(lines) == len(errors)
    assert set(errors) == set(VARIANTS) - {"fine", "aligned"}
    assert errors["spilling"].startswith("256x128 1 warp: spills ")
    assert errors["spilling"].endswith(" bytes of registers on sm_80")
    assert errors["oversize"].startswith("oversize: needs ")
    assert errors["oversize"].endswith("bytes of shared memory, a block on sm_80 has 166912")
    assert "no such sizes: does not compile for sm_80: CompilationError" in errors["wrong"]
    assert "the signature has ['SIZE'], the kernel takes ['x', 'SIZE']" in errors["signature"]
    assert "the compiler died" in errors["deadly"]
    assert "name 'nothing' is not defined" in errors["listless"]
    assert "two variants have the same name" in errors["doubled"]
    assert "nothing is written" in result.stderr


@pytest.mark.slow
def test_what_is_wrong_on_amd_is_named(run_examples: Run) -> None:
    result = run_examples(["fine", "spilling", "oversize"], "--target", "gfx942")
    assert result.returncode == 1
    assert "256x128 1 warp: spills " in result.stderr
    assert " vector registers on gfx942" in result.stderr
    assert "bytes of shared memory, a block on gfx942 has 65536" in result.stderr
    assert "fine: 16x64: " not in result.stderr.replace("fine: 16x64: not in the table", "")


@pytest.mark.slow
def test_a_table_is_written_and_met(run_examples: Run, tmp_path: Path) -> None:
    written = run_examples(["fine", "aligned"], "--target", "sm_90", "--write")
    assert written.returncode == 0, written.stdout + written.stderr
    table = read_table(tmp_path / "sm_90.json")
    assert set(table.versions) == {"triton", "ptxas"}
    assert set(table.rows) == {("fine", "16x64"), ("aligned", "aligned"), ("aligned", "not")}
    assert all(row.registers > 0 and row.spills == 0 for row in table.rows.values())
    # the alignment of arguments reaches the compiler
    assert table.rows["aligned", "aligned"] == table.rows["fine", "16x64"] != table.rows["aligned", "not"]
    assert run_examples(["fine", "aligned"], "--target", "sm_90").returncode == 0


# The command itself, with a compiler that knows the answers


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> dict[Job, Resources]:
    """What each variant of two operators "one" and "two" is found to need."""
    found = {}
    for operator in ("one", "two"):
        module = ModuleType(f"tiles_of_{operator}")
        variants = [Variant(name, None, {}, {}, 4, 1) for name in ("a", "b")]
        monkeypatch.setattr(module, "variants", lambda variants=variants: variants, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for variant in variants:
            found[Job(operator, module.__name__, variant.name)] = Resources(40, 1024, 0)
    monkeypatch.setattr(command, "compile_jobs", lambda jobs, *_: [Outcome(job, found[job]) for job in jobs])
    return found


def run_main(tables: Path, *arguments: str, operators: tuple[str, ...] = ("one", "two")) -> int:
    modules = {operator: f"tiles_of_{operator}" for operator in operators}
    return command.main(["--target", "sm_90", *arguments], modules, tables)


def test_no_table(needed: dict[Job, Resources], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(tmp_path) == 1
    assert "run with --write and commit the table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (Resources(41, 1024, 0), "error: one: b: registers 40 -> 41"),
        (Resources(40, 2048, 0), "error: one: b: shared 1024 -> 2048"),
        (Resources(40, 512, 0), "error: one: b: shared 1024 -> 512"),
        (Resources(40, 1024, 8), "error: one: b: spills 0 -> 8"),
    ],
)
def test_a_changed_kernel(
    needed: dict[Job, Resources], tmp_path: Path, capsys: pytest.CaptureFixture[str], now: Resources, message: str
) -> None:
    assert run_main(tmp_path, "--write") == 0
    assert run_main(tmp_path) == 0
    needed[Job("one", "tiles_of_one", "b")] = now
    capsys.readouterr()
    assert run_main(tmp_path) == 1
    lines = capsys.readouterr().err.splitlines()
    assert message in lines
    assert lines[-1] == "where this is meant, run with --write and commit the table"
    assert run_main(tmp_path, "--op", "two") == 0


def test_an_operator_that_is_gone(
    needed: dict[Job, Resources], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(tmp_path, "--write") == 0
    assert run_main(tmp_path, operators=("one",)) == 1
    assert "error: two: a: in the table, but no variant" in capsys.readouterr().err
    assert run_main(tmp_path, "--write", operators=("one",)) == 0
    assert run_main(tmp_path) == 1
    assert "error: two: a: not in the table" in capsys.readouterr().err


def test_one_operator_is_written_into_the_table(needed: dict[Job, Resources], tmp_path: Path) -> None:
    assert run_main(tmp_path, "--write", "--op", "two") == 0
    assert run_main(tmp_path, "--write", "--op", "one") == 0
    assert run_main(tmp_path) == 0
    needed[Job("one", "tiles_of_one", "a")] = needed[Job("two", "tiles_of_two", "a")] = Resources(50, 1024, 0)
    assert run_main(tmp_path, "--write", "--op", "one") == 0
    rows = read_table(tmp_path / "sm_90.json").rows
    assert rows["one", "a"].registers == 50
    assert rows["two", "a"].registers == 40


def test_one_operator_is_not_written_among_rows_of_other_compilers(
    needed: dict[Job, Resources], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(tmp_path, "--write") == 0
    file = tmp_path / "sm_90.json"
    content = json.loads(file.read_text())
    content["versions"]["triton"] = "3.0.0"
    file.write_text(json.dumps(content))
    assert run_main(tmp_path, "--write", "--op", "one") == 1
    assert "without --op" in capsys.readouterr().err
    assert read_table(file).versions["triton"] == "3.0.0"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target", "sm_75"],
        ["--target", "sm_90", "--op", "three"],
        ["--target", "sm_90", "--jobs", "0"],
        ["--target", "sm_90", "--what"],
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments, {"one": "tiles_of_one"})
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.slow
def test_kernels_of_the_interpreter_are_refused() -> None:
    """They cannot be compiled, and Triton's own words for it are obscure."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here, not interpreted")
    from specmamba.kernels.aot.compile import compile_variant

    jobs, failures = list_jobs(find_operators())
    assert not failures
    variant = next(v for v in import_module(jobs[0].module).variants() if v.name == jobs[0].variant)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        compile_variant(variant, TARGETS["sm_90"])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_what_a_block_can_have(target: Target) -> None:
    def flaws(shared: int, spills: int, scalar_spills: int = 0) -> list[str]:
        outcome = Outcome(Job("op", "module", "a"), Resources(40, shared, spills, scalar_spills))
        return command.flaws_of(outcome, target)

    assert flaws(target.max_shared, 0, scalar_spills=5) == []
    assert len(flaws(target.max_shared + 1, 0)) == len(flaws(0, 1)) == 1
    assert len(flaws(target.max_shared + 1, 1)) == 2


# Tables


def table(version: str, **registers_and_shared: tuple[int, int]) -> Table:
    rows = {("op", name): Resources(*figures, spills=0) for name, figures in registers_and_shared.items()}
    return Table("sm_90", {"triton": version}, rows)


def test_other_compilers_may_hand_out_other_registers() -> None:
    differences = compare(table("3.9.0", a=(40, 1024), b=(60, 256)), table("3.8.0", a=(44, 1024), b=(60, 512)))
    assert [(difference.text, difference.fails) for difference in differences] == [
        ("the table is of triton 3.9.0, this is triton 3.8.0", False),
        ("op: a: registers 40 -> 44", False),
        ("op: b: shared 256 -> 512", False),
    ]


def test_other_compilers_have_the_same_variants() -> None:
    differences = compare(table("3.9.0", a=(40, 1024), b=(60, 256)), table("3.8.0", a=(40, 1024), c=(60, 256)))
    assert [(difference.text, difference.fails) for difference in differences[1:]] == [
        ("op: c: not in the table", True),
        ("op: b: in the table, but no variant", True),
    ]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = {
        ("b", 'say "x"'): Resources(40, 0, 0),
        ("a", "é"): Resources(255, 1024, 0),
        ("b", "y"): Resources(1, 2, 3, 4),
        ("b", "z"): Resources(1, 2, 0, instructions=28136),
    }
    before = Table("sm_80", {"triton": "3.9.0", "ptxas": "12.9.86"}, rows)
    write_table(before, tmp_path / "new" / "sm_80.json")
    assert read_table(tmp_path / "new" / "sm_80.json") == before


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"target": "sm_80", "versions": {}, "operators": {"a": {"b": {}}}}']
)
def test_what_is_no_table(tmp_path: Path, content: str) -> None:
    (tmp_path / "sm_80.json").write_text(content)
    with pytest.raises(ValueError):
        read_table(tmp_path / "sm_80.json")


# What the compilers say


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
ptxas info    : Function properties for kernel
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 392 bytes cmem[0]
"""
AMDGCN = """
	.vgpr_count 999
    .agpr_count:     16
    .group_segment_fixed_size: {fixed}
    .private_segment_fixed_size: 992
    .sgpr_count:     21
    .sgpr_spill_count: {scalar}
    .vgpr_count:     92
    .vgpr_spill_count: {vector}
"""


def test_what_ptxas_says() -> None:
    log = PTXAS.format(stack=9240, stores=20284, loads=19312, registers=255)
    assert read_ptxas_log(log, shared=4096) == Resources(255, 4096, 20284 + 19312)
    assert read_ptxas_log(PTXAS.format(stack=64, stores=0, loads=0, registers=32), 0) == Resources(32, 0, 0)


def test_a_function_that_is_not_inlined_counts() -> None:
    callee = PTXAS.format(stack=8, stores=4, loads=4, registers=64)
    assert read_ptxas_log(PTXAS.format(stack=0, stores=0, loads=0, registers=32) + callee, 0) == Resources(64, 0, 8)


@pytest.mark.parametrize("log", ["", "ptxas info    : Used 32 registers"])
def test_what_ptxas_does_not_say_is_no_zero(log: str) -> None:
    with pytest.raises(ValueError, match="ptxas"):
        read_ptxas_log(log, 0)


def test_what_llvm_says() -> None:
    assert read_amdgcn(AMDGCN.format(fixed=0, vector=0, scalar=0), shared=4096) == Resources(92, 4096, 0)
    assert read_amdgcn(AMDGCN.format(fixed=8192, vector=663, scalar=2), shared=0) == Resources(92, 8192, 663, 2)
    with pytest.raises(ValueError, match="vgpr_spill_count"):
        read_amdgcn(AMDGCN.format(fixed=0, vector=0, scalar=0).replace(".vgpr_spill_count", ".spills"), 0)


# Alignment


def test_what_is_taken_to_be_aligned() -> None:
    types = {
        "x": "*bf16",
        "index": "*i64",
        "stride_x": "i64",
        "length": "i32",
        "stride_taps": "i32",
        "BLOCK": "constexpr",
    }
    variant = Variant("name", None, types, {"BLOCK": 16}, 4, 1, unaligned=frozenset({"index", "stride_taps"}))
    assert [name for name in types if variant.is_aligned(name)] == ["x", "stride_x"]
