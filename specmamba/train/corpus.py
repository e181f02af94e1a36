"""The Python source that the demo is trained on, and the part of it that is held out.

- Read: every ``*.py`` of the running Python's standard library and of the packages in ``PACKAGES`` that are installed,
  200 bytes to 200 kB each, without tests, vendored code, idlelib, lib2to3 and turtledemo.
- Held out: standard-library files with ``crc32(file name) % 40 == 0`` (``is_held_out``). Only the name
  counts, not the folder, so the split is the same on every machine. On Python 3.11 these are 13 files.
- Of sympy, transformers and torch, large and repetitive, a third is kept: ``crc32(file name) % 3 == 0``.
- A training file whose text equals a held-out file's is dropped.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specmamba.errors import ConfigError

HELD_OUT_EVERY = 40
SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "site-packages", "dist-packages", "lib2to3", "idlelib", "__pycache__", "turtledemo", "_vendor"]
)
PACKAGES = (
    *("transformers", "torch", "numpy", "networkx", "fastapi", "pydantic", "starlette", "uvicorn"),
    *("safetensors", "tokenizers", "huggingface_hub", "sympy", "jinja2"),
)
KEEP_EVERY = {"sympy": 3, "transformers": 3, "torch": 3}


@dataclass(frozen=True)
class Root:
    """A folder to read; ``holds_out``: the held-out rule applies; ``keep_every``: 1 keeps all files, 3 a third."""

    name: str
    folder: Path
    holds_out: bool = False
    keep_every: int = 1


@dataclass(frozen=True)
class Document:
    """A source file of the corpus."""

    root: str
    name: str  # path inside the root, with forward slashes
    text: str


@dataclass(frozen=True)
class Corpus:
    """The documents to train on and those kept out of training."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """A hash of all names and texts, their order and the split."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                digest.update(f"{document.root}\0{document.name}\0{document.text}\0".encode())
            digest.update(b"\1")
        return digest.hexdigest()

    def summary(self) -> dict[str, dict[str, int]]:
        """Files and characters, per root, of the training part."""
        sizes: dict[str, dict[str, int]] = {}
        for document in self.train:
            size = sizes.setdefault(document.root, {"files": 0, "characters": 0})
            size["files"] += 1
            size["characters"] += len(document.text)
        return sizes


def is_held_out(name: str) -> bool:
    """Whether a standard-library file is kept from training, by the last part of its name."""
    return _crc(name) % HELD_OUT_EVERY == 0


def default_roots() -> list[Root]:
    """The standard library and those of ``PACKAGES`` that are installed."""
    paths = sysconfig.get_paths()
    packages = (Root(name, Path(paths["purelib"]) / name, keep_every=KEEP_EVERY.get(name, 1)) for name in PACKAGES)
    return [Root("stdlib", Path(paths["stdlib"]), holds_out=True), *(p for p in packages if p.folder.is_dir())]


def roots_for(corpus: Sequence[Path], extra_corpus: Sequence[Path]) -> list[Root]:
    """The default roots or the folders in their place, and the extra ones."""
    for folder in (*corpus, *extra_corpus):
        if not folder.is_dir():
            raise ConfigError(f"--corpus, --extra-corpus: there is no folder {folder}")
    roots = [Root(folder.name, folder, holds_out=True) for folder in corpus] or default_roots()
    return roots + [Root(folder.name, folder) for folder in extra_corpus]


def read_corpus(roots: Sequence[Root]) -> Corpus:
    """Read and split the corpus.

    Raises:
        ConfigError: one of the two parts is empty.
    """
    train: list[Document] = []
    held_out: list[Document] = []
    for root in roots:
        for document in _documents(root):
            (held_out if root.holds_out and is_held_out(document.name) else train).append(document)
    held_out_texts = {document.text for document in held_out}
    kept = tuple(document for document in train if document.text not in held_out_texts)
    if not kept or not held_out:
        empty = "to hold out (crc32 of the name divisible by 40)" if kept else "to train on"
        raise ConfigError(f"the corpus has no Python file {empty} in {', '.join(str(root.folder) for root in roots)}")
    return Corpus(kept, tuple(held_out))


def _documents(root: Root) -> Iterator[Document]:
    for path in sorted(root.folder.rglob("*.py")):
        name = path.relative_to(root.folder)
        if SKIPPED_FOLDERS & set(name.parts[:-1]) or not 200 < path.stat().st_size < 200_000:
            continue
        if _crc(name.name) % root.keep_every or (root.name == "sympy" and len(name.parts) == 1):
            continue  # the files right under sympy/ only re-export names
        try:
            yield Document(root.name, name.as_posix(), path.read_text("utf8"))
        except UnicodeDecodeError:
            continue


def _crc(name: str) -> int:
    return zlib.crc32(name.rpartition("/")[2].encode())
