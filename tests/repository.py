"""What the tests about the repository itself share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def tracked_files() -> tuple[str, ...]:
    """The regular files of the checkout: tracked, or new and not ignored. Links are not files."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: what belongs to the repository is not known")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(listing.stdout.split("\0")) - {""})
    return tuple(name for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink())


def copy_tracked(destination: Path) -> None:
    for name in tracked_files():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    for link in ("kernels", "cuda_graphs", "bench"):
        os.symlink(f"../{link}", destination / "specmamba" / link)


def built_wheel(folder: Path, *options: str, **environment: str) -> Path:
    """Build the tracked files with ``python -m build``: the wheel, in ``folder / "dist"``.

    Args:
        folder: empty.
        options: of ``build``; without any, the wheel is made from an sdist, so that both are complete.
        environment: added to this process's.
    """
    source, built = folder / "source", folder / "dist"
    copy_tracked(source)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", built, source],
        check=True,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    (path,) = built.glob("*.whl")
    return path
