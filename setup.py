"""What pyproject.toml cannot say: a description without dead links, and wheels with kernels that are compiled.

The latter where ``SPECMAMBA_BUILD_NATIVE=1`` asks for them, or names instruction sets: ``avx2,avx512_bf16``.
"""

import os
import re
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LIBRARIES = "specmamba/kernels/native/libraries"
ASKED_FOR = os.environ.get("SPECMAMBA_BUILD_NATIVE", "")


def description() -> str:
    """README.md as an index of packages shows it: paths of a checkout lead nowhere there, so only their text is left.

    They would be absolute if the project had a public address.
    """
    text = (ROOT / "README.md").read_text("utf8")
    relative = r"\[([^\]]*)\]\((?!https?:|#)[^)\s]*\)"
    pictures = re.compile(rf"^!{relative}\n+", re.MULTILINE)
    return re.sub(relative, r"\1", pictures.sub("", text))


def kernel_builder() -> ModuleType:
    """The module that compiles kernels, without specmamba/__init__.py: a build has none of the dependencies."""
    package = ModuleType("specmamba")
    package.__path__ = [str(ROOT / "specmamba")]
    sys.modules["specmamba"] = package
    from specmamba.kernels.native import build

    return build


class BuildKernels(build_py):
    """Adds the libraries to the package."""

    def run(self) -> None:
        super().run()
        kernel_builder().build(Path(self.build_lib) / LIBRARIES, () if ASKED_FOR == "1" else ASKED_FOR.split(","))


class PlatformWheel(bdist_wheel):
    """Any Python, and the processors and systems that the libraries run on."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, _ = super().get_tag()
        libraries = Path(self.bdist_dir, LIBRARIES).glob("*.so")
        return python, abi, kernel_builder().platform_tag(libraries)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel} if ASKED_FOR not in ("", "0") else {},
)
