"""The page for users of other runtimes agrees with the table that the program reads, and names what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from specmamba.config import EngineConfig
from specmamba.flags.command_line import parse_command_line
from specmamba.flags.other_names import (
    METHODS,
    OTHER_FIELDS,
    OTHER_NAMES,
    OTHER_PARAMS,
    OTHER_VALUES,
    SPECULATIVE,
    SPECULATIVE_FIELDS,
    Fixed,
    Renamed,
    flag_of,
)
from specmamba.server.api.conversation import ChatCompletionRequest
from specmamba.server.api.requests import CompletionRequest
from specmamba.server_config import ServerConfig
from tests.fake_engine import serving
from tests.repository import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text("utf8")
CODE = re.compile(r"`([^`]+)`")

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")


def rows(heading: str) -> Iterator[list[list[str]]]:
    """The code in each cell of the tables below a heading, row by row."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    for line in section[1].splitlines():
        if line.startswith("| ") and not line.startswith("| there") and not line.startswith("| address"):
            yield [CODE.findall(cell) for cell in line.strip("| ").split(" | ")]


def second_cells() -> dict[str, list[str]]:
    """The second cell by what is in the first."""
    return {there: second for first, second, *_ in rows("Flags that are understood") for there in first}


def test_the_flags_are_those_of_the_table() -> None:
    understood = second_cells()
    for name, known in OTHER_NAMES.items():
        flag = flag_of(name)
        if isinstance(known, Fixed):
            assert flag in understood, flag
        elif known.is_inverted:
            negated = f"--no-{flag[2:]}"
            assert understood[negated] == [flag_of(known.field)]
            assert understood[flag] == [f"--no-{flag_of(known.field)[2:]}"]
        else:
            assert understood[flag] == [flag_of(known.field)], flag
    known_flags = {flag_of(name) for name in (SPECULATIVE, *OTHER_NAMES)} | {"--no-enable-prefix-caching"}
    assert {there for there in understood if there.startswith("--")} == known_flags


def test_what_is_accepted_is_said() -> None:
    said = second_cells()
    for name, known in OTHER_NAMES.items():
        words = [str(one) for one in known.allowed if isinstance(one, str)] if isinstance(known, Fixed) else []
        assert not words or said[flag_of(name)] == words


def test_the_parts_of_a_speculative_configuration_are_said() -> None:
    of_parts = second_cells()
    for part, field in SPECULATIVE_FIELDS.items():
        assert any(here.startswith(flag_of(field)) for here in of_parts[part])
    for method in METHODS:
        assert method in of_parts


def test_values_are_said() -> None:
    spans = set(CODE.findall(PAGE))
    words = {word.lower() for span in spans for word in span.split()}
    for field, values in OTHER_VALUES.items():
        assert any(span.startswith(flag_of(field)) for span in spans)
        assert {*values, *values.values()} <= words
    assert {*OTHER_PARAMS, *OTHER_PARAMS.values()} <= words


@pytest.mark.parametrize("heading", ["Flags that are understood", "llama.cpp"])
def test_our_flags_are_taken(heading: str) -> None:
    fields = {flag_of(name) for name in ServerConfig.model_fields}
    fields |= {f"--no-{flag[2:]}" for flag in fields} | {"--speculative-config.method"}
    here = [span.split()[0] for row in rows(heading) for cell in row[1:] for span in cell if span.startswith("--")]
    assert set(here) <= fields
    assert here


def test_flags_of_sglang_have_their_names_here() -> None:
    section = re.search(r"^## SGLang\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None
    flags = CODE.findall(section[1])
    assert {flag for flag in flags if flag.startswith("--")} <= {flag_of(name) for name in ServerConfig.model_fields}
    assert parse_command_line(ServerConfig, "test", []).port == 30000


def test_addresses() -> None:
    with serving() as served:
        paths = set(served.http.get("/openapi.json").json()["paths"]) | {"/get_model_info", "/get_server_info"}
        for first, _, here in rows("Addresses"):
            own = {span for span in here if span.startswith("/")}
            assert own <= paths, own
            if not set(first) & paths:
                codes = {served.http.post(path, json={}).status_code for path in first}
                assert codes == {404}, first
        for path in ("/get_model_info", "/get_server_info"):
            assert served.http.get(path).status_code == 200


def test_fields_of_requests() -> None:
    fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    section = re.search(r"^As in vLLM and SGLang: (.*) Others:$", PAGE, re.MULTILINE)
    assert section is not None
    assert set(CODE.findall(section[1])) <= fields
    for first, _, here in rows("Fields of a request"):
        assert {span.rstrip(":") for span in here} <= fields
        assert not set(first) & fields - set(here)
        for span in set(first) - fields:
            assert OTHER_FIELDS[span] == here[0].rstrip(":")
    assert {span for first, *_ in rows("Fields of a request") for span in first} >= set(OTHER_FIELDS)


def test_what_is_said_of_defaults() -> None:
    fields = EngineConfig.model_fields
    assert (fields["max_running_requests"].default, fields["page_size"].default) == (16, 1)
    assert fields["mem_fraction_static"].default == 0.5
    assert all(isinstance(known, Renamed | Fixed) for known in OTHER_NAMES.values())
