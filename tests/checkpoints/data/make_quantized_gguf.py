"""Write q4_k_m.gguf and q6_k.gguf: a tiny Qwen3.5 with rows of 256 weights, quantized by llama.cpp's llama-quantize.

    python -m tests.checkpoints.data.make_quantized_gguf LLAMA_QUANTIZE

Run once with the llama.cpp of llama-cpp-python 0.3.36; tests read the files, and need none. Tokens are few, as they
would fill the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gguf_files import write_gguf
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

NUM_TOKENS = 260
# Matrices of 256 inputs get types of K; the others, those that llama-quantize falls back to.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 32,
    "head_dim": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "vocab_size": NUM_TOKENS,
    "tie_word_embeddings": True,
    "layer_types": [LINEAR, FULL],
}


def shorten_tokenizer(file: Path) -> None:
    """Keep the first tokens, which are those of single bytes, and the special ones."""
    tokenizer = json.loads(file.read_text())
    added = {token["id"] for token in tokenizer["added_tokens"]}
    pieces = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])
    kept = {piece: number for piece, number in pieces if number < NUM_TOKENS}
    assert all(number < NUM_TOKENS for number in added)
    tokenizer["model"]["vocab"] = kept
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer["model"]["merges"]]
    tokenizer["model"]["merges"] = [pair for pair in pairs if "".join(pair) in kept]
    file.write_text(json.dumps(tokenizer))


def main() -> None:
    """Argument: the program."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_tiny_checkpoint(Path(temporary) / "tiny", 0, with_mtp=False, **SIZES)
        shorten_tokenizer(folder / "tokenizer.json")
        plain = write_gguf(folder, Path(temporary) / "plain.gguf")
        for kind in ("Q4_K_M", "Q6_K"):
            out = here / f"{kind.lower()}.gguf"
            subprocess.run([sys.argv[1], plain, out, kind, "1"], check=True)
            print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
