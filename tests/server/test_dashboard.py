"""The Grafana dashboard asks for what the server gives, and for all of it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_engine import serving
from tests.repository import ROOT

DASHBOARD = json.loads((ROOT / "deploy/grafana/specmamba.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Labels of every metric, by the name that a query uses."""
    with serving() as server:
        assert server.complete(prompt="ab", temperature=-1).status_code == 400
        server.complete(prompt="ab", max_tokens=4).raise_for_status()
        text = server.http.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_it_asks_for_what_there_is(samples: dict[str, set[str]]) -> None:
    asked = set(re.findall(r"specmamba_\w+", " ".join(EXPRESSIONS)))
    assert asked - set(samples) == set()


def test_it_shows_all_there_is(samples: dict[str, set[str]]) -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples if not name.endswith("_created")}
    asked = " ".join(EXPRESSIONS)
    assert {name for name in families if name.startswith("specmamba_") and name not in asked} == set()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_labels_are_those_of_the_metric(samples: dict[str, set[str]], expression: str) -> None:
    for label in re.findall(r"sum by \((\w+)\)", expression):
        name = re.search(r"specmamba_\w+", expression)
        assert name is not None
        assert label in samples[name.group()]
    assert expression.count("(") == expression.count(")")
    assert expression.count('{job=~"$job"}') == len(re.findall(r"specmamba_\w+", expression))


def test_panels_lie_beside_each_other() -> None:
    for one, other in itertools.combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
