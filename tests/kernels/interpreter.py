"""Triton's interpreter without the work whose results it drops: kernels take a third to a half of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any


@cache
def quicken_interpreter() -> None:
    """Change what Triton's interpreter does again and again, and to no effect; once per process.

    - Every call of a function inside of a kernel patches the language, which the launch has patched already.
    - Sums of integers are computed once more in 64 bits for an assertion, which only debugging asserts.
    - The table from Triton's types to NumPy's is made anew for each look-up.

    A Triton that has none of these is left as it is.
    """
    from triton.runtime import interpreter

    known: Any = interpreter
    if hasattr(known, "_patch_lang") and hasattr(known, "_LangPatchScope"):
        known._patch_lang = _Patches(known._patch_lang).of
    options = getattr(getattr(known, "interpreter_builder", None), "options", None)
    if getattr(options, "sanitize_overflow", False) and options is not None and not options.debug:
        known.interpreter_builder.options = replace(options, sanitize_overflow=False)
    if hasattr(known, "_get_np_dtype"):
        known._get_np_dtype = _by_name(known._get_np_dtype)


def _by_name(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A look-up by type that remembers what it gave; a block has the type of its elements."""
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = found(kind)
        return known[name]

    return of


class _Patches:
    """The modules of the language that are patched while a launch runs."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._patched: set[int] = set()
        self._modules: dict[Any, frozenset[int]] = {}

    def of(self, function: Any) -> Any:
        """In place of ``_patch_lang``: what is to be restored behind a launch; nothing inside of one."""
        modules = self._modules.get(function)
        if modules is None:
            modules = self._modules[function] = _language_modules(function)
        if modules <= self._patched:
            return None  # asked for by a call inside of a launch, which has no use for it
        scope = self._patch(function)
        self._patched |= modules
        restore = scope.restore

        def restore_all() -> None:
            self._patched.clear()
            restore()

        scope.restore = restore_all
        return scope


def _language_modules(function: Any) -> frozenset[int]:
    import triton.language as tl

    names = function.__globals__.values()
    return frozenset(id(value) for value in names if value is tl or value is tl.core)
