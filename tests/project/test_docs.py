"""What the documentation says exists: links, flags, metrics, defaults and figures."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specmamba.cache.split import SplitStats
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.chat_config import ChatConfig
from specmamba.cli import COMMANDS, SUBCOMMANDS
from specmamba.config import DEMO_MODEL, CommandLine, EngineConfig
from specmamba.core import ChainStats, SizingStats
from specmamba.engine.replica_control import ReplicaStats
from specmamba.flags.command_line import _OTHER_VARIABLES, all_fields, parse_command_line
from specmamba.generate_config import GenerateConfig
from specmamba.info import InfoConfig
from specmamba.server.observe.metrics import ServerMetrics
from specmamba.server_config import ServerConfig
from specmamba.transfer.handoff_stats import HandoffStats
from tests.fake_engine import FakeEngine, serving
from tests.repository import ROOT, tracked_files

EVERY_PAGE = [name for name in tracked_files() if name.endswith(".md") and "/vendor/" not in name]
PAGES = [name for name in EVERY_PAGE if re.fullmatch(r"README\.md|(docs|deploy)/.*", name)]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"--[a-z][a-z-]+")


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf8")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    yield from FENCE.findall(text_of(page))


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(file: Path) -> set[str]:
    """Of the headings; in code "#" begins a comment."""
    text = FENCE.sub("", file.read_text("utf8"))
    return {anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_index_has_every_page() -> None:
    linked = {(ROOT / "docs" / target).resolve() for target in LINK.findall(text_of("docs/index.md"))}
    assert {(ROOT / page).resolve() for page in PAGES if page not in ("docs/index.md", "README.md")} <= linked


PLACES = ("", "specmamba", "specmamba/server", "kernels", "tests", "bench")  # that names of files are relative to
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|toml|json|ya?ml|cpp|h|js|html|service|jsonl|safetensors)")


@pytest.mark.parametrize("page", [page for page in EVERY_PAGE if "/demo/" not in page])  # which names Python's files
def test_files_in_the_text_exist(page: str) -> None:
    """Names of files with their folder, from the repository's root or one of its packages."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))
    named = {word for span in spans for word in span.split() if FILE.fullmatch(word)}
    folders = [*PLACES, str(Path(page).parent)]
    assert {name for name in named if not any((ROOT / folder / name).is_file() for folder in folders)} == set()


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf8"), re.MULTILINE))
    for page in EVERY_PAGE:
        code = [code for _, code in blocks(page)] + re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))
        used = {word for text in code for word in re.findall(r"^(?:[A-Z_]+=\S+ )*make ([a-z-]+)", text, re.MULTILINE)}
        assert used <= targets, page
    assert {"serve", "test", "check"} <= targets


def test_variables_of_the_environment_exist() -> None:
    known = {"SPECMAMBA_" + name.upper() for name in all_fields()}
    known |= _OTHER_VARIABLES
    for page in PAGES:  # those of kernels name macros of C++
        used = set(re.findall(r"\bSPECMAMBA_[A-Z_]*[A-Z]\b", text_of(page)))
        assert used <= known, page


@pytest.mark.usefixtures("no_settings_from_outside")
def test_settings_in_toml_are_settings(tmp_path: Path) -> None:
    for page in PAGES:
        for number, code in enumerate(code for language, code in blocks(page) if language == "toml"):
            file = tmp_path / f"{number}.toml"
            file.write_text(code)
            parse_command_line(ServerConfig, "specmamba serve", ["--config", str(file)])


@pytest.mark.parametrize("page", PAGES)
def test_python_in_the_docs_is_python(page: str) -> None:
    for language, code in blocks(page):
        if language == "python":
            ast.parse(textwrap.dedent(code), page)


# Flags


def flags_of(*classes: type[CommandLine]) -> set[str]:
    names = {name.replace("_", "-") for settings in classes for name in settings.model_fields}
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names} | {"--help", "--version", "--config"}


def tool_flags() -> set[str]:
    """The flags of the tools, which have their configurations in modules that are slow to import."""
    found: set[str] = set()
    for name in tracked_files():
        if re.fullmatch(r"(bench|specmamba/(cluster|doctor|measure|scale_sim|train|tune))/.*\.py", name):
            tree = ast.parse((ROOT / name).read_text("utf8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add("--" + node.target.id.replace("_", "-"))
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and FLAG.fullmatch(node.value):
                    found.add(node.value)  # argparse's
    return found


@pytest.fixture(scope="module")
def every_flag() -> set[str]:
    return flags_of(EngineConfig, ServerConfig, GenerateConfig, ChatConfig, InfoConfig) | tool_flags()


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_text_exist(page: str, every_flag: set[str]) -> None:
    """In a line's code; that of another tool begins with its name."""
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", text_of(page)))
    ours = [span for span in spans if span.startswith(("--", "specmamba "))]
    used = {flag for span in ours for flag in FLAG.findall(span)}
    assert used - every_flag - FOREIGN.get(page, set()) == set()


def in_first_column(page: str) -> set[str]:
    """Flags in the first column of a page's tables: what has another name here."""
    return {flag for line in re.findall(r"^\| ([^|]+) \|", text_of(page), re.MULTILINE) for flag in FLAG.findall(line)}


FOREIGN = {
    "docs/coming_from.md": in_first_column("docs/coming_from.md") | {"--speculative-config"},
    "deploy/README.md": {"--publish", "--env", "--stop-timeout", "--read-only", "--tmpfs", "--user"},  # Docker's
    "docs/benchmarking_clients.md": {"--tokenizer", "--data", "--backend", "--endpoint"},  # load generators'
    "docs/scaling.md": {
        "--policy",
        "--worker-urls",
        "--pd-disaggregation",
        "--prefill",
        "--decode",
    },  # of SGLang's router
    # SGLang's, which does not exist here; and those of ``specmamba cache``, which is no configuration
    "docs/prefix_cache.md": {"--enable-cache-report", "--size", "--all"},
}


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command line of ours."""
    for _, code in blocks(page):
        for line in code.replace("\\\n", " ").splitlines():
            if re.match(r"(\.venv/bin/)?specmamba ", line):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_with_their_flags(page: str, every_flag: set[str]) -> None:
    for words in commands(page):
        command, *rest = words
        assert command in COMMANDS, words
        if command in SUBCOMMANDS:
            assert rest[0] in SUBCOMMANDS[command], words
        classes: dict[str, type[CommandLine]] = {"serve": ServerConfig, "generate": GenerateConfig, "chat": ChatConfig}
        classes["info"] = InfoConfig
        allowed = flags_of(classes[command]) if command in classes else every_flag
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= allowed, words


def as_written(value: Any) -> str:
    """A default as the table has it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_operations_has_every_flag_of_the_server_with_its_default() -> None:
    table = dict(re.findall(r"^\| (`--[^|]+) \| ([^|]+) \|", text_of("docs/operations.md"), re.MULTILINE))
    said = {}
    for names, defaults in table.items():
        for name, default in zip(FLAG.findall(names), defaults.split(", "), strict=True):
            said[name] = default.removesuffix(" s").removesuffix(" MiB")
    own = {name: field for name, field in ServerConfig.model_fields.items() if name not in EngineConfig.model_fields}
    expected = {"--" + name.replace("_", "-"): as_written(field.default) for name, field in own.items()}
    expected["--served-model-name"] = "the model's path"
    assert said == expected


# Metrics, figures


def test_operations_has_every_metric() -> None:
    sizing = SizingStats(1, 1, 0, 1, 1, 0, 0.1, 0.1, 0.1, 0.0, 0, (1.0,), "off")
    disk = TierStats(1, 1, 1, 0, 0, 0, {"absent": 1}, 0.0, 0, 1, 1, {"busy": 0}, 0, 0)
    handoffs = HandoffStats(1, 1, 0.1, {"slow": 1}, 0)
    split = SplitStats(1, 1, 1)
    replicas = ReplicaStats({"ready": 2}, 0, 1, 0, {"0": 1})
    stats = replace(FakeEngine().stats(), sizing=sizing, split=split, host=disk, disk=disk, store=disk)
    stats = replace(stats, handoffs=handoffs, replicas=replicas, chain=ChainStats(1, 1, 0, 0, 0, 0))
    rendered = ServerMetrics().render(stats).decode()
    real = {
        name + ("_total" if kind == "counter" and not name.endswith("_total") else "")
        for name, kind in re.findall(r"^# TYPE (specmamba_\w+) (\w+)$", rendered, re.MULTILINE)
        if not name.endswith("_created")
    }
    documented = set(re.findall(r"`(specmamba_[a-z0-9_]+)(?:\{\w+\})?`", text_of("docs/operations.md")))
    assert documented == real


def test_operations_has_every_address() -> None:
    with serving() as served:
        paths = {path.partition("{")[0].rstrip("/") for path in served.http.get("/openapi.json").json()["paths"]}
    documented = set(re.findall(r"`(?:GET|POST) (/[\w/.]*)`", text_of("docs/operations.md")))
    assert documented == paths | {"/", "/docs", "/events", "/openapi.json"}


def test_operations_has_codes_that_exist() -> None:
    """And all that are told to clients: after a hang-up no client reads them."""
    sources = "".join(file.read_text("utf8") for file in sorted((ROOT / "specmamba").glob("**/*.py")))
    codes = set(re.findall(r'\bcode(?:: str)? ?= ?"(\w+)"', sources)) - {"disconnect", "client_gone"}
    documented = set(re.findall(r"^\| (\d{3}[^|]*`[^|]+) \|", text_of("docs/operations.md"), re.MULTILINE))
    named = {code for cell in documented for code in re.findall(r"`(\w+)`", cell)}
    assert codes - {"too_long"} <= named
    assert all(f'"{code}"' in sources for code in named)


def figures(run: str) -> dict[str, tuple[str, str]]:
    report = json.loads((ROOT / "bench/results/cpu/2026-11-20-acceptance.json").read_text("utf8"))["runs"][run]
    return {
        f"{each['num_steps']}, {each['topk']}, {each['num_draft_tokens']}": (
            f"{each['accept_length']:.2f}",
            f"{each['speedup']:.2f}x",
        )
        for each in report["configurations"]
    }


@pytest.mark.parametrize(
    ("first_row", "runs"),
    [(0, ["infl-replay-b1", "infl-t0.8-b1", "infl-t0-b1"]), (5, ["infl-t0.8-b8", "infl-t0-b8"])],
)
def test_the_tables_of_speculation_are_what_was_measured(first_row: int, runs: list[str]) -> None:
    rows = re.findall(r"^\| (\d, \d, \d+) \| (.*) \|$", text_of("docs/speculation.md"), re.MULTILINE)
    for shape, cells in rows[first_row : first_row + 5]:
        measured = [figure for run in runs for figure in figures(run)[shape]]
        assert cells.split(" | ")[: len(measured)] == measured, shape


def test_the_demo_has_as_many_parameters_as_the_pages_say() -> None:
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    of_head = sum(size for name, size in sizes.items() if name.startswith("mtp"))
    whole = f"{sum(sizes.values()) / 1e6:.1f} million parameters"
    for page in ("README.md", "docs/quickstart.md", "specmamba/demo/MODEL_CARD.md"):
        found = re.findall(r"[\d.]+ ?(?:M|million)[ -]parameters?", text_of(page))
        of_demo = [words for words in found if float(words.split("M")[0].split()[0]) < 100]
        assert of_demo
        assert set(of_demo) == {whole}, page
    assert f"{of_head / 1e6:.1f} million of them in its MTP head" in text_of("README.md")
