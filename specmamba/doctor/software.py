"""Installed packages, and whether their versions are supported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal

from specmamba import __version__

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "jinja2"),
    *("pydantic", "fastapi", "starlette", "uvicorn", "prometheus-client", "rich"),
)
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong, and what to do about it. Errors make the exit status 1, warnings do not."""

    severity: Literal["error", "warning"]
    what: str
    advice: str


def error(what: str, advice: str) -> Problem:
    """A problem that keeps the server from running."""
    return Problem("error", what, advice)


def warning(what: str, advice: str) -> Problem:
    """A problem that the server runs with."""
    return Problem("warning", what, advice)


@dataclass(frozen=True, slots=True)
class Extra:
    """Packages that only some features need: ``pip install 'specmamba[NAME]'``."""

    packages: tuple[str, ...]
    purpose: str


EXTRAS = {
    "gpu": Extra(("triton",), "kernels for GPUs"),
    "bench": Extra(("httpx", "matplotlib"), "specmamba bench, tune and train"),
    "grammar": Extra(("xgrammar",), "JSON schemas, regular expressions and grammars"),
    "otel": Extra(
        ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "--otlp-traces-endpoint"
    ),
    "scale": Extra(("ray",), "replicas on several machines, by Ray Serve"),
    "mooncake": Extra(
        ("mooncake-transfer-engine-non-cuda",), "prefixes in a store that several machines share; handoffs"
    ),
    "nixl": Extra(("nixl",), "prompts that are handed over by NIXL"),
    "compiler": Extra(("ziglang",), "native kernels on a machine without a C++ compiler"),
}


def examine_software() -> tuple[Facts, list[Problem]]:
    """{"python", "specmamba", "packages": {name: version or null}, "extras": {name: {"installed", "missing"}}}."""
    ranges = declared_ranges()
    extra_packages = [name for extra in EXTRAS.values() for name in extra.packages]
    found = {name: installed_version(name) for name in (*PACKAGES, *extra_packages)}
    facts = {
        "python": platform.python_version(),
        "specmamba": __version__,
        "packages": {name: found[name] for name in PACKAGES},
        "extras": {name: _extra_facts(extra, found) for name, extra in EXTRAS.items()},
    }
    return facts, list(_problems(found, ranges))


def report_without_torch(failure: Exception) -> Facts:
    """Report an installation whose packages cannot be imported."""
    facts, problems = examine_software()
    what = f"the packages cannot be imported: {type(failure).__name__}: {failure}"
    problems.append(error(what, "install specmamba anew, into a virtual environment of its own"))
    parts = dict.fromkeys(("device", "hardware", "kernels", "model"))
    found = [asdict(problem) for problem in problems]
    return {"ok": False, "seconds": 0.0, "software": facts, **parts, "self_tests": [], "problems": found}


def _extra_facts(extra: Extra, found: dict[str, str | None]) -> Facts:
    return {
        "purpose": extra.purpose,
        "installed": {name: found[name] for name in extra.packages if found[name] is not None},
        "missing": [name for name in extra.packages if found[name] is None],
    }


def _problems(found: dict[str, str | None], ranges: dict[str, str]) -> Iterator[Problem]:
    for name, installed in found.items():
        needed = ranges.get(name, "")
        wish = f"pip install '{name}{needed}'"
        if installed is None and name in PACKAGES:
            yield error(f"{name} is not installed", wish)
        elif installed is not None and not is_in_range(installed, needed):
            yield warning(f"{name} {installed} is not a version that specmamba was made for ({needed})", wish)


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def declared_ranges() -> dict[str, str]:
    """The versions that the installed distribution asks for, such as {"numpy": "<3,>=2.0"}; {} in a bare checkout."""
    try:
        lines = requires("specmamba") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        name = re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0].lower().replace("_", "-")
        if clauses := re.findall(r"[<>=!~]=?[\d.]+", line.partition(";")[0]):
            found.setdefault(name, ",".join(clauses))
    return found


def is_in_range(installed: str, clauses: str) -> bool:
    """Whether a version is within clauses of >= and <, the only ones that are declared; "" takes all."""
    ours = _numbers(installed)
    for clause in filter(None, clauses.split(",")):
        if clause.startswith(">=") and ours < _numbers(clause[2:]):
            return False
        if clause[0] == "<" and clause[1] != "=" and ours >= _numbers(clause[1:]):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version, without zeros at the end: 2.13.0+cpu is (2, 13)."""
    leading = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in leading.group().split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
