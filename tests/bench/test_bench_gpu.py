"""``specmamba bench gpu``: parts that fit the time, reports after an error, and a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from safetensors.torch import load_file

from specmamba import LLM, SamplingParams
from specmamba.bench.gpu import __main__ as gpu
from specmamba.bench.gpu import carried, sanitizer
from specmamba.bench.gpu import rows as gpu_rows
from specmamba.bench.gpu import run as gpu_run
from specmamba.bench.gpu.__main__ import has_failed, targets_of
from specmamba.bench.gpu.plan import CHAIN, GUESSES_S, PLAIN, TREE, Block, Budget, Shape, dry_plan, full_plan
from specmamba.bench.gpu.replays import Kernel, summary_of
from specmamba.bench.gpu.run import Session
from specmamba.bench.inflate.__main__ import InflateConfig, inflate
from specmamba.bench.inflate.checkpoint import read_config
from specmamba.bench.inflate.shape import PUBLISHED, enlarged
from specmamba.bench.inflate.shape import Shape as ModelShape
from specmamba.cli import SUBCOMMANDS
from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.errors import ConfigError
from specmamba.measure.full_batch import Stretch
from tests.repository import ROOT

# A process in which only the packages of an image for GPUs can be imported, with what these need themselves.
BARE_IMAGE = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

kept, wanted = {"specmamba"}, ["torch", "triton", "transformers", "numpy", "pytest"]
while wanted:
    name = plain(wanted.pop())
    if name in kept:
        continue
    kept.add(name)
    try:
        needed = requires(name) or []
    except PackageNotFoundError:
        continue
    wanted += [re.match(r"[\\w.-]+", line).group() for line in needed if "extra ==" not in line]
hidden = {name for name, of in packages_distributions().items() if not kept & set(map(plain, of))}
assert {"hypothesis", "fastapi", "xgrammar", "httpx"} <= hidden, hidden

class Kept(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Kept
"""


def run_on_bare_image(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE_IMAGE + code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_tests_of_kernels_are_collected_where_only_torch_and_transformers_are() -> None:
    paths = gpu_run.gpu_tests(ROOT)
    assert {"tests/kernels", "tests/verify/test_captured_steps.py"} <= set(paths)
    code = "import pytest; sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    done = run_on_bare_image(code, *paths)
    assert done.returncode == 0, done.stdout[-3000:]
    for name in ("gated_delta_rule", "ssd", "paged_attention", "sampling"):
        assert f"test_{name}_triton.py" in done.stdout


def test_the_benchmark_starts_where_only_torch_and_transformers_are() -> None:
    code = """
from importlib import import_module
for name in ("gpu.run", "gpu.rows", "ops.suite", "inflate.__main__"):
    import_module(f"specmamba.bench.{name}")
from specmamba.cli import main
main(["bench", "gpu", "--help"])
"""
    done = run_on_bare_image(code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "gpu" in done.stdout


# A process in which pydantic is found in other places than that of this environment alone.
WITHOUT_PYDANTIC = """
import subprocess, sys
from importlib.machinery import PathFinder

class Kept(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
            path = [folder for folder in sys.path if folder != sys.argv[1]]
        return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Kept
"""


def run_without_pydantic(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    installed = str(Path(pydantic.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_PYDANTIC + code, installed, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )


class TestCarriedWheels:
    def test_a_missing_package_is_named_with_the_command_that_carries_it(self) -> None:
        done = run_without_pydantic("from specmamba.cli import main; main(['bench', 'gpu', '--help'])")
        assert done.returncode == 1
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert "pydantic is not installed here" in done.stderr
        assert f"carried.py --python {version}" in done.stderr
        assert "Traceback" not in done.stderr

    def test_are_used_here_and_in_processes_that_are_started(self, tmp_path: Path) -> None:
        folder, installed = tmp_path / carried.FOLDER, Path(pydantic.__file__).parents[1]
        folder.mkdir()
        with zipfile.ZipFile(folder / "all.whl", "w") as wheel:
            for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
                for file in (installed / name).rglob("*"):
                    if file.suffix in (".py", ".so"):
                        wheel.write(file, file.relative_to(installed))
            wheel.write(installed / "typing_extensions.py", "typing_extensions.py")
        code = """
from pathlib import Path
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("carried", sys.argv[2])
carried = module_from_spec(spec)
spec.loader.exec_module(carried)
assert carried.use_carried(Path(sys.argv[3])) == ["all.whl"]
from contextlib import suppress
from specmamba.cli import main
with suppress(SystemExit):
    main(["bench", "gpu", "--help"])
import pydantic
print(pydantic.__file__)
child = "import pydantic; print(pydantic.__file__)"
print(subprocess.run([sys.executable, "-S", "-c", child], capture_output=True, text=True, check=True).stdout)
"""
        done = run_without_pydantic(code, str(carried.__file__), str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]
        *_, here, there = done.stdout.split()
        assert here == there
        assert "specmamba-carried-" in here
        assert not Path(here).exists()  # it goes with the process

    def test_are_left_alone_where_nothing_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / carried.FOLDER).mkdir()
        (tmp_path / carried.FOLDER / "broken.whl").write_text("no zip")
        assert carried.use_carried(tmp_path) == []

    def test_are_fetched_for_the_python_of_the_image(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[str]] = []
        statuses = [7, 0]

        def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
            asked.append(command)
            (Path(command[command.index("--dest") + 1]) / "new.whl").touch()
            return subprocess.CompletedProcess(command, statuses.pop(0))

        folder = tmp_path / carried.FOLDER
        folder.mkdir()
        (folder / "old.whl").touch()
        monkeypatch.setattr(carried, "ROOT", tmp_path)
        monkeypatch.setattr(subprocess, "run", run)
        assert carried.main(["--python", "3.13"]) == 7
        assert [file.name for file in folder.iterdir()] == ["old.whl"]
        assert carried.main(["--python", "3.13"]) == 0
        assert [file.name for file in folder.iterdir()] == ["new.whl"]
        assert [path.name for path in tmp_path.iterdir()] == [carried.FOLDER]
        command, _ = asked
        assert command[command.index("--python-version") + 1] == "3.13"
        assert command[-1] == "pydantic>=2.12,<3"
        assert f'"{command[-1]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf8")


class Watch:
    """A clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def session_of(tmp_path: Path, limit_s: float, watch: Callable[[], float]) -> Session:
    report: dict[str, Any] = {"rows": [], "left_out": [], "failed": [], "models": {}, "targets": []}
    report |= {
        "small_trees": None,
        "tests": None,
        "sanitizer": None,
        "operators": None,
        "texts": None,
        "dry_run": False,
    }
    return Session(report, tmp_path / "gpu.json", Budget(limit_s, watch), True, lambda line: None)


def test_a_budget_estimates_by_the_longest_time() -> None:
    watch = Watch()
    budget = Budget(100.0, watch)
    block = Block("demo", PLAIN, (1, 2))
    assert budget.block_estimate(block) == GUESSES_S["start demo"] + 2 * GUESSES_S["row"]
    for seconds in (20.0, 5.0):  # the slowest counts
        budget.has_measured("row", seconds)
    assert budget.block_estimate(block) == GUESSES_S["start demo"] + 40.0
    watch.now = 40.0
    assert budget.left_s == 60.0
    assert budget.fits(60.0)
    assert not budget.fits(60.1)


def test_the_plan() -> None:
    plan = full_plan()
    assert len(set(plan)) == len(plan)
    assert [block.shape for block in plan[:3]] == [PLAIN, CHAIN, TREE]
    assert plan[3] == Block("qwen3.5-4b", PLAIN, (1, 8, 32), graphs=False)  # twice as fast with graphs, or not
    for model in ("qwen3.5-4b", "qwen3.5-9b"):
        for shape in (PLAIN, CHAIN, TREE):
            rows = {(b, block.graphs, block.state) for block in plan for b in block.batches
                    if (block.model, block.shape) == (model, shape)}  # fmt: skip
            assert {(b, True, "records") for b in (1, 8, 32, 64)} <= rows
            assert {(b, False, "records") for b in (1, 8, 32)} <= rows
            assert shape is PLAIN or {(b, True, "snapshots") for b in (1, 8, 32)} <= rows
    assert {block.shape for block in dry_plan()} == {PLAIN, CHAIN, TREE}
    assert set(GUESSES_S) >= {f"{what} {block.model}" for block in plan for what in ("start", "write")}


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE])
def test_shapes_are_flags(shape: Shape) -> None:
    config = EngineConfig(**shape.flags)
    assert shape is PLAIN or (config.num_draft_steps, config.draft_topk, config.num_draft_nodes) == (
        shape.num_steps,
        shape.topk,
        shape.num_nodes,
    )


def fake_rows(watch: Watch, seconds: float, broken: str = "") -> Callable[..., Iterator[dict[str, Any]]]:
    def run_block(block: Block, folder: Path | None, load: Any) -> Iterator[dict[str, Any]]:
        watch.now += seconds
        yield {"start_s": seconds}
        for batch_size in block.batches:
            if block.shape.name == broken:
                raise RuntimeError("out of memory")
            watch.now += seconds
            row = gpu_rows.described(block, batch_size)
            yield {**row, "tokens_per_second": 10.0, "accept_length": 1.0, "step_ms": 1.0, "row_s": seconds}

    return run_block


def test_what_does_not_fit_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    session = session_of(tmp_path, 50.0, watch)
    monkeypatch.setattr(gpu_rows, "run_block", fake_rows(watch, 9.0))
    gpu_run.run_rows(session)
    found = json.loads(session.path.read_text())
    # 27 s; the next block would take as long, the one after it 18 s, and then 5 s are left
    assert [(row["shape"], row["batch_size"]) for row in found["rows"]] == [("plain", 1), ("plain", 2), (TREE.name, 2)]
    names = [block.name for block in dry_plan()]
    assert [each["what"] for each in found["left_out"]] == [names[1], *names[3:]]
    assert {each["why"] for each in found["left_out"]} == {"no time"}


def test_every_row_is_written_at_once_and_a_broken_block_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    session = session_of(tmp_path, 1000.0, watch)
    written: list[int] = []

    def say(line: str) -> None:
        written.append(len(json.loads(session.path.read_text())["rows"]) if session.path.exists() else 0)

    session.say = say
    monkeypatch.setattr(gpu_rows, "run_block", fake_rows(watch, 1.0, broken=CHAIN.name))
    gpu_run.run_rows(session)
    # as plain rows 1 and 2, the broken chain, the tree, an eager row and a broken chain again are told of
    assert written == [0, 1, 2, 2, 3, 4]
    found = json.loads(session.path.read_text())
    assert {row["shape"] for row in found["rows"]} == {PLAIN.name, TREE.name}
    assert [each["error"] for each in found["failed"]] == ["RuntimeError: out of memory"] * 2
    assert has_failed(found)


def test_parts_without_time_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, started = session_of(tmp_path, 50.0, Watch()), list[str]()
    monkeypatch.setattr(gpu_run, "_run_small_trees", lambda session: started.append("small trees"))
    monkeypatch.setattr(gpu_run, "_run_texts", lambda session: started.append("texts"))
    monkeypatch.setattr(gpu_run, "run_rows", lambda session: None)
    gpu_run.run_all(session)
    assert [each["what"] for each in session.report["left_out"]] == ["tests", "sanitizer", "operators"]
    assert started == ["small trees", "texts"]


def test_a_model_without_time_or_room_leaves_its_rows_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, 100.0, Watch())
    with gpu_run.checkpoint(session, "qwen3.5-9b") as found:
        assert found == (None, "no time")
    monkeypatch.setitem(gpu_run.DISK_BYTES, "qwen3.5-4b", 1e18)
    with gpu_run.checkpoint(session, "qwen3.5-4b") as (folder, why_not):
        assert folder is None
        assert why_not is not None
        assert "qwen3.5-4b takes 1000000000 GB" in why_not


def test_a_checkpoint_goes_when_its_rows_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, 1000.0, Watch())
    monkeypatch.setattr(gpu_run, "_write", lambda session, model, folder: folder.mkdir())
    with gpu_run.checkpoint(session, "qwen3.5-4b") as (folder, why_not):
        assert why_not is None
        assert folder is not None
        assert folder.is_dir()
    assert not folder.exists()

    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(gpu_run, "_write", broken)
    with gpu_run.checkpoint(session, "qwen3.5-4b") as found:
        assert found == (None, "qwen3.5-4b was not written")
    assert session.report["failed"][0]["what"] == "write qwen3.5-4b"


def test_speed_up_is_over_plain_decoding_of_the_same_kind() -> None:
    plain = {"model": "m", "batch_size": 1, "graphs": True, "state": "records", "shape": "plain"}
    plain["tokens_per_second"] = 10.0
    chain = {**plain, "shape": CHAIN.name, "state": "snapshots", "tokens_per_second": 25.0}
    assert gpu_rows.with_speed_up(chain, [plain])["speed_up"] == 2.5
    assert gpu_rows.with_speed_up({**chain, "graphs": False}, [plain])["speed_up"] is None
    assert gpu_rows.with_speed_up(plain, [])["speed_up"] == 1.0


def test_figures_of_stretches() -> None:
    stretches = [Stretch(2, 10, (20, 20), seconds, 0.0, 0.0) for seconds in (2.0, 9.0, 2.5)]
    figures = gpu_rows.figures_of(stretches)
    assert figures == {"tokens_per_second": 16.0, "accept_length": 2.0, "step_ms": 250.0, "steps": 30}


def test_graphs_are_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    load = gpu_rows.Load("cuda", "bfloat16", 8, 4, 1)
    monkeypatch.setattr(gpu_rows, "GRAPH_FIELD", "no_such_field")
    with pytest.raises(ConfigError, match="captures no CUDA graphs"):
        gpu_rows.engine_flags(Block("m", PLAIN, (1,)), None, load)
    flags = gpu_rows.engine_flags(Block("m", CHAIN, (1, 8), graphs=False, state="snapshots"), Path("x"), load)
    assert (flags["max_running_requests"], flags["speculative_state"], flags["device"]) == (8, "snapshots", "cuda")
    assert "no_such_field" not in flags


def texts_of(**counts: int) -> dict[str, Any]:
    figures = {"identical": 0, "near_tie": 0, "diverged": 0, **counts}
    return {"float32": {"plain": figures}, "bfloat16": {CHAIN.name: figures}}


def test_targets() -> None:
    row = {"model": "m", "shape": "plain", "batch_size": 1, "graphs": True, "tokens_per_second": 50.0}
    report = {"dry_run": False, "rows": [row], "texts": texts_of(identical=7, near_tie=1)}
    graphs, idle, exact, near = targets_of(report)
    assert (graphs["value"], graphs["met"]) == (idle["value"], idle["met"]) == (None, None)
    assert (exact["value"], exact["met"]) == (1, False)
    assert (near["value"], near["met"]) == (0, True)
    for speed, met in ((20.0, True), (30.0, False)):
        report["rows"] = [row, {**row, "graphs": False, "tokens_per_second": speed}]
        assert targets_of(report)[0]["met"] is met
    for idle_ms, met in ((0.4, True), (0.6, False)):
        report["rows"] = [{**row, "replay": {"idle_ms": value}} for value in (0.1, idle_ms)]
        assert targets_of(report)[1]["met"] is met
    assert [target["met"] for target in targets_of({"dry_run": True, "rows": [], "texts": None})] == [None, None]


def test_what_counts_as_failed() -> None:
    report: dict[str, Any] = dict.fromkeys(("small_trees", "tests", "sanitizer", "operators", "texts"))
    report["failed"] = []
    assert not has_failed(report)
    assert not has_failed({**report, "texts": texts_of(near_tie=3)})
    assert has_failed({**report, "texts": texts_of(diverged=1)})
    for part in ("small_trees", "tests"):
        assert has_failed({**report, part: {"passed": False}})
        assert not has_failed({**report, part: {"passed": True}})
    assert has_failed({**report, "operators": {"operators": [{"tests_failed": "FAILED x", "cases": []}]}})
    assert has_failed({**report, "sanitizer": {"racecheck": {"passed": False}}})
    assert not has_failed({**report, "sanitizer": {"racecheck": {"passed": None}, "memcheck": {"passed": True}}})


def test_kernels_of_replayed_steps() -> None:
    runs = [Kernel("attend", 30.0), Kernel("norm", 5.0), Kernel("norm", 7.0)] * 2
    found = summary_of(runs, 2, step_ms=0.1)
    assert found["kernels_ms"] == pytest.approx(0.042)
    assert found["idle_ms"] == pytest.approx(0.058)
    assert found["launches"] == 3
    assert [(each["name"], each["launches"], each["microseconds"]) for each in found["longest"]] == [
        ("attend", 1, 30.0),
        ("norm", 2, 12.0),
    ]


CLEAN = "5 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("output", "status", "passed", "summary"),
    [
        (CLEAN, 0, True, "0 hazards displayed (0 errors, 0 warnings)"),
        (CLEAN, 1, False, "0 hazards displayed (0 errors, 0 warnings)"),
        ("========= ERROR SUMMARY: 2 errors\n", 0, False, "2 errors"),
        (CLEAN + "========= RACECHECK SUMMARY: 1 hazard displayed\n", 0, False, None),
        ("Device not supported\n", 0, False, "Device not supported"),
    ],
)
def test_what_the_sanitizer_found(output: str, status: int, passed: bool, summary: str | None) -> None:
    found = sanitizer.verdict_of(output, status)
    assert found["passed"] is passed
    assert summary is None or found["summary"] == summary


def test_the_sanitizer_has_tests_to_run() -> None:
    *files, _, chosen = sanitizer.TESTS
    for file, name in zip(files, chosen.split(" or "), strict=True):
        assert f"_{name}" in (ROOT / file).read_text(encoding="utf8")


def test_a_sanitizer_that_is_not_there_or_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {found["summary"] for found in sanitizer.check_tools(ROOT, 1.0).values()} == {sanitizer.NOT_INSTALLED}
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    found = sanitizer.check_tools(ROOT, 0.1)
    assert [(each["passed"], each["summary"]) for each in found.values()] == [(None, "no end after 0.1 s")] * 2


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the test that is run needs none, and they take long
    file = tmp_path / "gpu.json"
    assert gpu.main(["--dry-run", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["dry_run"]
    assert report["tests"]["passed"]
    assert report["small_trees"]["passed"], report["small_trees"]
    assert all(found["cases"] for found in report["operators"]["operators"])
    expected = [(block.shape.name, b, block.graphs, block.state) for block in dry_plan() for b in block.batches]
    keys = ("shape", "batch_size", "graphs", "state")
    assert [tuple(row[key] for key in keys) for row in report["rows"]] == expected
    assert {"tokens_per_second", "accept_length", "step_ms", "speed_up"} <= set(report["rows"][0])
    assert [target["met"] for target in report["targets"]] == [True, True]
    assert (report["left_out"], report["failed"]) == ([], [])
    printed = capsys.readouterr().out
    assert "DRY RUN on the CPU with the demo: no figure of speed means anything" in printed
    assert "speed-up over plain decoding:" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no CUDA device here: --dry-run goes the same way on the CPU"),
        (["--minutes", "0"], "--minutes"),
        (["--fast"], "--fast"),
        (["--json", "no/such/folder.json"], "--json: there is no folder no/such"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-9b"])
def test_the_published_sizes_hold_the_demo(name: str) -> None:
    _, config = read_config(DEMO_MODEL)
    target = enlarged(ModelShape.of(config), PUBLISHED[name])
    assert target.sizes() == dict(PUBLISHED[name])
    assert (target.period, len(target.layer_types)) == (4, 32)


def test_inflated_layers_may_repeat_and_be_rounded(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_factor": 2, "layers": 16, "gdn_key_dim": 96}
    with pytest.raises(ConfigError, match="take it as it is with --rounded"):
        inflate(InflateConfig(out=tmp_path / "exact", **sizes))
    inflate(InflateConfig(out=tmp_path / "large", rounded=True, repeat_noise=True, **sizes))
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(tensors[name.format(8)], tensors[name.format(12)])
    assert not torch.equal(tensors[name.format(8)], tensors[name.format(9)])
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts = []
    for model in (None, str(tmp_path / "large")):
        with LLM(model=model, dtype="float32", num_threads=1, context_length=128) as llm:
            texts.append(llm.generate("import os\n\n\ndef main():\n", params)[0].token_ids)
    assert texts[0] == texts[1]


def test_it_is_a_command() -> None:
    assert SUBCOMMANDS["bench"]["gpu"][0] == "specmamba.bench.gpu.__main__"
