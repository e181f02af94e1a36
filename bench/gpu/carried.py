"""Packages that an image for GPUs lacks, as wheels that come with the checkout. Needs Python alone.

    python bench/gpu/carried.py [--python 3.12]   # in a checkout, where there is a package index: writes .carried/

Images have torch, Triton and transformers with what these need. The engine's configuration also needs pydantic, one
part of which is compiled for a version of Python. ``specmamba bench gpu`` takes what is missing from the folder
``.carried`` of its checkout, for itself and for the processes that it starts, and installs nothing.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
FOLDER = ".carried"
PACKAGES = {"pydantic": "pydantic>=2.12,<3"}  # by module: what may be missing, as pyproject.toml has it
COMPILED = {"pydantic": ("pydantic_core._pydantic_core",)}
PLATFORMS = "manylinux_2_17_x86_64", "manylinux2014_x86_64"


def use_carried(root: Path = ROOT) -> list[str]:
    """Make modules of carried wheels importable, here and in processes that are started later, where some are missing.

    Returns:
        Names of the wheels; none where nothing is missing.

    Raises:
        SystemExit: a module is missing, and no wheel has it.
    """
    missing = [name for name in PACKAGES if not _is_there(name)]
    wheels = sorted((root / FOLDER).glob("*.whl")) if missing else []
    if wheels:
        unpacked = tempfile.mkdtemp(prefix="specmamba-carried-")
        atexit.register(shutil.rmtree, unpacked, ignore_errors=True)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(unpacked)
        # before what is installed, here and in processes that are started later: the wheels fit together
        sys.path.insert(0, unpacked)
        os.environ["PYTHONPATH"] = python_path(unpacked)
        invalidate_caches()
    if left := [name for name in missing if not _is_there(name)]:
        raise SystemExit(
            f"specmamba bench gpu: {', '.join(left)} is not installed here: pip install it, or take wheels along: "
            f"python bench/gpu/carried.py --python {sys.version_info.major}.{sys.version_info.minor}, run in a "
            f"checkout where there is a package index, writes them to its folder {FOLDER}"
        )
    return [wheel.name for wheel in wheels]


def python_path(first: str) -> str:
    """``PYTHONPATH`` for a process that looks into a folder first, and then where this one was told to look."""
    return os.pathsep.join(filter(None, (first, os.environ.get("PYTHONPATH"))))


def _is_there(name: str) -> bool:
    """Whether a package can be imported, with the part that is compiled for one version of Python."""
    try:
        return find_spec(name) is not None and all(find_spec(part) is not None for part in COMPILED[name])
    except ImportError:  # what the part belongs to is not there, or was compiled for another version
        return False


def fetch(python: str, folder: Path) -> int:
    """Download wheels of all packages, with what they need, for a version of Python on Linux; returns pip's status.

    They take the place of the folder's: two versions of one package would not fit together.
    """
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    of_image = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as new:
        command = [sys.executable, "-m", "pip", "download", "--quiet", *of_image, "--dest", new, *PACKAGES.values()]
        status = subprocess.run(command, check=False).returncode
        if not status:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(new, folder)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the wheels; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python bench/gpu/carried.py",
        description=f"Download wheels that an image for GPUs may lack to {ROOT / FOLDER}.",
    )
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="Python of the image; default: 3.12")
    return fetch(parser.parse_args(arguments).python, ROOT / FOLDER)


if __name__ == "__main__":
    sys.exit(main())
