"""GGUF files of a checkpoint, made with the converter and the quantizer of a build of llama.cpp."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from specmamba.bench.llama_cpp.build import Build, clean_environment
from specmamba.bench.serving.server import python_path
from specmamba.errors import SpecmambaError

CONVERTED = "BF16"  # the type that the converter writes; the quantizer makes all others of it
CONVERT = (sys.executable, "-P", "-m", "specmamba.bench.llama_cpp.convert")


def gguf_file(build: Build, checkpoint: Path, folder: Path, gguf_type: str) -> Path:
    """Find or make the GGUF file of a checkpoint.

    Args:
        build: has the converter and the quantizer.
        checkpoint: folder in Hugging Face layout.
        folder: where files are kept. A name has a digest of the checkpoint's file names, sizes and times.
        gguf_type: llama.cpp's name of it: BF16, or one that is made from the BF16 file, such as Q8_0 or Q4_K_M.

    Returns:
        The file; its MTP block is in it.

    Raises:
        SpecmambaError: a program failed; the message has the end of its output.
    """
    file = folder / f"{checkpoint.name}-{_digest(checkpoint)}-{gguf_type}.gguf"
    if file.exists():
        return file
    unfinished = file.with_suffix(".unfinished")
    if gguf_type == CONVERTED:
        options = [str(checkpoint), "--outtype", "bf16", "--outfile", str(unfinished)]
        _run([*CONVERT, str(build.source), *options], "the converter of llama.cpp")
    else:
        whole = gguf_file(build, checkpoint, folder, CONVERTED)
        _run([str(build.quantizer), str(whole), str(unfinished), gguf_type], "llama-quantize")
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
