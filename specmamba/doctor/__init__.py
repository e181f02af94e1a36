"""``specmamba doctor``: whether this installation works, and if not, what to do about it.

It examines packages, device and kernels, plans the memory, and lets the model write the same texts plain and with
drafts, which must be equal. A part that fails becomes a line with advice, not a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specmamba.doctor.software import Facts
from specmamba.flags.command_line import parse_command_line, readable
from specmamba.measure.command import STANDARD_OUTPUT, Row, put_out, section_table
from specmamba.measure.report import JsonOption

PROG = "specmamba doctor"


class DoctorConfig(JsonOption):
    """Check this installation with a model under these flags; --json alone, or with -, writes to standard output."""

    needs_text = True


def main(arguments: list[str]) -> int:
    """Print a table, or JSON where that goes to standard output. Returns 1 when something is broken, else 0."""
    config = parse_command_line(DoctorConfig, PROG, complete_json_flag(arguments))
    with waiting() as say:
        report = examine_or_report_failure(config, say)
    put_out(config, report, print_report, can_print_json=True)
    return 0 if report["ok"] else 1


@contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """Show on a terminal which part is running: compiling kernels for the first time takes a while."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("the packages") as status:
        yield status.update


def examine_or_report_failure(config: DoctorConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """The report; only the part about packages when torch cannot be imported."""
    try:
        from specmamba.doctor.examine import examine
    except (ImportError, OSError) as failure:  # OSError: a shared library is missing
        from specmamba.doctor.software import report_without_torch

        return report_without_torch(failure)
    return examine(config, say)


def complete_json_flag(arguments: Sequence[str]) -> list[str]:
    """``--json`` without a file means standard output."""
    completed: list[str] = []
    for place, argument in enumerate(arguments):
        completed.append(argument)
        is_alone = place + 1 == len(arguments) or arguments[place + 1].startswith("--")
        if argument == "--json" and is_alone:
            completed.append(str(STANDARD_OUTPUT))
    return completed


WIDTH = 100  # if the width of the terminal is unknown, as in a pipe


def print_report(report: Facts) -> None:
    """Print a table in sections, then every problem with its advice, then the verdict."""
    from rich.console import Console

    sections = (_software, _hardware, _kernels, _model, _self_tests)
    table = section_table((section(report) for section in sections), overflow="fold")
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(table, markup=False)
    for line in problem_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    color = "green" if report["ok"] else "red"
    console.print(verdict(report), style=f"bold {color}", markup=False, soft_wrap=True)


def problem_lines(report: Facts) -> Iterator[str]:
    """Two lines per problem."""
    for problem in report["problems"]:
        yield f" {problem['severity']}: {problem['what']}"
        yield f"   what to do: {problem['advice']}"


def verdict(report: Facts) -> str:
    """Summarize the report in one line."""
    errors = sum(problem["severity"] == "error" for problem in report["problems"])
    warnings = len(report["problems"]) - errors
    seconds = f"{report['seconds']:.0f} s"
    if errors:
        return f" not fit to serve: {_count(errors, 'error')}, {_count(warnings, 'warning')} ({seconds})"
    reservation = f", with {_count(warnings, 'warning')}" if warnings else ""
    return f" ready to serve{reservation} ({seconds})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _software(report: Facts) -> Iterator[Row]:
    software = report["software"]
    if software is None:
        return
    yield "specmamba", f"{software['specmamba']} on Python {software['python']}"
    yield "packages", ", ".join(f"{name} {version or 'missing'}" for name, version in software["packages"].items())
    for name, extra in software["extras"].items():
        installed = ", ".join(f"{package} {version}" for package, version in extra["installed"].items())
        missing = f"without {', '.join(extra['missing'])}" if extra["missing"] else ""
        state = ", ".join(filter(None, (installed, missing))) if installed else "not installed"
        yield f"extra: {name}", f"{state} ({extra['purpose']})"


def _hardware(report: Facts) -> Iterator[Row]:
    hardware = report["hardware"]
    if hardware is None:
        return
    cpu = hardware["cpu"]
    yield "processor", f"{cpu['name']}, {cpu['usable_cores']} of them usable here"
    yield "instructions", ", ".join(f"{'' if there else 'no '}{name}" for name, there in cpu["flags"].items())
    yield "memory", f"{readable(cpu['free_bytes'])} free of {readable(cpu['memory_bytes'])}"
    driver = f", driver {hardware['driver']}" if hardware["driver"] else ""
    for gpu in hardware["gpus"]:
        memory = f"{readable(gpu['free_bytes'])} free of {readable(gpu['memory_bytes'])}"
        yield "GPU", f"{gpu['name']} (capability {gpu['capability']}{driver}), {memory}"
    none = "" if hardware["gpus"] else "; no GPU in sight"
    yield "torch built for", hardware["torch_built_for"] + none


def _kernels(report: Facts) -> Iterator[Row]:
    kernels = report["kernels"]
    if kernels is None:
        return
    native, triton = kernels["native"], kernels["triton"]
    if native["reason"] is None:
        yield "native kernels", f"{native['level']}, {native['origin']}, in {native['folder']}"
        yield "weights are read at", f"{native['gb_per_second']} GB/s (bf16, one row, {native['threads']} threads)"
    else:
        yield "native kernels", f"none: {native['reason']}"
    without = f" but for {', '.join(triton['off'])}" if triton["off"] else ""
    runs = f"runs{without}; compiled kernels in {triton['folder']}"
    yield "Triton", runs if triton["runs"] else f"off: {triton['reason']}"


def _model(report: Facts) -> Iterator[Row]:
    model = report["model"]
    if model is None:
        return
    parameters = f"{model['parameters'] / 1e6:,.1f} million parameters in {model['dtype']}"
    yield "model", f"{model['model']} ({model['architecture']}), {parameters} on {model['device']}"
    draft = "none of its own" if model["draft"] is None else model["draft"]["kind"]
    yield "draft head", draft
    yield "memory plan", memory_words(model["memory"])


def memory_words(memory: Facts) -> str:
    """Summarize the memory plan; ``specmamba info`` prints the whole table."""
    if "problem" in memory:
        return f"none: {memory['problem']}"
    parts = {
        "weights": memory["weight_bytes"],
        f"KV of {memory['kv_pool_tokens']:,} tokens": memory["kv_pool_bytes"],
        f"{memory['state_slots']:,} recurrent states": memory["state_pool_bytes"],
        "speculation": memory["speculation_bytes"],
        "all": memory["total_bytes"],
    }
    sizes = ", ".join(f"{name} {readable(size)}" for name, size in parts.items())
    return f"{sizes}; {memory['max_running_requests']} requests at once"


def _self_tests(report: Facts) -> Iterator[Row]:
    for test in report["self_tests"]:
        title = f"self-test, {test['dtype']}"
        yield title, f"{test['num_prompts']} greedy texts of {test['num_tokens']} tokens, drafts: {test['drafts']}"
        yield "  texts", text_words(test)
        speeds = f"{test['plain_tokens_per_second']:.0f}, with drafts {test['speculative_tokens_per_second']:.0f}"
        yield "  speed", f"plain {speeds} tokens/s: {test['speedup']:.2f}x (median of rounds run in turns)"
        yield "  acceptance length", f"{test['accept_length']:.2f} tokens a verify"


def text_words(test: Facts) -> str:
    """Say whether the texts are equal, and describe the largest difference otherwise."""
    texts = test["texts"]
    if texts["identical"] == test["num_prompts"]:
        return "equal, plain and with drafts, token for token"
    counts = [f"{texts[kind]} {words}" for kind, words in KINDS.items() if texts[kind]]
    worst = texts["worst"]
    shift = "no shift of logits explains it" if worst["logit_shift"] is None else f"{worst['logit_shift']:.2g}"
    detail = f"text {worst['prompt'] + 1} parts at token {worst['position'] + 1}: {shift}"
    if worst["logit_shift"] is not None:
        detail += f" in the logits decides there, and rounding to {test['dtype']} moves them by {_bound(worst)}"
    return f"{', '.join(counts)}; {detail}"


KINDS = {
    "identical": "equal",
    "near_tie": "parted where two tokens are nearly as likely",
    "diverged": "different for another reason than rounding",
}


def _bound(worst: Facts) -> str:
    return f"up to {worst['rounding_explains']:.2g}"
