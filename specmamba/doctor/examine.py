"""All parts of the examination, in order; one that fails does not keep the others from running."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from specmamba.config import EngineConfig
from specmamba.doctor.compiled import examine_kernels
from specmamba.doctor.hardware import examine_hardware
from specmamba.doctor.problems import Facts, Problem, error
from specmamba.doctor.self_test import examine_model
from specmamba.doctor.software import examine_software
from specmamba.engine.loading import resolve_device
from specmamba.engine.model_report import model_info
from specmamba.errors import SpecmambaError

# The demo in float32 is there to be compared: it needs no room for more.
SMALL_POOLS: dict[str, Any] = {"max_running_requests": 2, "context_length": 1024, "max_total_tokens": 2048}
SMALL_POOLS |= {"max_mamba_cache_size": 8}
SAYS_ITSELF = "the flags, the checkpoint or the memory do not allow it: the message says which"
REPORT = "run with SPECMAMBA_NATIVE=0 (on a GPU: SPECMAMBA_TRITON=0) to see whether a kernel is to blame, and report it"

Part = Callable[[], tuple[Any, list[Problem]]]


def examine(config: EngineConfig, say: Callable[[str], None] = lambda _: None) -> Facts:
    """Everything that was found, ready for JSON: "ok" is false when something is broken. ``say`` hears what comes."""
    began = time.perf_counter()
    problems: list[Problem] = []

    def run(what: str, part: Part) -> Any:
        say(what)
        facts, found = guarded(what, part)
        problems.extend(found)
        return facts

    software = run("the packages", examine_software)
    hardware = run("the machine", examine_hardware)
    device = run("the device", lambda: (resolve_device(config.device), []))
    kernels = run("the kernels", lambda: examine_kernels(device)) if device is not None else None
    model = run("the model", lambda: examine_plan(config)) if device is not None else None
    engines = (
        [] if model is None or "problem" in model["memory"] else engines_of(config, model["drafts_with"]["algorithm"])
    )
    tests = [run(f"the self-test (--dtype {flags['dtype']})", partial(examine_model, flags)) for flags in engines]
    return {
        "ok": not any(problem.severity == "error" for problem in problems),
        "seconds": time.perf_counter() - began,
        "device": None if device is None else str(device),
        "software": software,
        "hardware": hardware,
        "kernels": kernels,
        "model": model,
        "self_tests": [test for test in tests if test is not None],
        "problems": [asdict(problem) for problem in problems],
    }


def guarded(what: str, part: Part) -> tuple[Any, list[Problem]]:
    """What a part found; where it fails, None and the failure as a problem."""
    try:
        return part()
    except SpecmambaError as failure:
        return None, [error(f"{what}: {failure}", SAYS_ITSELF)]
    except torch.OutOfMemoryError as failure:
        advice = "lower --mem-fraction-static or --max-running-requests, or end what else uses the GPU"
        return None, [error(f"{what}: {failure}", advice)]
    except Exception as failure:  # noqa: BLE001  # whatever is broken here is what the user wants to hear of
        return None, [error(f"{what}: {type(failure).__name__}: {failure}", REPORT)]


def examine_plan(config: EngineConfig) -> tuple[Facts, list[Problem]]:
    """What the model is and how memory would be divided under these flags; no weights are read."""
    info = model_info(config)
    problem = info["memory"].get("problem")
    if problem is None:
        return info, []
    return info, [error(f"the engine does not start: {problem}", "change the flags that the message names")]


def engines_of(config: EngineConfig, algorithm: str) -> list[dict[str, Any]]:
    """The engines to test: the one that these flags start, and of the demo also one in float32.

    In float32 texts are equal token for token. Where nothing would draft, n-grams do, which need no head.
    """
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    if algorithm == "none":
        flags["speculative_algorithm"] = "ngram"
    if config.model is not None or config.dtype != "auto":
        return [flags]
    exact = flags | {"dtype": "float32"}
    return [exact | SMALL_POOLS if is_default_pool(config) else exact, flags]


def is_default_pool(config: EngineConfig) -> bool:
    """Whether nothing was asked for that small pools could contradict."""
    return not config.model_fields_set & (SMALL_POOLS.keys() | {"page_size", "cuda_graph_max_bs"})
