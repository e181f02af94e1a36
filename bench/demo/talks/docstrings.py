"""Questions about functions of Python's standard library, answered with the first sentence of their docstring."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from functools import lru_cache

from specmamba.bench.demo.talks.talk import Talk, one_of, question

NAMES = (
    *("os.getcwd", "os.listdir", "os.remove", "os.rename", "os.path.join", "os.path.exists", "os.path.basename"),
    *("os.path.dirname", "os.path.isfile", "os.path.abspath", "json.dumps", "re.compile", "re.findall"),
    *("random.choice", "random.randint", "random.shuffle", "math.sqrt", "math.gcd", "math.floor", "math.ceil"),
    *("math.exp", "time.sleep", "time.time", "builtins.len", "builtins.sorted", "builtins.sum", "builtins.max"),
    *("builtins.abs", "builtins.open", "builtins.any", "builtins.all", "builtins.enumerate", "builtins.repr"),
    *("builtins.ord", "builtins.round", "builtins.str.split", "builtins.str.join", "builtins.str.strip"),
    *("builtins.str.replace", "builtins.str.upper", "builtins.str.lower", "builtins.list.append", "builtins.list.pop"),
    *("builtins.list.sort", "builtins.dict.get", "copy.copy", "copy.deepcopy", "glob.glob", "heapq.heappush"),
    *("textwrap.dedent", "statistics.mean", "statistics.median", "subprocess.run", "os.makedirs"),
)
ASKING = (
    "What does {} do?|What does {}() do?|Explain {}.|What is {}?|How does {} work?|What is {} for?|Tell me about {}.|"
    "Describe {}.|Can you explain {}?|Document {}."
)
MOST = 110  # characters of a first sentence; longer ones are left out
_END = re.compile(r"(?<=[.!])\s")


@lru_cache(maxsize=1)
def sentences() -> dict[str, str]:
    """The first sentence of each docstring that is short enough, by the name under which users know the object."""
    found = {}
    for path in NAMES:
        sentence = _first_sentence(inspect.getdoc(_object(path)) or "")
        if 10 < len(sentence) <= MOST:
            found[path.removeprefix("builtins.")] = sentence
    return found


def _object(path: str) -> object:
    module, *names = ("os.path", *path.split(".")[2:]) if path.startswith("os.path.") else path.split(".")
    found: object = importlib.import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


def _first_sentence(text: str) -> str:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    described = next((part for part in paragraphs if "->" not in part and not re.match(r"[\w.]+\(", part)), "")
    sentence = _END.split(described)[0]
    return sentence if not sentence or sentence[-1] in ".!" else sentence + "."


def docstring(draw: random.Random, thinks: bool) -> Talk:
    """A question about one of the functions."""
    name = draw.choice(list(sentences()))
    asked = one_of(draw, ASKING).format(name)
    return question("docstring", asked, sentences()[name], f"The user asks about {name}." if thinks else "")
