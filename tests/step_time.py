"""Compare the time of engine steps of two checkouts, in turns in one run.

    python -m tests.step_time OLD_CHECKOUT NEW_CHECKOUT [--dtype bfloat16] [--rounds 7] [--json FILE]

Each checkout runs in a process of its own, on one thread, with the bundled demo. A figure is the median time of 24
steps at temperature 0.8; a row has the median, the least and the largest of the ratios new over old of all rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.drafts import DRAFTS

PROMPTS = (
    "import os\n",
    "class Stack:\n    ",
    "def main():",
    "import json\n",
    "for i in range(10):\n    ",
    "try:\n    ",
)
ROOT = Path(__file__).parents[1]
NUM_STEPS, WARM_UPS = 24, 2


def serve_times(checkout: str, dtype: str) -> None:
    """Answer lines of standard input, a kind of drafts and a batch size each, with the median time of a step."""
    sys.path.insert(0, checkout)
    from specmamba import LLM

    llm: Any = None
    loaded = ""
    print("ready", flush=True)
    for line in sys.stdin:
        name, batch = line.split()
        if name != loaded:
            if llm is not None:
                llm.close()
            llm, loaded = LLM(max_total_tokens=8192, num_threads=1, **DRAFTS[name] | {"dtype": dtype}), name
            step_time(llm, int(batch))
        print(step_time(llm, int(batch)), flush=True)


def step_time(llm: Any, batch: int) -> float:
    """The median time of a step of ``batch`` requests, in seconds."""
    from specmamba import SamplingParams

    engine = llm.engine
    for i in range(batch):
        params = SamplingParams(max_tokens=512, temperature=0.8, seed=i, ignore_eos=True)
        engine.add_request(str(i), engine.tokenizer.encode(PROMPTS[i % len(PROMPTS)]), params)
    seconds = []
    for _ in range(WARM_UPS + NUM_STEPS):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    for i in range(batch):
        engine.abort(str(i))
    engine.flush_cache()
    return median(seconds[WARM_UPS:])


def compare(old: Path, new: Path, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Measure both checkouts in turns, the first of each round by turns too."""
    command = [sys.executable, "-m", "tests.step_time", "--serve", dtype]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([*command, str(checkout.resolve())], **pipes) for checkout in (old, new)]

    def ask(process: Any, name: str, batch: int) -> float:
        process.stdin.write(f"{name} {batch}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    assert all(process.stdout.readline() == "ready\n" for process in processes)
    rows = []
    for name in DRAFTS:
        for batch in (1, 8):
            ratios, old_seconds = [], []
            for turn in range(rounds):
                seconds = {i: ask(processes[i], name, batch) for i in ((0, 1) if turn % 2 else (1, 0))}
                ratios.append(seconds[1] / seconds[0])
                old_seconds.append(seconds[0])
            row = {"drafts": name, "batch": batch, "new_over_old": median(ratios), "least": min(ratios)}
            rows.append(row | {"largest": max(ratios), "old_ms": 1e3 * median(old_seconds)})
            print(" ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in rows[-1].values()), flush=True)
    for process in processes:
        process.stdin.close()
        process.wait()
    return rows


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["--serve"]:
        serve_times(sys.argv[3], sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = compare(options.old, options.new, options.dtype, options.rounds)
    if options.json is not None:
        options.json.write_text(json.dumps({"dtype": options.dtype, "rounds": options.rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
