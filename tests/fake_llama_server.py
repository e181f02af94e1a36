"""Programs of llama.cpp that follow a script: a server, a quantizer, a converter. They need the standard library only.

``FAKE_LLAMA`` in the environment of the server chooses how it misbehaves: "ends" at its start, "refuses" or "hangs" at
each request, "dies" at the first one. ``make_build`` writes a build folder and its sources.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKENS_PER_S = 200.0  # plain; with N drafts 1 + N / 4 times as many
FIRST_TOKEN_MS_PER_TOKEN = 0.5
LOG = "fake_llama.jsonl"  # in the build folder: a line for each start and each request
BAD_FLAG, OK, BAD_REQUEST = 1, 200, 400


class Handler(BaseHTTPRequestHandler):
    num_drafts = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mood = os.environ.get("FAKE_LLAMA")
        note({"request": body, "path": self.path, "drafts": self.num_drafts})
        if mood == "hangs":
            time.sleep(60)
        if mood == "dies":
            print("srv: a tensor is lost", flush=True)
            os._exit(3)
        if mood == "refuses":
            self.answer(BAD_REQUEST, {"error": {"message": "the prompt is too long"}})
        else:
            self.answer(OK, completion(body, self.num_drafts))

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def completion(body: dict[str, Any], num_drafts: int) -> dict[str, Any]:
    """An answer of ``/completion`` with the fields that the benchmark reads, and times that follow a rule."""
    count = body["n_predict"]
    decoded = count - 1
    accepted = decoded * num_drafts // (1 + num_drafts)
    timings = {
        "prompt_ms": FIRST_TOKEN_MS_PER_TOKEN * len(body["prompt"]),
        "predicted_n": count,
        "predicted_ms": 1e3 * decoded / (TOKENS_PER_S * (1 + num_drafts / 4)),
    }
    if num_drafts:
        timings |= {"draft_n": accepted + 1, "draft_n_accepted": accepted}
    return {"content": "", "tokens": [7] * count, "timings": timings}


def note(fact: dict[str, Any]) -> None:
    with open(Path(__file__).parents[1] / LOG, "a", encoding="utf8") as log:
        log.write(json.dumps({**fact, "pid": os.getpid()}) + "\n")


def main(arguments: list[str]) -> None:
    """Do what ``llama-server`` does with these arguments."""
    if "--version" in arguments:
        print("version: 9.9.9 (build 7, commit abcdef0)\nbuilt with GNU 1.2 for Test", file=sys.stderr)
        return
    if arguments[arguments.index("-m") + 1] == "none":
        print("0.00 I cmn: system_info: n_threads = 2 / 2 | CPU : AVX2 = 1 | AVX512 = 0 | F16C = 1 | ")
        sys.exit(BAD_FLAG)
    note({"start": arguments})
    if os.environ.get("FAKE_LLAMA") == "ends":
        sys.exit("srv: unknown model architecture")
    if "--spec-draft-n-max" in arguments:
        Handler.num_drafts = int(arguments[arguments.index("--spec-draft-n-max") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"0.00 I srv: llama_server: listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


CONVERTER = """
import sys
from conversion.base import TextModel
import gguf
arguments = sys.argv[1:]
out = arguments[arguments.index("--outfile") + 1]
open(out, "w").write(TextModel().get_vocab_base_pre(None) + " " + arguments[0])
print("converted")
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""
QUANTIZER = """
import sys
source, out, kind = sys.argv[1:]
open(out, "w").write(kind + " of " + open(source).read())
"""


def make_build(folder: Path) -> Path:
    """Write a build folder, with ``bin`` and ``CMakeCache.txt``, and its sources; gives the build folder."""
    build, source = folder / "build", folder / "source"
    (build / "bin").mkdir(parents=True)
    (source / "conversion").mkdir(parents=True)
    (source / "gguf-py" / "gguf").mkdir(parents=True)
    (source / "gguf-py" / "gguf" / "__init__.py").write_text("")
    (source / "conversion" / "__init__.py").write_text("")
    (source / "conversion" / "base.py").write_text(BASE)
    (source / "convert_hf_to_gguf.py").write_text(CONVERTER)
    programs = {"llama-server": Path(__file__).read_text("utf8"), "llama-quantize": QUANTIZER}
    for name, text in programs.items():
        program = build / "bin" / name
        program.write_text(f"#!{sys.executable} -S\n{text}", "utf8")
        program.chmod(0o755)
    cache = f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\nGGML_NATIVE:BOOL=ON\nGGML_VULKAN:BOOL=OFF\n"
    (build / "CMakeCache.txt").write_text(cache)
    return build


def noted(build: Path) -> list[dict[str, Any]]:
    """What the servers of a build have noted: their starts and requests."""
    file = build / LOG
    return [json.loads(line) for line in file.read_text("utf8").splitlines()] if file.exists() else []


if __name__ == "__main__":
    main(sys.argv[1:])
