"""The operator benchmark: bytes and operations, operators with failing tests, and agreement of all forms."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba.bench.ops import __main__ as ops
from specmamba.bench.ops import suite
from specmamba.bench.ops.case import NATIVE, TORCH, Candidate, Case, Cost, Operator, Place
from specmamba.bench.ops.measure import (
    Clock,
    Effort,
    Roofline,
    _prepare,
    interleaved,
    largest_error,
    measure_operators,
)
from specmamba.bench.ops.suite import OPERATORS, chosen_operators
from specmamba.bench.ops.tables import STATE_BYTES, has_failed, markdown, rows_of, target_lines, targets_of
from specmamba.cli import SUBCOMMANDS
from specmamba.errors import ConfigError
from specmamba.kernels.gpu import has_triton
from tests.fake_engine import wait_until

CPU = torch.device("cpu")
PLACE = Place(CPU, has_triton=False)
BY_NAME = {operator.name: operator for operator in OPERATORS}


def effort(reds: dict[str, str] | None = None) -> Effort:
    return Effort(1, 1, True, True, lambda operators, with_gpu: reds or {})


def cost(operator: str, case: str) -> Cost:
    one = BY_NAME[operator]
    return one.cost(next(c for c in one.cases if c.name == case))


@pytest.mark.parametrize(
    ("operator", "case", "num_bytes", "flops"),
    [
        # one node, nothing pending: state, a record, q and k, v and out, g and beta; 2 (2 K V + 2 K) + 3 V per head
        (
            "gated_delta_rule.tree_verify",
            "chain 1 node, batch 1, nothing pending",
            4 * (32 * 128 * 128 + 16 * 128 + 32 * 129 + 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32),
            32 * (2 * (2 * 128 * 128 + 2 * 128) + 3 * 128),
        ),
        (
            "gated_delta_rule.tree_verify_snapshots",
            "16 nodes, batch 32",
            4 * 32 * 16 * (2 * 32 * 128 * 128 + 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32),
            32 * 32 * 16 * 7 * 128 * 128,
        ),
        ("state_records.fold", "16 records, batch 1", 4 * (2 * 32 * 128 * 128 + 16 * (16 * 128 + 32 * 129)), 17301504),
        ("linear.int8", "8 rows, 12288 x 4096", 12288 * 4096 + 4 * 12288 + 2 * 8 * 16384, 2 * 8 * 12288 * 4096),
        (
            "linear.codes",
            "int4-g32, 8 rows, 12288 x 4096",
            12288 * (2048 + 256 + 4) + 2 * 8 * 16384,
            2 * 8 * 12288 * 4096,
        ),
        ("moe.codes", "tiny fp8", 4 * 40 * (160 + 4 + 4) + 4 * 6 * 200, 2 * 6 * 40 * 160),
        ("rowwise", "rms_norm, 8 nodes, batch 1", 8 * 2 * 2 * 4096, 4 * 8 * 4096),
        ("sampling", "argmax, 8 nodes, batch 32", 4 * 256 * 248320 + 8 * 256, 256 * 248320),
        ("state_copy.compact", "tiny", 2 * 4 * 2 * 2 * 3 * 8, 0),
        # keys and values of 13 tokens in 2 heads, queries and outputs of 4 heads: 16 float32 each
        ("paged_attention", "tiny", 4 * 2 * (2 * 13 * 2 * 16 + 2 * 4 * 4 * 16), 4 * 2 * 4 * 13 * 4 * 16),
        # 8 pairs reach all 3 experts [32, 16]
        ("moe.experts", "tiny", 4 * (3 * 32 * 16 + 8 * 48 + 4 * 48), 2 * 8 * 32 * 16),
        # 24 channels: 4 nodes and a window of 3 in, the nodes stored, float32 out; 4 taps, a bias
        ("causal_conv1d", "tiny tree", 2 * 24 * 4 * (4 + 3 + 4 + 4) + 4 * 24 * 5, 8 * 2 * 4 * 24),
    ],
)
def test_bytes_and_operations(operator: str, case: str, num_bytes: int, flops: int) -> None:
    assert (cost(operator, case).bytes, cost(operator, case).flops) == (num_bytes, flops)


def test_the_target_names_a_timed_case() -> None:
    case = next(c for c in BY_NAME["gated_delta_rule.tree_verify"].cases if c.name == "verify 8 nodes, batch 32")
    assert 4 * case["batch"] * case["heads"] * case["key"] * case["value"] == STATE_BYTES
    assert case.is_quick


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_has_its_tests_and_cases(operator: Operator) -> None:
    assert operator.chosen(is_quick=True)
    assert operator.chosen(is_quick=False, is_tiny=True)
    assert len({case.name for case in operator.cases}) == len(operator.cases)
    root = Path(__file__).parents[2]
    assert [file for file in suite.files_of(operator, True, root) if not (root / file).is_file()] == []


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("with_triton", [False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore:"))])
def test_all_forms_agree(operator: Operator, with_triton: bool) -> None:
    """Triton's forms run in its interpreter, which checks the calls that a GPU would be timed with."""
    if with_triton and (not has_triton() or torch.cuda.is_available()):
        pytest.skip("needs triton, and its interpreter: kernels on CPU tensors")
    for case in operator.chosen(is_quick=False, is_tiny=True):
        place = Place(CPU, with_triton)
        runs, results = _prepare(operator, operator.candidates(case, place), place)
        assert [result["failed"] for result in results] == [None] * len(results), results
        assert {TORCH} <= set(runs)
        assert ("triton" in runs) == with_triton


def fake_operator(prepare: Callable[[], Any], name: str = NATIVE, package: str | None = None) -> Operator:
    """An operator with PyTorch's form, which is right, and a second form."""
    x = torch.arange(4.0)

    def candidates(case: Case, place: Place) -> list[Candidate]:
        return [Candidate(TORCH, lambda: lambda: (2 * x,)), Candidate(name, prepare, package=package)]

    return Operator("fake.double", (), (Case("tiny", {}, is_tiny=True),), lambda case: Cost(32, 4), candidates)


def measured(operator: Operator, reds: dict[str, str] | None = None) -> dict[str, Any]:
    report: dict[str, Any] = measure_operators([operator], PLACE, effort(reds))
    return report | {"targets": [], "notes": [], "dry_run": True, "versions": {}, "rounds": 1, "device": "none"}


def test_a_right_form_is_timed() -> None:
    report = measured(fake_operator(lambda: lambda: (torch.arange(4.0) * 2,)))
    (case,) = report["operators"][0]["cases"]
    slow, fast = case["results"]
    assert slow["speed_up_over"][NATIVE] == pytest.approx(1 / fast["speed_up_over"][TORCH])
    assert fast["gb_per_s"] == pytest.approx(32 / fast["seconds"] / 1e9)
    assert fast["share_of_roofline"] == pytest.approx(case["roofline_seconds"] / fast["seconds"])
    assert not has_failed(report)


def test_a_form_that_gives_other_bits_the_second_time_is_not_timed() -> None:
    off = iter((0.0, 1e-6))

    def prepare() -> Callable[[], tuple[torch.Tensor, ...]]:
        own = next(off)
        return lambda: (torch.arange(4.0) * 2 + own,)

    report = measured(fake_operator(prepare))
    result = report["operators"][0]["cases"][0]["results"][1]
    assert result["failed"] == "a second run on the same inputs gives other bits"
    assert has_failed(report)


@pytest.mark.parametrize("off", [0.01, float("nan")])
def test_a_wrong_form_is_not_timed(off: float) -> None:
    report = measured(fake_operator(lambda: lambda: (torch.arange(4.0) * 2 + off,)))
    wrong = report["operators"][0]["cases"][0]["results"][1]
    assert wrong["failed"].startswith("wrong: off by")
    assert "seconds" not in wrong
    assert has_failed(report)
    assert any("wrong: off by" in cell for row in rows_of(report) for cell in row)


def test_a_form_that_cannot_run_says_why() -> None:
    def broken() -> Any:
        raise TypeError("unexpected keyword argument 'scale'")

    report = measured(fake_operator(broken))
    assert report["operators"][0]["cases"][0]["results"][1]["failed"].startswith("could not run: TypeError: unexpected")
    assert has_failed(report)


def test_another_package_is_left_out_on_a_cpu_and_where_it_is_missing() -> None:
    gpu = Place(torch.device("cuda"), has_triton=False)
    for package, place, is_there in (("json", PLACE, False), ("json", gpu, True), ("no_such_package", gpu, False)):
        operator = fake_operator(lambda: lambda: (torch.arange(4.0) * 2,), "peer", package)
        runs, _ = _prepare(operator, operator.candidates(operator.cases[0], place), place)
        assert ("peer" in runs) == is_there


def test_errors_are_relative_to_the_largest() -> None:
    ten = torch.tensor([10.0, 1.0])
    assert largest_error([ten + 0.1], [ten]) == pytest.approx(0.01, rel=1e-3)
    assert largest_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]) == 0.25
    assert largest_error([ten[:1]], [ten]) == float("inf")


def test_all_take_turns() -> None:
    order: list[int] = []

    class Fake(Clock):
        def seconds(self, run: Any, repeats: int) -> float:
            return float(run()[0])

        def repeats(self, run: Any, at_least: int) -> int:
            return at_least

    times = iter([1.0, 5.0, 6.0, 2.0, 9.0, 7.0])  # of the first: 1, 2, 9; of the second: 5, 6, 7

    def runner(number: int) -> Any:
        def run() -> tuple[float]:
            order.append(number)
            return (next(times),)

        return run

    assert interleaved(Fake(CPU), [runner(0), runner(1)], rounds=3, repeats=1) == [2.0, 6.0]
    assert order == [0, 1, 1, 0, 0, 1]


def test_the_roofline_is_the_slower_of_two() -> None:
    roofline = Roofline(100.0, {"float32": 1.0, "bfloat16": 10.0})
    assert roofline.seconds(Cost(10**9, 1)) == pytest.approx(0.01)
    assert roofline.seconds(Cost(1, 10**12)) == pytest.approx(1.0)
    assert roofline.seconds(Cost(1, 10**12, "bfloat16")) == pytest.approx(0.1)


def checkout_of(root: Path, **files: str) -> Path:
    """A checkout with tests of operators."""
    folder = root / "tests" / "kernels"
    folder.mkdir(parents=True)
    for name, source in files.items():
        (folder / f"test_{name}.py").write_text(source)
    return root


@pytest.fixture
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests in a process of their own do not load the installed plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


GREEN, RED = "def test_it() -> None:\n    pass\n", "def test_it() -> None:\n    assert 1 == 2\n"


@pytest.mark.usefixtures("few_plugins")
def test_a_failing_test_counts_for_its_operator(tmp_path: Path) -> None:
    root = checkout_of(tmp_path, tree=GREEN, sampling=RED)
    reds = suite.find_red(chosen_operators(["tree", "sampling", "ssd"]), root, with_gpu=False)
    assert set(reds) == {"sampling", "ssd.tree_verify", "ssd.tree_verify_snapshots", "ssd.extend"}
    assert reds["sampling"].startswith("FAILED tests/kernels/test_sampling.py::test_it")
    assert reds["ssd.extend"] == "there is no tests/kernels/test_ssd.py"


@pytest.mark.usefixtures("few_plugins")
def test_slow_tests_say_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "import time\nimport pytest\n@pytest.mark.parametrize('i', range(4))\ndef test_it(i):\n    time.sleep(0.1)\n"
    monkeypatch.setattr("specmamba.measure.report.FIRST_LINE_S", 0.05)
    monkeypatch.setattr("specmamba.measure.report.NEXT_LINE_S", 0.05)
    outcome = suite.run_pytest(checkout_of(tmp_path, tree=slow), ["tests/kernels/test_tree.py"])
    assert outcome.is_green
    said = re.findall(r"tests of these operators, percent: (\d+) of 100\n", capsys.readouterr().err)
    assert len(set(said)) >= 2
    assert said == sorted(said, key=int)


@pytest.mark.usefixtures("few_plugins")
def test_tests_that_never_end(tmp_path: Path) -> None:
    root = checkout_of(tmp_path, tree="import time\ndef test_it():\n    time.sleep(60)\n")
    assert suite.run_pytest(root, ["tests/kernels/test_tree.py"], timeout_s=2.0).summary == "no end after 2 s"


@pytest.mark.usefixtures("few_plugins")
def test_tests_that_do_not_start_fail_all_operators(tmp_path: Path) -> None:
    (checkout_of(tmp_path, tree=GREEN) / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--what'\n")
    assert set(suite.find_red(chosen_operators(["tree"]), tmp_path, with_gpu=False)) == {"tree.accepted_path"}


@pytest.mark.usefixtures("few_plugins")
def test_an_operator_with_a_failing_test_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout_of(tmp_path, tree=GREEN, state_copy=RED)
    monkeypatch.setattr(suite, "checkout", lambda: root)
    monkeypatch.setattr("specmamba.bench.ops.measure.measure_roofline", lambda *a, **b: Roofline(1.0, {"float32": 1.0}))
    file = tmp_path / "ops.json"
    flags = ["--op", "tree", "state_copy", "--device", "cpu", "--quick", "--rounds", "1", "--json", str(file)]
    assert ops.main(flags) == 1
    report = json.loads(file.read_text())
    timed, refused = report["operators"]
    assert (timed["name"], timed["tests_failed"], len(timed["cases"])) == ("tree.accepted_path", None, 1)
    assert refused["name"] == "state_copy.compact"
    assert "FAILED tests/kernels/test_state_copy.py" in refused["tests_failed"]
    assert refused["cases"] == []
    assert set(timed["cases"][0]) == {"name", "dtype", "bytes", "flops", "roofline_seconds", "results"}
    assert set(report["versions"]) >= {"specmamba", "torch"}
    assert report["targets"] == []
    assert "tests failed: FAILED" in capsys.readouterr().out
    assert ops.main(["--table", str(file)]) == 0
    table = capsys.readouterr().out
    assert "| tree.accepted_path: 8 nodes, batch 32 | torch |" in table
    assert "tests failed" in table


def test_there_are_no_tests_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "__file__", str(tmp_path / "specmamba" / "bench" / "ops" / "suite.py"))
    with pytest.raises(SystemExit) as ended:
        ops.main(["--device", "cpu"])
    assert ended.value.code == 2
    assert "no tests/ folder: run this from a checkout" in capsys.readouterr().err


def report_with(verify_s: float, records_s: float, snapshots_s: float | None) -> dict[str, Any]:
    def case(name: str, seconds: float | None, failed: str | None = None) -> dict[str, Any]:
        result = {"candidate": "triton", "seconds": seconds, "failed": failed}
        return {"name": name, "results": [{"candidate": "torch", "seconds": 9.0, "failed": None}, result]}

    verify = [case("verify 8 nodes, batch 32", verify_s), case("verify 16 nodes, batch 32", records_s)]
    snapshots = case("16 nodes, batch 32", snapshots_s, "wrong" if snapshots_s is None else None)
    return {
        "roofline": {"copy_gb_per_s": 2 * STATE_BYTES / 1e9},  # a copy of the states takes one second
        "operators": [
            {"name": "gated_delta_rule.tree_verify", "cases": verify},
            {"name": "gated_delta_rule.tree_verify_snapshots", "cases": [snapshots]},
        ],
    }


def test_targets() -> None:
    met, missed = targets_of(report_with(1.4, 2.4, 4.0))
    assert (met["value"], met["met"]) == (pytest.approx(1.4), True)
    assert (missed["value"], missed["met"]) == (pytest.approx(0.6), False)
    assert [line.split(":")[0].strip() for line in target_lines([met, missed])] == ["targets", "met", "MISSED"]
    assert [target["met"] for target in targets_of(report_with(1.6, 0.1, None))] == [False, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "tree", "trees"], "--op: there is no operator 'trees', only gated_delta_rule.tree_verify"),
        (["--save", "--json", "x.json"], "--save and --json both say where the figures go"),
        (["--table", "x.json", "--save"], "--table prints a report that is there"),
        (["--table", "no-such-file.json"], "--table: no-such-file.json cannot be read"),
        (["--table", __file__], "is no report of specmamba bench ops"),
        (["--rounds", "0"], "--rounds"),
        (["--skip-tests"], "--skip-tests"),
        (["--json", "no/such/folder.json"], "--json: there is no folder no/such"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ops.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_there_is_no_gpu_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        suite.device_of("cuda")
    assert suite.device_of("auto") == CPU


def test_names_may_follow_one_flag() -> None:
    assert ops.repeat_flag(["--op", "a", "b", "--quick"]) == ["--op", "a", "--op", "b", "--quick"]
    assert ops.repeat_flag(["--op=a", "b", "--op", "c"]) == ["--op=a", "--op", "b", "--op", "c"]
    assert ops.repeat_flag(["--json", "x"]) == ["--json", "x"]
    assert [o.name for o in chosen_operators(["ssd.extend", "tree"])] == ["ssd.extend", "tree.accepted_path"]


def test_markdown_is_a_table() -> None:
    lines = markdown(measured(fake_operator(lambda: lambda: (torch.arange(4.0) * 2,)))).splitlines()
    assert lines[2].startswith("| operator, case | by | us |")
    assert lines[4].startswith("| fake.double: tiny | torch |")
    assert len({line.count("|") for line in lines[2:6]}) == 1


def test_it_is_a_command() -> None:
    assert SUBCOMMANDS["bench"]["ops"][0] == "specmamba.bench.ops.__main__"


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("families.__main__", "specmamba.bench.families.__main__.measure_family"),
        ("decode", "specmamba.bench.decode.make_contestants"),
        ("host_time", "specmamba.LLM"),
        ("adaptive", "specmamba.LLM"),
    ],
)
def test_what_takes_long_says_so_before_its_first_part(
    module: str, slow: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()

    def has_said_it() -> bool:
        said.append(capsys.readouterr().err)
        return any(said)

    def load(*given: object, **named: object) -> None:
        wait_until(has_said_it)
        raise ConfigError("not here")

    monkeypatch.setattr("specmamba.measure.report.FIRST_LINE_S", 0.05)
    benchmark = importlib.import_module(f"specmamba.bench.{module}")
    monkeypatch.setattr(slow, load)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([])
    first, error = "".join([*said, capsys.readouterr().err]).splitlines()
    assert ": 0 of " in first
    assert error.endswith("error: not here")
