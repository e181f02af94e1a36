"""Whole kernels on ARM, in an emulator: the tests of operators and of texts call a static program (replay.cpp).

The same program for this processor shows that the harness is right, and that kernels stay within their arrays.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specmamba.kernels.native import library
from specmamba.kernels.native.build import compiled_objects
from specmamba.kernels.native.cpp_compiler import command_of, find_compiler, run_compiler
from specmamba.kernels.native.levels import LEVELS_OF, Level, chosen_level
from specmamba.kernels.native.library import sources
from specmamba.kernels.state_records.native_layers import NativeLayer
from tests.kernels.native.replay import Function, Functions, Program, data_ptr
from tests.pairwise import IS_FULL
from tests.repository import ROOT
from tests.thinned import EVERY_THIRD

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_native")]

SOURCE = Path(__file__).with_name("replay.cpp")
ARM_LEVELS = LEVELS_OF["aarch64"]
OPERATORS = [
    str(file)
    for file in sorted((ROOT / "tests/kernels").rglob("test_*.py"))
    if "native" in file.read_text("utf8") and not {"native", "triton"} & set(file.parts) and "build" not in file.name
]
# Attention beside Mamba2, and a gated delta net with experts.
TEXTS = ["tests/models/test_families_exact.py", "-k", "falcon-h1-default or qwen3-next-default"]


def declared_functions() -> list[Function]:
    """The functions that native_ops.py declares, for all native sources."""

    def refuse(function: Function, _: object) -> None:
        raise AssertionError(f"{function.name} was called while types are declared")

    functions = Functions(refuse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda _: functions)
        for source in sources():
            # replay and exchange work on memory of this process (ARM is in test_exchange.py); the others decide on the
            # host, by no vector instructions
            if source.parent.name not in ("replay", "exchange", "draft_sizing", "suffix_automaton"):
                module = import_module(f"specmamba.kernels.{source.parent.name}.native_ops")
                layer = getattr(module, "LAYER", None)
                module.code.__wrapped__() if layer is None else cast("Any", NativeLayer.code).func(layer)
    return list(functions.made.values())


def built(level: Level, compiler: list[str], folder: Path) -> Path:
    """Compile all kernels of a level and replay.cpp into one static program."""
    functions = declared_functions()
    declarations = "\n".join(function.declaration() for function in functions)
    table = ", ".join(f"FUNCTION({function.name})" for function in functions)
    table = f"const std::pair<const std::string, Function> kFunctions[] = {{{table}}};"
    (folder / "functions.inc").write_text(f'extern "C" {{\n{declarations}\n}}\n{table}\n')
    objects = compiled_objects(level, compiler, folder)
    options = [f"-I{folder}", "-static", "-pthread"]
    program = folder / "replay"
    run_compiler([*command_of(compiler, level), *options, *map(str, objects), str(SOURCE), "-o", str(program)])
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this CPU."""
    return built(chosen_level(), find_compiler(), tmp_path_factory.mktemp("program"))


def options_of(command: list[str], calls: Path) -> list[str]:
    return ["-ptests.kernels.native.replay", f"--native-program={shlex.join(command)}", f"--native-calls={calls}"]


def assert_all_called(calls: Path) -> None:
    """That operators' tests call every function, and no library took the calls."""
    assert set(json.loads(calls.read_text())) == {function.name for function in declared_functions()}


# Emulated, each takes minutes: some cases on the best level, and in a full run all, the other levels and whole texts.
@pytest.mark.parametrize("level", ARM_LEVELS if IS_FULL else ARM_LEVELS[:1], ids=lambda level: level.name)
@pytest.mark.long
def test_operators_on_arm(
    level: Level,
    arm_compiler: list[str],
    arm_emulator: list[str],
    run_tests: Callable[..., None],
    tmp_path: Path,
) -> None:
    command = [*arm_emulator, str(built(level, arm_compiler, tmp_path))]
    narrow = ["-k", "not 1100"]  # the widest products take a minute
    run_tests(*options_of(command, tmp_path / "calls"), *OPERATORS, *narrow, *EVERY_THIRD)
    assert_all_called(tmp_path / "calls")


@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 runs whole texts in an emulator, for minutes")
def test_exact_texts_on_arm(
    arm_compiler: list[str], arm_emulator: list[str], run_tests: Callable[..., None], tmp_path: Path
) -> None:
    command = [*arm_emulator, str(built(ARM_LEVELS[0], arm_compiler, tmp_path))]
    run_tests(*options_of(command, tmp_path / "calls"), *TEXTS)
    assert {"linear_multiply_float", "delta_net_tree_verify"} <= set(json.loads((tmp_path / "calls").read_text()))


@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 runs them once more on this CPU, within guarded arrays")
def test_operators_on_this_cpu(program: Path, run_tests: Callable[..., None], tmp_path: Path) -> None:
    run_tests(*options_of([str(program)], tmp_path / "calls"), *OPERATORS)
    assert_all_called(tmp_path / "calls")


@pytest.fixture
def running(program: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Function]]:
    """The functions of the program for this CPU."""
    process = Program([program])
    functions = {function.name: function for function in declared_functions()}
    for function in functions.values():
        monkeypatch.setattr(function, "_run", process.run)
    monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
    yield functions
    process.close()


@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 compiles the program for this CPU too")
def test_a_kernel_that_reads_beyond_an_array_ends_the_program(running: dict[str, Function]) -> None:
    logits, tokens = torch.randn(3, 16), torch.zeros(3, dtype=torch.int64)
    running["sampling_argmax"](logits.data_ptr(), tokens.data_ptr(), 3, 16, False, 1)
    assert torch.equal(tokens, logits.argmax(-1))
    with pytest.raises(AssertionError, match="status -11 in sampling_argmax"):
        running["sampling_argmax"](logits.data_ptr(), tokens.data_ptr(), 3, 17, False, 1)


@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 compiles the program for this CPU too")
def test_a_call_with_another_number_of_arguments_is_refused(running: dict[str, Function]) -> None:
    running["linear_packed_size"].argtypes = running["linear_packed_size"].argtypes[:1]
    with pytest.raises(AssertionError, match="status 1 in linear_packed_size"):
        running["linear_packed_size"](5)
