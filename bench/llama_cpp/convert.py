"""Run llama.cpp's converter on a checkpoint whose tokenizer llama.cpp does not know.

    python -m specmamba.bench.llama_cpp.convert SOURCES CHECKPOINT [the converter's options]

The converter refuses tokenizers that are not in its list. The benchmark sends token ids and compares token ids, so the
pieces of text do not matter, and an unknown tokenizer is converted with the default rules.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

from specmamba.bench.llama_cpp.build import CONVERTER


def main(arguments: list[str]) -> None:
    """Convert; the arguments are the folder of the sources, and the converter's own ones. Ends as the converter."""
    source = Path(arguments[0])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    sys.argv = [str(source / CONVERTER), *arguments[1:]]
    try:
        _accept_unknown_tokenizers(importlib.import_module("conversion.base").TextModel)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        sys.exit(f"llama.cpp's converter needs a package that is not installed: pip install {error.name}")


def _accept_unknown_tokenizers(model: Any) -> None:
    known = model.get_vocab_base_pre

    def name_of(self: object, tokenizer: object) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "default"

    model.get_vocab_base_pre = name_of


if __name__ == "__main__":
    main(sys.argv[1:])
