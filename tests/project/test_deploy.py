"""What can be said of the image and the service without building and starting them."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from specmamba.server_config import ServerConfig
from tests.repository import ROOT, tracked_files

INSTRUCTIONS = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK"}
INSTRUCTIONS |= {"ENTRYPOINT", "CMD"}
UNIT = ROOT / "deploy/systemd/specmamba.service"


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of every instruction of the Dockerfile, continued lines joined."""
    lines = (line for line in (ROOT / "Dockerfile").read_text("utf8").splitlines() if not line.startswith("#"))
    logical = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    found = [line.split(None, 1) for line in logical if line.strip()]
    return [(name, arguments.strip()) for name, arguments in found]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of every stage, by its name; "" is what comes before the first."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for name, arguments in instructions():
        if name == "FROM":
            _, _, stage = arguments.partition(" AS ")
            assert stage not in found
            found[stage] = [(name, arguments)]
        else:
            found[list(found)[-1]].append((name, arguments))
    return found


def arguments_of(stage: str, name: str) -> list[str]:
    return [arguments for each, arguments in stages()[stage] if each == name]


def test_instructions_are_known() -> None:
    assert {name for name, _ in instructions()} == INSTRUCTIONS


def test_stages_build_on_what_exists() -> None:
    given = dict(argument.split("=", 1) for argument in (text for name, text in stages()[""] if name == "ARG"))
    assert set(stages()) == {"", "cpu-base", "cuda-base", "build", "serve"}
    assert list(stages())[-1] == "serve"  # what is built where no target is named
    for stage in list(stages())[1:]:
        ((base, _),) = [arguments.split(" AS ") for arguments in arguments_of(stage, "FROM")]
        used = re.findall(r"\$\{(\w+)\}", base)
        assert used
        assert set(used) <= given.keys()
        for variant in ("cpu", "cuda"):
            name = re.sub(r"\$\{(\w+)\}", lambda match: (given | {"VARIANT": variant})[match[1]], base)  # noqa: B023
            assert name in stages() or ":" in name
    for variant in ("cpu", "cuda"):
        assert "g++" in " ".join(arguments_of(f"{variant}-base", "RUN"))  # native kernels; on a GPU Triton's launchers
    assert "python3-dev" in " ".join(arguments_of("cuda-base", "RUN"))


def test_what_is_used_is_declared_in_the_stage() -> None:
    """A build argument from above the first stage is empty in a stage that does not name it again."""
    for stage, found in stages().items():
        declared = {text.partition("=")[0] for name, text in found if name == "ARG"} | {"PATH"}
        for name, text in found:
            if name == "RUN":
                local = set(re.findall(r"(\w+)=", text))
                assert set(re.findall(r"\$\{?(\w+)", text)) <= declared | local, (stage, text)


@pytest.mark.parametrize("stage", ["cpu-base", "cuda-base", "build", "serve"])
def test_commands_are_valid_shell(stage: str) -> None:
    for command in arguments_of(stage, "RUN"):
        ended = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("variant", "extras", "asked"),
    [
        ("cpu", "grammar,otel", ".[grammar,otel]"),
        ("cpu", "", "."),
        ("cuda", "grammar", ".[gpu,grammar]"),
        ("cuda", "", ".[gpu]"),
    ],
)
def test_the_right_extras_are_installed(variant: str, extras: str, asked: str, tmp_path: Path) -> None:
    """The command is run, with a program in pip's place."""
    shown = run_with_fake_pip(arguments_of("build", "RUN")[-1], tmp_path, VARIANT=variant, EXTRAS=extras)
    assert shown == ["install", asked]
    assert run_with_fake_pip(
        arguments_of("build", "RUN")[-1], tmp_path, VARIANT=variant, EXTRAS=extras, INDEX_URL="http://mirror/a b"
    ) == ["install", "--index-url", "http://mirror/a b", asked]


def test_torch_comes_from_where_it_is_said_to(tmp_path: Path) -> None:
    command = arguments_of("build", "RUN")[1]
    assert run_with_fake_pip(command, tmp_path, TORCH="torch==2") == ["install", "torch==2"]
    given = {"TORCH": "torch==2", "INDEX_URL": "http://mirror"}
    assert run_with_fake_pip(command, tmp_path, **given) == ["install", "--index-url", "http://mirror", "torch==2"]
    given["TORCH_INDEX_URL"] = "http://cpu"
    assert run_with_fake_pip(command, tmp_path, **given) == ["install", "--index-url", "http://cpu", "torch==2"]


def run_with_fake_pip(command: str, folder: Path, **arguments: str) -> list[str]:
    pip = folder / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pip.chmod(0o755)
    command = command.replace("/app/bin/pip", str(pip))
    ended = subprocess.run(
        ["sh", "-euc", command],
        env={"INDEX_URL": "", "TORCH_INDEX_URL": "", **arguments},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines()


def test_the_server_runs_without_rights_and_is_looked_after() -> None:
    names = [name for name, _ in stages()["serve"]]
    (user,) = arguments_of("serve", "USER")
    assert user.split(":")[0] not in ("0", "root")
    assert names.index("USER") > names.index("COPY")
    assert names.index("USER") < names.index("ENTRYPOINT")
    check = json.loads(arguments_of("serve", "HEALTHCHECK")[0].split("CMD", 1)[1])
    ast.parse(check[-1])
    assert "/health" in check[-1]
    assert json.loads(arguments_of("serve", "ENTRYPOINT")[0]) == ["specmamba"]
    assert json.loads(arguments_of("serve", "CMD")[0]) == ["serve"]


def test_the_images_variables_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = dict(pair.split("=", 1) for text in arguments_of("serve", "ENV") for pair in text.split())
    ours = {name: value for name, value in variables.items() if name.startswith("SPECMAMBA_")}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    config = ServerConfig()
    assert (config.host, config.port) == ("0.0.0.0", 30000)
    assert ours.keys() == {"SPECMAMBA_HOST", "SPECMAMBA_PORT"}
    (volume,) = arguments_of("serve", "VOLUME")
    caches = {name: value for name, value in variables.items() if name in ("XDG_CACHE_HOME", "HF_HOME")}
    assert all(PurePosixPath(value).is_relative_to(volume) for value in caches.values())


# The build context


def is_ignored(name: str) -> bool:
    """As .dockerignore says: the last pattern that matches the file, or a folder that it is in, decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text("utf8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        path, pattern = PurePosixPath(name), line.removeprefix("!")
        candidates = [path, *list(path.parents)[:-1]]
        if any(matches(candidate, pattern) for candidate in candidates):
            ignored = not line.startswith("!")
    return ignored


def matches(path: PurePosixPath, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return path.match(pattern.removeprefix("**/"))
    return len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)


@cache
def context() -> frozenset[str]:
    return frozenset(name for name in tracked_files() if not is_ignored(name))


def test_the_context_is_what_the_package_is_built_from() -> None:
    found = context()
    packaged = ("specmamba/", "kernels/", "cuda_graphs/", "bench/")
    needed = {name for name in tracked_files() if name.startswith(packaged) and not name.startswith("bench/results/")}
    assert found == needed | {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    for link in ("kernels", "cuda_graphs", "bench"):
        assert not is_ignored(f"specmamba/{link}")
    for unwanted in (".git/config", ".venv/bin/python", "specmamba/__pycache__/cli.cpython-312.pyc", "bench/x.pyc"):
        assert is_ignored(unwanted)


def test_what_is_copied_exists() -> None:
    names = context()
    for copied in arguments_of("build", "COPY"):
        for source in copied.split()[:-1]:
            assert source == "." or source in names or any(name.startswith(f"{source}/") for name in names), source
    (from_build,) = arguments_of("serve", "COPY")
    assert from_build.split() == ["--from=build", "/app", "/app"]


# systemd


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=True, interpolation=None, delimiters="=")
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(UNIT.read_text("utf8"))
    return parsed


def test_the_service_stops_in_time_and_has_no_rights() -> None:
    service = unit()["Service"]
    timeout = float(re.findall(r"--shutdown-timeout (\S+)", service["ExecStart"])[0])
    assert float(service["TimeoutStopSec"]) >= timeout + 20
    assert service["Restart"] == "on-failure"
    expected = {"DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "CapabilityBoundingSet": ""}
    assert {name: service[name] for name in expected} == expected
    assert "specmamba.env" in service["EnvironmentFile"]
    assert "api-key" not in service["ExecStart"]  # every user of the machine could read it


def test_the_service_gives_flags_that_exist() -> None:
    flags = re.findall(r"--([a-z-]+)", unit()["Service"]["ExecStart"])
    assert {flag.replace("-", "_") for flag in flags} <= set(ServerConfig.model_fields)


def test_the_cache_of_the_service_is_no_link() -> None:
    """With a dynamic user the cache directory is a link, which kernels' own folder must not be: it lies in it."""
    pairs = dict(pair.split("=", 1) for pair in unit()["Service"]["Environment"].split())
    assert pairs["XDG_CACHE_HOME"] == f"%C/{unit()['Service']['CacheDirectory']}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_service(tmp_path: Path) -> None:
    runnable = UNIT.read_text("utf8").replace("/srv/specmamba/bin/specmamba", str(Path("/bin/true")))
    (tmp_path / UNIT.name).write_text(runnable)
    ended = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True, check=False
    )
    if "Failed to" in ended.stderr and "manager" in ended.stderr:
        pytest.skip(f"systemd-analyze does not run here: {ended.stderr.strip()}")
    assert (ended.returncode, ended.stderr) == (0, "")
