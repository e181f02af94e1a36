"""``specmamba doctor``: its facts about packages, the machine and the kernels."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specmamba.doctor.machine import driver_version, examine_hardware, examine_native, examine_triton, why_triton_fails
from specmamba.doctor.software import EXTRAS, PACKAGES, declared_ranges, examine_software, is_in_range
from specmamba.kernels.gpu.switch import parse
from specmamba.kernels.native import levels, library
from specmamba.kernels.native.levels import LEVELS

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


# Packages


def test_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["optional-dependencies"]
    names = {
        extra: {re.split(r"[<>=!~\[; ]", line)[0] for line in lines}
        for extra, lines in extras.items()
        if extra not in ("test", "dev")
    }
    assert names == {name: set(extra.packages) for name, extra in EXTRAS.items()}


@pytest.mark.parametrize(
    ("installed", "clauses", "fits"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.10.1", "<2.14,>=2.11", False),
        ("2.11", ">=2.11.0", True),
        ("5.0.0rc1", "<6", True),
        ("1.0", "", True),
    ],
)
def test_ranges_of_versions(installed: str, clauses: str, fits: bool) -> None:
    assert is_in_range(installed, clauses) == fits


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(declared_ranges()["torch"].split(",")) == {">=2.11", "<2.14"}
    there = {"torch": "2.9.1", "rich": None, "triton": None}
    monkeypatch.setattr("specmamba.doctor.software.installed_version", lambda name: there.get(name, "99"))
    monkeypatch.setattr("specmamba.doctor.software.declared_ranges", lambda: {"torch": ">=2.11,<2.14"})
    facts, problems = examine_software()
    assert [(problem.severity, problem.what.split()[0]) for problem in problems] == [
        ("warning", "torch"),
        ("error", "rich"),
    ]
    assert problems[0].advice == "pip install 'torch>=2.11,<2.14'"
    assert facts["extras"]["gpu"]["missing"] == ["triton"]


# Machine and kernels


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Card", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 << 30, 80 << 30))
    (gpu,) = examine_hardware()[0]["gpus"]
    assert gpu == {"name": "Card", "capability": "9.0", "memory_bytes": 80 << 30, "free_bytes": 70 << 30}


def test_a_driver_without_a_gpu_in_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 1\n")
    assert driver_version(tmp_path / "version") == "570.86.15"
    assert driver_version(tmp_path / "none") is None
    monkeypatch.setattr("specmamba.doctor.machine.driver_version", lambda: "570.86.15")
    monkeypatch.setattr("specmamba.doctor.machine.free_memory", lambda device: 1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    little, no_gpu = examine_hardware()[1]
    assert "only 1.0 MiB of memory are free" in little.what
    assert "there is an NVIDIA driver (570.86.15)" in no_gpu.what


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    facts, (problem,) = examine_native()
    assert facts["built"] == []
    assert "there is no C++ compiler" in facts["reason"]
    assert problem.severity == "warning"
    assert "g++" in problem.advice


def test_a_cache_folder_that_others_can_write_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "chosen_level", lambda: LEVELS[-1])
    monkeypatch.setenv("CXX", sys.executable)  # it is there, and is not reached
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "specmamba").mkdir()
    (tmp_path / "specmamba").chmod(0o777)
    _, (problem,) = examine_native()
    assert "others can write to it" in problem.what


@pytest.mark.parametrize("switched", [True, False])
def test_an_old_cpu_is_no_problem(switched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if switched:
        monkeypatch.setenv("SPECMAMBA_NATIVE", "0")
    else:
        monkeypatch.setattr(levels, "cpu_flags", frozenset)
    facts, problems = examine_native()
    assert ("SPECMAMBA_NATIVE" if switched else "this CPU has no avx2") in facts["reason"]
    assert problems == []


def test_triton_where_it_should_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr("specmamba.doctor.machine.has_triton", lambda: False)
    assert examine_triton(CPU)[1] == []
    assert "specmamba[gpu]" in examine_triton(gpu)[1][0].advice
    monkeypatch.setattr("specmamba.doctor.machine.has_triton", lambda: True)
    monkeypatch.setattr("specmamba.doctor.machine.runs_on", lambda device: device.type == "cuda")
    assert examine_triton(CPU)[0]["reason"] == "no GPU for it to run on"
    for reason, count in ((None, 0), ("no gcc", 1)):
        monkeypatch.setattr("specmamba.doctor.machine.why_triton_fails", lambda device, reason=reason: reason)
        facts, problems = examine_triton(gpu)
        assert facts["runs"] == (reason is None)
        assert [problem.what for problem in problems] == [f"Triton does not run: {reason}"] * count
    monkeypatch.setattr("specmamba.doctor.machine.choice", lambda: parse("-moe,-ssd"))
    assert examine_triton(gpu)[0]["off"] == ["moe", "ssd"]


def test_a_kernel_is_run_and_its_result_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_triton_fails(CPU) is None  # there it is the native one, or PyTorch's
    monkeypatch.setattr("specmamba.kernels.rowwise.rms_norm", lambda x, weight, eps: x)
    assert str(why_triton_fails(CPU)).startswith("a norm is off by ")

    def fail(*_: object) -> None:
        raise RuntimeError("no gcc\nand more")

    monkeypatch.setattr("specmamba.kernels.rowwise.rms_norm", fail)
    assert why_triton_fails(CPU) == "RuntimeError: no gcc"


def test_every_package_that_must_be_there_is_declared() -> None:
    """Others are missing on a fresh machine, where this would be called an error."""
    assert set(PACKAGES) <= declared_ranges().keys()
