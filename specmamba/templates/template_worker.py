"""The process that renders chat templates: ``python -m specmamba.templates.template_worker BYTES``.

BYTES is the memory for the work. A template that crashes it or takes too much memory does not harm its parent.
Input: for every conversation a line ``{"conversation": {...}, "most_characters": n}``.
Output: a line ``{}`` when ready, then for every conversation ``{"size": n}`` and n bytes of its text, with marks, in
UTF-8, or ``{"error": reason, "param": the field at fault, "is_limit": whether a limit is the reason}``.
"""

from __future__ import annotations

import json
import sys

from specmamba.errors import RequestError, TemplateLimitError
from specmamba.processes.child_main import ParentPipe, limit_memory
from specmamba.templates.rendering import Conversation, render


def main() -> None:
    """Answer requests until the input ends."""
    parent = ParentPipe()
    limit_memory(int(sys.argv[1]))
    parent.send({})
    while True:
        _answer(parent, parent.read())


def _answer(parent: ParentPipe, line: bytes) -> None:
    text, header = b"", {}
    try:
        request = json.loads(line)
        rendered = render(Conversation(**request["conversation"]), request["most_characters"])
        text = rendered.marked.encode("utf8", "surrogatepass")
    except TemplateLimitError as error:
        header = {"error": error.reason, "is_limit": True}
    except RequestError as error:
        header = {"error": str(error)[:2000], "param": error.param}
    except MemoryError:  # outside the template
        header = {"error": "needs too much memory", "is_limit": True}
    parent.send(header, text)


if __name__ == "__main__":
    main()
