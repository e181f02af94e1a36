"""Unmodified client programs against this server: langchain, lm-eval, schemathesis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from specmamba.config import DEMO_MODEL, EngineConfig
from tests.api.test_api_reasoning import conversations, serving_thoughts, write
from tests.api.test_api_tools import CALL
from tests.api.test_api_tools import WEATHER as TOOL
from tests.fake_engine import Served, serving, wait_until

pytestmark = pytest.mark.slow

MODEL = "specmamba-demo"


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    from specmamba.engine.engine import Engine

    engine = Engine(EngineConfig(dtype="float32", max_running_requests=4, max_total_tokens=4096))
    with serving(engine) as served:
        yield served
        wait_until(lambda: not engine.has_unfinished_requests)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens) == (0, 0, 0)


# ---- langchain -------------------------------------------------------------------------------------------------------


class Verdict(BaseModel):
    """What the model is made to say."""

    is_ok: bool


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning")
def test_langchain(demo: Served) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    common: dict[str, Any] = {"base_url": demo.url + "/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    completion = OpenAI(max_tokens=12, **common)
    text = completion.invoke("def main():")
    assert text == "".join(completion.stream("def main():"))
    assert text == demo.complete(prompt="def main():", max_tokens=12, temperature=0).json()["choices"][0]["text"]
    chat = ChatOpenAI(**common | {"max_tokens": 24})
    endless = ChatOpenAI(**common | {"max_tokens": 24, "extra_body": {"ignore_eos": True}})
    message = endless.invoke("def main():")
    assert message.content == "".join(str(chunk.content) for chunk in endless.stream("def main():"))
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 24
    for method in ("json_schema", "function_calling"):
        answer = chat.with_structured_output(Verdict, method=method).invoke("is it?")
        assert isinstance(answer, Verdict)


def langchain_of(served: Served) -> Any:
    from langchain_openai import ChatOpenAI

    common: dict[str, Any] = {"base_url": served.url + "/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    return ChatOpenAI(**common | {"max_tokens": 200})


def joined(chunks: list[Any]) -> Any:
    whole, *others = chunks
    for chunk in others:
        whole += chunk
    return whole


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning")
def test_langchain_forces_the_demo_to_call_a_tool(demo: Served) -> None:
    forced = langchain_of(demo).bind_tools([Verdict], tool_choice="any")
    (call,) = forced.invoke("is it?").tool_calls
    assert call["name"] == "Verdict"
    Verdict.model_validate(call["args"])
    (streamed,) = joined(list(forced.stream("is it?"))).tool_calls
    assert (streamed["name"], streamed["args"]) == ("Verdict", call["args"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning")
def test_langchain_sends_the_result_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model chooses: scripted, as the demo knows no tools."""
    from langchain_core.messages import HumanMessage, ToolMessage

    seen = conversations(monkeypatch)
    with serving_thoughts() as served:
        chat = langchain_of(served).bind_tools([TOOL])
        write(served, monkeypatch, f"Hm.</think>Let me see.\n{CALL}")
        answer = chat.invoke("u")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Köln"})]
        assert joined(list(chat.stream("u"))).tool_calls[0]["args"] == {"city": "Köln"}
        write(served, monkeypatch, "</think>12 degrees.")
        result = ToolMessage("12°", tool_call_id=answer.tool_calls[0]["id"])
        assert chat.invoke([HumanMessage("u"), answer, result]).content == "12 degrees."
        assert [message["role"] for message in seen[-1]] == ["user", "assistant", "tool"]
        assert seen[-1][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}


# ---- lm-eval ---------------------------------------------------------------------------------------------------------

DOCUMENTS: list[dict[str, Any]] = [
    {"prompt": "import os\n\ndef read_file(path):\n    ", "choices": ["return open(path)", "class"], "label": 0},
    {"prompt": "for i in range(", "choices": ["10):", "import os"], "label": 0},
]
TASKS: dict[str, dict[str, object]] = {
    "generation": {
        "output_type": "generate_until",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "likelihood": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
}


def run_lm_eval(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of both tasks, as lm-eval writes them."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        common: dict[str, object] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    arguments = f"model={MODEL},base_url={url}/v1/completions,tokenizer={DEMO_MODEL},tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--include_path", str(folder), "--tasks", ",".join(TASKS), "--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--log_samples"],
        env={**os.environ, **offline},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = {name: next((folder / "out").rglob(f"samples_{name}_*")) for name in TASKS}
    return {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in found.items()}


def log_likelihood(model: Qwen3_5ForCausalLM, context: list[int], whole: list[int]) -> tuple[float, bool]:
    """Of what follows the context, and whether greedy decoding would have written it."""
    with torch.inference_mode():
        logits = model(torch.tensor([whole])).logits[0, len(context) - 1 : -1]
    rest = torch.tensor(whole[len(context) :])
    return logits.log_softmax(-1).gather(1, rest[:, None]).sum().item(), bool((logits.argmax(-1) == rest).all())


def test_lm_eval(demo: Served, tmp_path: Path) -> None:
    samples = run_lm_eval(demo.url, tmp_path)
    for sample in samples["generation"]:
        body = {"prompt": sample["arguments"]["gen_args_0"]["arg_0"], "max_tokens": 12, "temperature": 0}
        expected = demo.complete(**body, stop=["\n\n"]).json()["choices"][0]["text"]
        assert sample["resps"][0][0] == expected
    model = Qwen3_5ForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    for sample in samples["likelihood"]:
        for index, (response,) in enumerate(sample["resps"]):
            call = sample["arguments"][f"gen_args_{index}"]
            context = tokenizer(call["arg_0"].rstrip()).input_ids  # spaces at the end go to the continuation
            expected_value, is_greedy = log_likelihood(
                model, context, tokenizer(call["arg_0"] + call["arg_1"]).input_ids
            )
            assert float(response[0]) == pytest.approx(expected_value, abs=1e-3)
            assert response[1] == str(is_greedy)


# ---- schemathesis ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short() -> Iterator[Served]:
    """The demo with a short context, so that every answer is short."""
    from specmamba.engine.engine import Engine

    with serving(Engine(EngineConfig(context_length=48, max_running_requests=8, max_total_tokens=1024))) as served:
        yield served


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_match_the_openapi_schema(short: Served, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(short.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # the other routes have no body
        operations = [operation for operation in operations if operation.body or operation.query]
    assert {"/v1/completions", "/v1/chat/completions"} <= {o.path for o in operations}
    for operation in operations:

        @EXAMPLES
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(checks=CHECKS)

        call()
