"""A checkpoint without a tokenizer: what is said of it, and token ids in and out with ``--skip-tokenizer-init``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.engine.engine import Engine
from specmamba.errors import CheckpointError, ConfigError, RequestError
from specmamba.models.text.no_tokenizer import NoTokenizer
from specmamba.models.text.tokenizer import Tokenizer
from specmamba.sampling_params import GrammarSpec
from tests.engine.test_engine import assert_idle
from tests.fake_engine import Served, serving, wait_until
from tests.tiny import write_tiny_checkpoint

IDS = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FLAG = "--skip-tokenizer-init leaves out"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    """The continuation by the same model with its tokenizer."""
    with LLM(write_tiny_checkpoint(tmp_path_factory.mktemp("with"), 0), dtype="float32", device="cpu") as llm:
        return llm.generate(IDS, PARAMS)[0].token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("without"), 0)
    for file in (*folder.glob("tokenizer*"), *folder.glob("special*"), *folder.glob("chat_template*")):
        file.unlink()
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True))
    with serving(engine) as served:
        yield served
        wait_until(lambda: not engine.has_unfinished_requests)
        assert_idle(engine)


class TestMissing:
    def test_from_python(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no tokenizer: add .*send token ids \(skip_tokenizer_init\)"):
            LLM(folder, dtype="float32", device="cpu")

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            (None, "", "has no tokenizer: "),
            ("tokenizer_config.json", "{}", "has no tokenizer, only its settings: "),
            ("vocab.json", "{}", "has no tokens: "),
            ("tokenizer.json", "{}", "cannot be loaded: "),
        ],
    )
    def test_info_and_the_server_say_the_same(
        self, folder: Path, name: str | None, content: str, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if name is not None:
            (folder / name).write_text(content)
        try:
            for command in (["generate", "--prompt", "x"], ["info", "--json", "-"]):
                if command[0] == "generate":
                    with pytest.raises(SystemExit, match="2"):
                        main([*command, "--model", str(folder)])
                else:
                    assert main([*command, "--model", str(folder)]) == 0
                out, err = capsys.readouterr()
                said = json.loads(out)["tokenizer"]["problem"] if command[0] == "info" else err
                assert words in said
                assert "send token ids (--skip-tokenizer-init)" in said
        finally:
            if name is not None:
                (folder / name).unlink()

    def test_info_with_the_flag(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", "--model", str(folder), "--skip-tokenizer-init"]) == 0
        assert "not read (--skip-tokenizer-init)" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize(
        "command",
        [
            "generate --prompt x",
            "generate --json --prompt x",
            "chat",
            "doctor",
            "tune tree",
            "train draft --out x",
            "bench acceptance",
        ],
    )
    def test_a_command_that_writes_texts(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main([*command.split(), "--model", "/nowhere", "--skip-tokenizer-init"])
        assert "--skip-tokenizer-init: this command reads and writes texts: drop it" in capsys.readouterr().err

    def test_a_corpus_is_a_text(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="speculative_ngram_corpus: a text needs the tokenizer"):
            LLM(speculative_algorithm="ngram", speculative_ngram_corpus=tmp_path, skip_tokenizer_init=True)


class TestPython:
    def test_token_ids_in_and_out(self, llm: LLM, expected: tuple[int, ...]) -> None:
        for prompt in ({"prompt_token_ids": IDS}, IDS):
            output = llm.generate(prompt, PARAMS)[0]
            assert (output.token_ids, output.text, output.finish_reason) == (expected, "", "length")
        assert [token for delta in llm.stream(IDS, PARAMS) for token in delta.token_ids] == [*expected]
        scored = llm.generate(IDS, PARAMS.model_copy(update={"logprobs": 1, "prompt_logprobs": 1}))[0]
        assert len(scored.logprobs) == 6
        stop = PARAMS.model_copy(update={"stop_token_ids": (expected[2],)})
        assert llm.generate(IDS, stop)[0].finish_reason == "stop"
        assert_idle(llm.engine)

    @pytest.mark.parametrize(
        ("ask", "param"),
        [
            (lambda llm: llm.generate("x", PARAMS), "prompt"),
            (lambda llm: llm.generate([{"prompt_token_ids": IDS}, "x"], PARAMS), "prompt"),
            (lambda llm: next(llm.stream("x")), "prompt"),
            (lambda llm: llm.chat([{"role": "user", "content": "x"}]), "messages"),
            (lambda llm: llm.generate(IDS, SamplingParams(stop="x")), "stop"),
            (lambda llm: llm.generate(IDS, SamplingParams(grammar=GrammarSpec(kind="json_object"))), "grammar"),
            (lambda llm: llm.get_tokenizer().decode(IDS), "tokens"),
        ],
    )
    def test_texts_are_refused(self, llm: LLM, ask: Callable[[LLM], object], param: str) -> None:
        with pytest.raises(RequestError, match=FLAG) as refused:
            ask(llm)
        assert refused.value.param == param
        assert_idle(llm.engine)


class TestHttp:
    def test_token_ids_in_and_out(self, served: Served, expected: tuple[int, ...]) -> None:
        body = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        (choice,) = served.complete(**body).json()["choices"]
        assert [piece["id"] for piece in choice["tokens"]] == [*expected]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert {piece["text"] for piece in choice["tokens"]} == {""}
        lines = served.complete(**body, stream=True).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        pieces = [piece["id"] for chunk in chunks for piece in chunk["choices"][0]["tokens"]]
        assert pieces == [*expected]

    def test_scores_name_tokens_by_their_ids(self, served: Served) -> None:
        answer = served.complete(prompt=IDS, max_tokens=0, echo=True, logprobs=2).json()
        (choice,) = answer["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in IDS]
        assert len(choice["logprobs"]["top_logprobs"][1]) >= 2

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("completions", {"prompt": "x"}, "prompt"),
            ("completions", {"prompt": IDS, "stop": ["x"]}, "stop"),
            ("completions", {"prompt": IDS, "regex": "a+"}, "regex"),
            ("completions", {"prompt": IDS, "suffix": "x"}, "suffix"),
            ("completions", {"prompt": IDS, "response_format": {"type": "json_object"}}, "response_format"),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ("tokenize", {"prompt": "x"}, "prompt"),
            ("tokenize", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
            ("detokenize", {"tokens": IDS}, "tokens"),
        ],
    )
    def test_texts_are_refused(self, served: Served, path: str, body: dict[str, Any], param: str) -> None:
        answer = served.http.post(f"/v1/{path}" if path.endswith("completions") else f"/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert FLAG in error["message"]

    def test_the_live_page_shows_ids(self, served: Served) -> None:
        """Of cached tokens, which have no texts."""
        served.complete(prompt=IDS, max_tokens=2, temperature=0, ignore_eos=True)
        with served.http.stream("GET", "/events") as response:
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            nodes = next(event["nodes"] for event in map(json.loads, events) if event.get("nodes"))
        assert any((node["text"] or "").startswith("5 6 7") for node in nodes), nodes

    @pytest.mark.parametrize("path", ["/health", "/server_info", "/v1/models", "/metrics", "/cache", "/model_info"])
    def test_the_rest_works(self, served: Served, path: str) -> None:
        assert served.http.get(path).status_code == 200


def test_nothing_of_a_tokenizer_is_inherited() -> None:
    """It would read what is not there."""
    public = {name for name, _ in inspect.getmembers(Tokenizer) if not name.startswith("_")}
    assert public <= set(vars(NoTokenizer))
