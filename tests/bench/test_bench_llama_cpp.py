"""The comparison with llama.cpp: its figures, its errors, and runs beside programs that stand for llama.cpp."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specmamba.bench.llama_cpp import __main__ as llama_cpp
from specmamba.bench.llama_cpp import engine_process, rounds, worker
from specmamba.bench.llama_cpp.build import HOW_TO_BUILD
from specmamba.bench.llama_cpp.figures import Answer, compared, round_rate
from specmamba.bench.llama_cpp.llama_server import answer_of
from specmamba.bench.llama_cpp.options import LlamaCppBenchConfig, Pair, engine_flags, modes_of, pairs_of
from specmamba.bench.llama_cpp.rounds import Prompts
from specmamba.errors import SpecmambaError
from specmamba.measure.weight_forms import form_flags
from tests.fake_engine import FakeEngine, wait_until
from tests.fake_llama_server import make_build, noted

pytestmark = pytest.mark.usefixtures("forked_processes")

ROOT = Path(__file__).parents[2]
# An engine that decodes 100 tokens/s plain and 1 + drafts / 2 times as many with drafts; trees count as 4 drafts.
FAKE_WORKER = """
import json, sys
for line in sys.stdin:
    ((name, given),) = json.loads(line).items()
    if name == "load":
        flags = given["flags"]
        print(json.dumps(flags), file=open(CHECKPOINT + ".loads", "a"))
        drafts = 0 if flags["speculative_algorithm"] == "none" else flags.get("speculative_num_steps", 1)
        answer = dict(checkpoint=CHECKPOINT, threads=flags["num_threads"] or 9, weight_bytes=2_000_000)
        answer |= dict(native=dict(level="avx2", origin="shipped", reason=None), parameters=5)
    elif name == "encode":
        prompts = [list(text["text"].encode()) for text in given["texts"]]
        answer = dict(prompts=prompts, continued=prompts)
    elif name == "memory_speed":
        answer = dict(gb_per_s=10.0)
    else:
        count = given["max_tokens"]
        fields = dict(tokens=[7, 8] + [9] * (count - 2), num_decoded=count - 1, num_accepted=0)
        fields |= dict(first_token_s=0.001, decode_s=max(1, count - 1) / (100 * (1 + drafts / 2)))
        answer = dict(answers=[fields] * len(given["prompts"]))
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return make_build(tmp_path)


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the process of an engine; gives the folder that it names as its checkpoint."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr(engine_process, "WORKER", (sys.executable, "-S", "-c", _script(checkpoint)))
    monkeypatch.setattr(rounds, "SETTLE_S", 0.0)
    return checkpoint


def _script(checkpoint: Path) -> str:
    return FAKE_WORKER.replace("CHECKPOINT", repr(str(checkpoint)))


def config_of(**flags: Any) -> LlamaCppBenchConfig:
    return LlamaCppBenchConfig(**flags)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says that ends with a mistake in its flags."""
    with pytest.raises(SystemExit) as ended:
        llama_cpp.main(list(arguments))
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "specmamba bench llama-cpp: error: " in captured.err
    return captured.err


def assert_all_ended(build: Path) -> None:
    """No server of this build runs any more."""
    for pid in {line["pid"] for line in noted(build)}:
        wait_until(partial(_has_ended, pid))


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- flags ---


def test_without_a_build_it_says_how_to_make_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in ((), ("--llama-cpp", str(tmp_path))):
        said = error_of(capsys, *arguments)
        assert HOW_TO_BUILD in said
    assert "has no program bin/llama-server" in said
    for word in ("llama-cpp-python==0.3.36", "-DGGML_NATIVE=ON", "-DGGML_AVX512=OFF", "-DGGML_AVX2=ON", "llama-bench"):
        assert word in HOW_TO_BUILD


def test_sources_that_are_missing(capsys: pytest.CaptureFixture[str], build: Path, tmp_path: Path) -> None:
    said = error_of(capsys, "--llama-cpp", str(build), "--llama-cpp-source", str(tmp_path))
    assert "has no convert_hf_to_gguf.py" in said
    (build / "CMakeCache.txt").unlink()
    assert "give --llama-cpp-source" in error_of(capsys, "--llama-cpp", str(build))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float32"], "--dtype: this command sets it; use --formats"),
        (["--speculative-num-steps", "2"], "--speculative-num-steps: this command sets it; use --drafts"),
        (["--max-running-requests", "2"], "use --batch"),
        (["--trees", "4,4"], "--trees: '4,4' is not steps,topk,nodes"),
        (["--trees", "1,2,9"], "--trees 1,2,9: "),
        (["--formats", "q4"], "--formats"),
        (["--formats", "int8", "--pairs", "int8:Q8_0"], "--formats and --pairs both say what to compare"),
        (["--pairs", "int8:Q8_0", "Q4_K_M"], "--pairs: 'Q4_K_M' is not form:TYPE"),
        (["--pairs", "int8:q8_0"], "--pairs: 'int8:q8_0' is not form:TYPE"),
        (["--pairs", "int9:Q8_0"], "--pairs int9: --quantization: "),
        (["--pairs", "int8-g:Q8_0"], "--pairs: 'int8-g' is no form of weights"),
        (["--pairs", "int8-g64:Q8_0"], "--pairs: 'int8-g64' is no form of weights"),
        (["--pairs", "int4-g48:Q4_K_M"], "--pairs int4-g48: --quantization-group-size: "),
        (["--formats", ""], "--formats"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--max-tokens", "5"], "--max-tokens 5: a step of these drafts may decide 5"),
        (["--drafts", "0,-1"], "--drafts"),
    ],
)
def test_flags_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, *arguments)


def test_modes_and_the_flags_of_their_engines(tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    config = config_of(drafts="0,2,2", trees="4,4,8", speculative_tree=tree, num_threads=3, page_size=4)
    plain, chain, _, _, tuned = modes = modes_of(config)
    assert [mode.name for mode in modes] == ["plain", "MTP 2", "tree 4,4,8", "adaptive", "tuned tree"]
    assert [mode.num_drafts for mode in modes] == [0, 2, None, None, None]
    sizes = [mode.flags.get("speculative_adaptive") for mode in modes]
    assert sizes == [None, "off", "off", "auto", None]
    assert modes_of(config_of(drafts="0", trees="")) == [plain]
    flags = engine_flags(config, form_flags("int8", "--pairs"), chain, 8, 512)
    assert (flags["quantization"], flags["dtype"], flags["speculative_num_steps"]) == ("int8", "bfloat16", 2)
    assert (flags["num_threads"], flags["page_size"], flags["max_running_requests"]) == (3, 4, 8)
    assert "speculative_tree" not in flags
    assert engine_flags(config, form_flags("bf16", "--pairs"), tuned, 1, 512)["speculative_tree"] == str(tree)
    assert config_of(num_threads=2, engine_threads=0).own_threads is None
    assert config_of(num_threads=2, engine_threads=1).own_threads == 1
    assert config_of().llama_threads == len(os.sched_getaffinity(0))


def test_pairs_and_the_flags_of_their_weights(tmp_path: Path) -> None:
    assert pairs_of(config_of()) == [Pair("bf16", "BF16"), Pair("int8", "Q8_0")]
    assert pairs_of(config_of(formats="int8,int8")) == [Pair("int8", "Q8_0")]
    several = pairs_of(config_of(pairs=["fp32:F32,int4-g128:Q4_K_M", "gguf:Q4_K_M", "gguf:Q4_K_M"]))
    assert list(map(str, several)) == ["fp32:F32", "int4-g128:Q4_K_M", "gguf:Q4_K_M"]
    whole, codes, same = (pair.flags(tmp_path) for pair in several)
    assert whole == {"dtype": "float32", "quantization": "none"}
    assert codes == {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 128}
    assert same == {"model": str(tmp_path), "revision": None, "dtype": "bfloat16", "quantization": "auto"}
    mode = modes_of(config_of(trees=""))[0]
    assert engine_flags(config_of(model="a", revision="b"), same, mode, 1, 512)["model"] == str(tmp_path)


def test_a_gguf_file_is_no_checkpoint_to_convert(
    build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").touch()
    said = error_of(capsys, "--llama-cpp", str(build), "--model", str(tmp_path / "model.gguf"))
    assert "--model: give a checkpoint" in said


# --- figures ---


def answer(decoded: int, seconds: float, accepted: int = 0, tokens: tuple[int, ...] = ()) -> Answer:
    return Answer(tokens, 0.1, decoded, seconds, accepted)


def test_the_rate_of_a_round() -> None:
    assert round_rate([[answer(10, 1.0)], [answer(10, 3.0)]]) == pytest.approx(20 / 4)  # all tokens over all time
    assert round_rate([[answer(10, 1.0), answer(10, 2.0)]]) == pytest.approx(15)  # the sum within a batch
    together = [[answer(10, 1.0), answer(10, 2.0)], [answer(20, 2.0)]]
    assert round_rate(together) == pytest.approx(40 / (20 / 15 + 20 / 10))


def test_ratios_are_taken_within_rounds() -> None:
    own = {
        "plain": [[[answer(10, 1.0)]], [[answer(10, 2.0)]]],
        "tree": [[[answer(30, 1.0, 20)]], [[answer(30, 2.0, 15)]]],
    }
    other = {"plain": [[[answer(20, 1.0)]], [[answer(20, 4.0)]]]}
    figures = compared(own, other)
    assert figures["ratios"] == {"plain": {"median": 0.75, "range": [0.5, 1.0]}}
    assert figures["best"]["specmamba"] == "tree"
    assert figures["best"]["ratio"] == {"median": 2.25, "range": [1.5, 3.0]}
    assert figures["specmamba"]["tree"]["accept_length"] == round(60 / 25, 3)
    assert figures["llama_cpp"]["plain"]["tokens_per_s"] == {"median": 12.5, "range": [5.0, 20.0]}
    assert figures["equal_tokens"] == {}


def test_equal_tokens_of_greedy_texts() -> None:
    own = {"plain": [[[answer(3, 1, 0, (1, 2, 3, 4))], [answer(3, 1, 0, (5, 6, 7, 8))]]]}
    other = {"plain": [[[answer(3, 1, 0, (1, 2, 9, 4))], [answer(3, 1, 0, (5, 6, 7, 8))]]]}
    assert compared(own, other, is_greedy=True)["equal_tokens"] == {"plain": {"median": 3.0, "range": [2, 4]}}


def test_prompts_in_batches() -> None:
    prompts = Prompts([[1], [2], [3]], [1, 2, 3, 4, 5])
    assert prompts.batches(1) == [[[1]], [[2]], [[3]]]
    assert prompts.batches(2) == [[[1], [2]], [[3], [1]]]
    assert prompts.batches(4) == [[[1], [2], [3], [1]]]
    assert prompts.long(3, 0) == [1, 2, 3]
    assert prompts.long(7, 1) == [3, 4, 5, 1, 2, 3, 4]


def test_what_is_counted_of_an_engine() -> None:
    """Decoding begins with the first delta, whose tokens are not counted."""
    engine = FakeEngine(step_s=0.001, chunk=2)
    batch = {"prompts": [[1, 2], [3]], "seeds": [5, 6], "max_tokens": 7, "temperature": 0.8}
    for fields in worker.run(SimpleNamespace(engine=engine), batch):  # type: ignore[arg-type]
        answer = Answer(**fields)
        assert (len(answer.tokens), answer.num_decoded, answer.num_accepted) == (7, 5, 3)
        assert answer.decode_s >= 0.003
        assert answer.first_token_s >= 0.001
    assert [params.seed for params in engine.seen_params] == [5, 6]
    assert all(params.ignore_eos and params.temperature == 0.8 for params in engine.seen_params)
    short = FakeEngine(text="abc")
    with pytest.raises(SpecmambaError, match="only 3 tokens came"):
        worker.run(SimpleNamespace(engine=short), batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2]}, "wrote 2 tokens, but 3 were asked for"),
        ({"timings": {"predicted_n": 4, "predicted_ms": 1, "prompt_ms": 1}}, "wrote 4 tokens"),
        ({"timings": {}}, "in another form than expected: KeyError"),
        ({"tokens": None}, "in another form than expected: TypeError"),
    ],
)
def test_answers_of_llama_server(change: dict[str, Any], message: str) -> None:
    timings = {"predicted_n": 3, "predicted_ms": 500.0, "prompt_ms": 20.0, "draft_n": 9, "draft_n_accepted": 1}
    good = {"tokens": [1, 2, 3], "timings": timings}
    assert answer_of(good, 3) == Answer((1, 2, 3), 0.02, 2, 0.5, 1)
    with pytest.raises(SpecmambaError, match=message):
        answer_of(good | change, 3)


# --- whole runs ---

SMALL = ["--rounds", "2", "--num-prompts", "3", "--max-tokens", "11", "--drafts", "0,2", "--trees", "4,4,8"]


def test_a_run_beside_a_fake_llama_server(
    build: Path,
    fake_worker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, kept = tmp_path / "report.json", tmp_path / "gguf"
    kept.mkdir()
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "prompt {i}"}}\n' for i in range(3)))
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "5")
    flags = ["--llama-cpp", str(build), "--formats", "int8", "--batch", "2", "--num-threads", "1", "--ttft", "8,20"]
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--gguf-folder", str(kept), "--json", str(file)]
    assert llama_cpp.main([*flags, *SMALL, *files]) == 0
    assert_all_ended(build)

    report = json.loads(file.read_text("utf8"))
    assert report["llama_cpp"]["version"] == "9.9.9 (build 7, commit abcdef0)"
    assert report["llama_cpp"]["cpu_features"] == ["AVX2", "F16C"]
    assert report["llama_cpp"]["cmake"] == {"GGML_NATIVE": "ON"}
    assert report["threads"] == {"specmamba": 1, "llama_cpp": 1}
    assert report["native"]["level"] == "avx2"
    greedy, sampled = report["settings"]
    assert (greedy["format"], greedy["batch"], greedy["temperature"], sampled["temperature"]) == ("int8", 2, 0, 0.8)
    assert greedy["memory_gb_per_s"]["median"] == 10
    for setting in (greedy, sampled):  # two requests at a time: twice the rate of one
        rates = {name: figures["tokens_per_s"]["median"] for name, figures in setting["specmamba"].items()}
        assert rates == pytest.approx({"plain": 200, "MTP 2": 400, "tree 4,4,8": 600, "adaptive": 300})
        rates = {name: figures["tokens_per_s"]["median"] for name, figures in setting["llama_cpp"].items()}
        assert rates == pytest.approx({"plain": 400, "MTP 2": 600})
        assert setting["ratios"]["plain"] == {"median": 0.5, "range": [0.5, 0.5]}
        assert setting["best"]["ratio"]["median"] == 1.0
    assert greedy["llama_cpp"]["MTP 2"]["accept_length"] == 2.5  # 10 tokens in 4 steps
    assert greedy["equal_tokens"]["plain"] == {"median": 1, "range": [1, 1]}
    assert [(row["num_tokens"], row["mode"]) for row in report["first_tokens"]] == [
        (8, "plain"), (8, "MTP 2"), (20, "plain"), (20, "MTP 2"),
    ]  # fmt: skip
    assert report["first_tokens"][2]["llama_cpp_ms"]["median"] == 10
    assert report["first_tokens"][2]["ratio"]["median"] == 0.1

    text = capsys.readouterr().out
    assert "best over best: 1.00 (1.00 to 1.00), tree 4,4,8 over llama.cpp's MTP 2" in text
    assert "400.0 (400.0 to 400.0)" in text
    names = {path.name.rpartition("-")[2]: path.read_text() for path in kept.iterdir()}
    assert names == {"BF16.gguf": f"default {fake_worker}", "Q8_0.gguf": f"Q8_0 of default {fake_worker}"}
    _check_requests(noted(build))


def _check_requests(lines: list[dict[str, Any]]) -> None:
    """Slots, threads and sampling as this side has them; every prompt and seed reaches all servers."""
    starts = [line["start"] for line in lines if "start" in line]
    assert len(starts) == 2
    for start in starts:
        assert start[start.index("-np") + 1] == "2"
        assert start[start.index("-t") + 1] == start[start.index("-tb") + 1] == "1"
        assert start[start.index("-c") + 1] == "512"
        assert start[start.index("--ctx-checkpoints") + 1] == start[start.index("--cache-ram") + 1] == "0"
    requests = [line["request"] for line in lines if "request" in line]
    assert {line["path"] for line in lines if "path" in line} == {"/completion"}
    assert all(request["samplers"] == ["temperature"] and not request["cache_prompt"] for request in requests)
    by_drafts: dict[int, list[tuple[Any, ...]]] = {}
    for line in lines:
        if "request" in line:
            body = line["request"]
            work = (body["n_predict"], body["temperature"], body["seed"], tuple(body["prompt"]))
            by_drafts.setdefault(line["drafts"], []).append(work)
    assert sorted(by_drafts[0]) == sorted(by_drafts[2])
    assert len(by_drafts[0]) == 2 + 2 * 2 * 2 * 2 + 3 * 2  # warm-up, rounds x temperatures x batches x 2, first tokens


def test_pairs_share_files_and_name_both_formats(
    build: Path, fake_worker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, kept = tmp_path / "report.json", tmp_path / "gguf"
    kept.mkdir()
    flags = ["--llama-cpp", str(build), "--gguf-folder", str(kept), "--json", str(file), "--temperatures", "0"]
    assert (
        llama_cpp.main(["--pairs", "gguf:Q4_K_M", "int8:Q4_K_M", *flags, *SMALL, "--rounds", "1", "--ttft", "8"]) == 0
    )
    assert_all_ended(build)
    report = json.loads(file.read_text("utf8"))
    same, own = report["settings"]
    assert (same["format"], same["gguf"], own["format"], own["gguf"]) == ("gguf", "Q4_K_M", "int8", "Q4_K_M")
    assert {(row["format"], row["gguf"]) for row in report["first_tokens"]} == {("gguf", "Q4_K_M"), ("int8", "Q4_K_M")}
    made = {path.name.rpartition("-")[2]: path for path in kept.iterdir()}
    assert sorted(made) == ["BF16.gguf", "Q4_K_M.gguf"]
    (first, *loads) = [json.loads(line) for line in Path(f"{fake_worker}.loads").read_text().splitlines()]
    assert (first["model"], first["quantization"]) == (
        None,
        "int8",
    )  # it encodes the prompts: no GGUF file is there yet
    models = {(load["model"], load["quantization"]) for load in loads}
    assert models == {(str(made["Q4_K_M.gguf"]), "auto"), (None, "int8")}
    assert "gguf against Q4_K_M, temperature 0, batch 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("ends", "the server ended with status 1: srv: unknown model architecture"),
        pytest.param("refuses", "llama-server answered 400: ", marks=pytest.mark.slow),
        ("dies", "the server ended with status 3: srv: a tensor is lost"),
    ],
)
def test_a_llama_server_that_fails(
    mood: str,
    message: str,
    build: Path,
    fake_worker: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_LLAMA", mood)
    said = error_of(capsys, "--llama-cpp", str(build), "--formats", "bf16", "--drafts", "0", "--trees", "")
    assert message in said
    assert_all_ended(build)


def test_an_engine_that_fails(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--llama-cpp", str(build), "--startup-timeout", "0.3"]
    scripts = {
        "import sys; sys.exit('no torch')": "the process of an engine ended: no torch",
        'input(); print(\'{"error": "too little memory"}\')': "error: too little memory",
        "import time; time.sleep(60)": "gave no answer in time (--startup-timeout",
    }
    for script, message in scripts.items():
        monkeypatch.setattr(engine_process, "WORKER", (sys.executable, "-S", "-c", script))
        assert message in error_of(capsys, *flags if "sleep" in script else flags[:2])


def test_a_converter_that_fails(build: Path, fake_worker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converter = build.parent / "source" / "convert_hf_to_gguf.py"
    scripts = {
        "import sentencepieces_that_are_missing": "pip install sentencepieces_that_are_missing",
        "raise SystemExit('Model Foo is not supported')": "failed with status 1: Model Foo is not supported",
    }
    for script, message in scripts.items():
        converter.write_text(script)
        assert message in error_of(capsys, "--llama-cpp", str(build))
    assert noted(build) == []


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
from specmamba.bench.llama_cpp import engine_process
from specmamba.bench.llama_cpp.__main__ import main
engine_process.WORKER = (sys.executable, "-S", "-c", {worker!r})
sys.exit(main(["--llama-cpp", {build!r}, "--formats", "bf16", "--drafts", "0", "--trees", ""]))
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_server_too(number: signal.Signals, status: int, build: Path, fake_worker: Path) -> None:
    script = INTERRUPTED.format(worker=_script(fake_worker), build=str(build))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FAKE_LLAMA": "hangs"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)
    try:
        wait_until(lambda: any("request" in line for line in noted(build)))
        process.send_signal(number)
        assert process.wait(120) == status
    finally:
        process.kill()
        process.wait()
    assert_all_ended(build)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_with_engines(build: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--llama-cpp", str(build), "--formats", "bf16,int8", "--temperatures", "0", "--batch", "2"]
    small = [
        "--rounds",
        "1",
        "--num-prompts",
        "1",
        "--max-tokens",
        "6",
        "--drafts",
        "0,1",
        "--trees",
        "",
        "--ttft",
        "9",
    ]
    assert llama_cpp.main([*flags, *small, "--num-threads", "1", "--ttft", "9", "--json", str(file)]) == 0
    report = json.loads(file.read_text("utf8"))
    bf16, int8 = report["settings"]
    assert (bf16["format"], int8["format"], bf16["batch"]) == ("bf16", "int8", 2)
    for setting in report["settings"]:
        assert setting["specmamba"]["plain"]["accept_length"] == 1
        assert all(figures["tokens_per_s"]["median"] > 0 for figures in setting["specmamba"].values())
        assert setting["memory_gb_per_s"]["median"] > 0
    assert int8["weight_bytes"]["specmamba"] < bf16["weight_bytes"]["specmamba"]
    assert all(row["specmamba_ms"]["median"] > 0 for row in report["first_tokens"])
    assert_all_ended(build)
