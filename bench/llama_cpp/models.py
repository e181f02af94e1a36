"""GGUF files of a checkpoint, made with the converter and the quantizer of a build of llama.cpp."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from specmamba.bench.llama_cpp.build import Build, clean_environment
from specmamba.bench.llama_cpp.options import GGUF_TYPES, Format
from specmamba.bench.serving.server import python_path
from specmamba.errors import SpecmambaError

CONVERT = (sys.executable, "-P", "-m", "specmamba.bench.llama_cpp.convert")


def gguf_file(build: Build, checkpoint: Path, folder: Path, form: Format) -> Path:
    """Find or make the GGUF file of a checkpoint.

    Args:
        build: has the converter and the quantizer.
        checkpoint: folder in Hugging Face layout.
        folder: where files are kept. A name has a digest of the checkpoint's file names, sizes and times.
        form: bf16, or int8 for Q8_0, which is made from the bf16 file.

    Returns:
        The file; its MTP block is in it.

    Raises:
        SpecmambaError: a program failed; the message has the end of its output.
    """
    file = folder / f"{checkpoint.name}-{_digest(checkpoint)}-{GGUF_TYPES[form]}.gguf"
    if file.exists():
        return file
    unfinished = file.with_suffix(".unfinished")
    if form == "bf16":
        options = [str(checkpoint), "--outtype", "bf16", "--outfile", str(unfinished)]
        _run([*CONVERT, str(build.source), *options], "the converter of llama.cpp")
    else:
        whole = gguf_file(build, checkpoint, folder, "bf16")
        _run([str(build.quantizer), str(whole), str(unfinished), GGUF_TYPES[form]], "llama-quantize")
    unfinished.rename(file)  # an interrupted conversion must not look like a whole file
    return file


def _digest(checkpoint: Path) -> str:
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((str(checkpoint.resolve()), facts)).encode()).hexdigest()[:12]


def _run(command: list[str], name: str) -> None:
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=clean_environment() | {"PYTHONPATH": python_path()},
        check=False,
    )
    if ended.returncode:
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        raise SpecmambaError(f"{name} failed with status {ended.returncode}: {' / '.join(lines[-3:])}")
