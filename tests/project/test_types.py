"""What a type checker sees of the Python interface: the flags that there are, and arguments as people write them."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import pytest
from mypy import api

from specmamba import SamplingParams
from specmamba.config import EngineConfig
from specmamba.flags.engine_flags import EngineFlags
from tests.repository import ROOT


def as_given(annotation: Any) -> Any:
    """The type of a field as callers give it: what takes a path takes its text."""
    if annotation is Path:
        return str | Path
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [as_given(part) for part in typing.get_args(annotation)]
        return typing.Union[tuple(parts)]  # noqa: UP007 -- made of a list
    return annotation


def test_the_keywords_of_llm_are_the_fields_of_the_configuration() -> None:
    expected = {name: as_given(field.annotation) for name, field in EngineConfig.model_fields.items()}
    del expected["model"]  # it stands in front of them
    assert typing.get_type_hints(EngineFlags) == expected
    assert EngineFlags.__required_keys__ == frozenset()


def test_sequences_become_tuples() -> None:
    params = SamplingParams(stop=["\n", "a"], stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("\n", "a"), (1, 2))
    assert params == SamplingParams(stop=("\n", "a"), stop_token_ids=(1, 2))
    assert SamplingParams(stop="ab").stop == ("ab",)


GOOD = """
import asyncio
from specmamba import LLM, AsyncLLM, SamplingParams

AsyncLLM("folder", dtype="auto")
with LLM(model="folder", speculative_num_steps=3, speculative_tree="tree.json") as llm:
    params = SamplingParams(stop=["\\n"], stop_token_ids=[5], temperature=0)
    first: str = llm.generate("x", params)[0].text
    llm.generate([{"prompt": "x"}, {"prompt_token_ids": [1], "cache_salt": "a"}], SamplingParams(stop="a"))
    llm.generate([[1, 2], [3]])
    llm.chat([{"role": "user", "content": "x"}])
    reveal_type(llm.stream("x"))
"""
# As if they had no types: none of theirs is in the interface, and reading them takes most of the time.
LARGE = "".join(f"[mypy-{package}.*]\nfollow_imports = skip\n" for package in ("torch", "transformers"))
BAD = """
from specmamba import LLM, AsyncLLM, SamplingParams
LLM(speculative_nm_steps=3)
LLM(dtype="float33")
AsyncLLM(context_length="long")
SamplingParams(stop=[1])
SamplingParams(temprature=1.0)
LLM().generate(5)
LLM(max_model_len=4096)
"""


@pytest.mark.slow
def test_a_type_checker_accepts_what_works_and_names_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)  # no settings of this repository
    (tmp_path / "mypy.ini").write_text("[mypy]\n" + LARGE)
    for name, code in (("good", GOOD), ("bad", BAD)):
        (tmp_path / f"{name}.py").write_text(code)
    options = ["--follow-imports=silent", "--ignore-missing-imports", "--explicit-package-bases"]
    out, err, _ = api.run([*options, "good.py", "bad.py"])
    assert err == ""
    found = {name: [line for line in out.splitlines() if line.startswith(f"{name}.py")] for name in ("good", "bad")}
    assert [line.partition(": ")[2] for line in found["good"]] == [
        'note: Revealed type is "typing.Iterator[specmamba.core.OutputDelta]"'
    ]
    errors = [line for line in found["bad"] if ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == [3, 4, 5, 6, 7, 8, 9]
    assert 'did you mean "speculative_num_steps"' in errors[0]
