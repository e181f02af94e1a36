"""One entry per operator: its forms are declared once, and every call takes the best form for its arguments.

A form is one way to compute an operator. Each is a function with the entry's name and parameters, in a module of the
operator's package: ``reference`` (the specification), ``torch`` (runs anywhere), ``native`` (C++), ``triton`` (GPUs).
``native/README.md`` says how to add one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from specmamba.kernels import gpu

P = ParamSpec("P")
R = TypeVar("R")
Condition = Callable[..., bool]
Form = Literal["triton", "native", "torch", "reference"]

_MODULES: dict[Form, str] = {"triton": "triton_ops", "native": "native_ops", "reference": "reference"}
_OPERATORS: dict[str, Operator] = {}


@dataclass(frozen=True)
class Operator:
    """The declaration of one operator."""

    package: str  # "specmamba.kernels.rowwise"
    function: Callable[..., Any]  # its form in PyTorch
    conditions: Mapping[Form, Condition]  # of the forms that are tried before PyTorch's, best first

    @property
    def name(self) -> str:
        """For example "rowwise.rms_norm"."""
        return f"{self.package.rpartition('.')[2]}.{self.function.__name__}"

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """All forms that exist, also those that cannot run on this machine: best first, then torch, then reference."""
        is_specified = hasattr(import_module(f"{self.package}.reference"), self.function.__name__)
        specified: tuple[Form, ...] = ("reference",) if is_specified else ()
        return (*self.conditions, "torch", *specified)

    def load(self, form: Form) -> Callable[..., Any]:
        """The function of a form. Triton is imported only here.

        Raises:
            ValueError: the operator has no such form.
        """
        if form == "torch":
            return self.function
        if form not in self.forms:
            raise ValueError(f"{self.name} has no form {form!r}, only {', '.join(self.forms)}")
        module = import_module(f"{self.package}.{_MODULES[form]}")
        function: Callable[..., Any] = getattr(module, self.function.__name__)
        return function

    def choose(self, *args: Any, **kwargs: Any) -> Form:
        """The form that a call with these arguments takes."""
        given = self.bind(*args, **kwargs)
        taking = (form for form, takes in self.conditions.items() if takes(*given) and self.is_on(form))
        return next(taking, "torch")

    def is_on(self, form: Form) -> bool:
        """Whether no switch turns a form off for this operator. Only Triton's has one for each operator."""
        return form != "triton" or gpu.is_chosen(self.package.rpartition(".")[2])

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def bind(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """All arguments of a call by position, defaults included.

        Raises:
            TypeError: the arguments do not fit the parameters.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args


def operator(
    *, triton: Condition | None = None, native: Condition | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operator. The decorated function is its form in PyTorch, its docstring that of the entry.

    Args:
        triton, native: whether the form takes a call; called with all arguments of that call by position, Triton's
            first. None: there is no such form.

    Returns:
        A decorator. The entry that it returns has the signature and the docstring of the function.
    """
    declared: dict[Form, Condition | None] = {"triton": triton, "native": native}

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        conditions = {form: takes for form, takes in declared.items() if takes is not None}
        made = Operator(function.__module__, function, conditions)
        _OPERATORS[made.name] = made
        if not conditions:
            return function
        tried = tuple(
            (takes, cache(partial(made.is_on, form)), cache(partial(made.load, form)))
            for form, takes in conditions.items()
        )
        parameters = inspect.signature(function).parameters.values()
        num_parameters, defaults = len(parameters), tuple(x.default for x in parameters if x.default is not x.empty)
        num_required = num_parameters - len(defaults)

        # Runs tens of times per token: the common call, all arguments by position, is bound without any search.
        def entry(*args: Any, **kwargs: Any) -> Any:
            if kwargs or not num_required <= len(args) <= num_parameters:
                args = made.bind(*args, **kwargs)
            elif len(args) < num_parameters:
                args += defaults[len(args) - num_required :]
            for takes, is_on, load in tried:
                if takes(*args) and is_on():
                    return load()(*args)
            return made.function(*args)

        return update_wrapper(entry, function)

    return declare


def operators() -> dict[str, Operator]:
    """Every operator that has an entry, by name."""
    for file in sorted(Path(__file__).parent.glob("*/torch_ops.py")):
        import_module(f"{__package__}.{file.parent.name}")
    return {name: made for name, made in sorted(_OPERATORS.items()) if made.package.startswith(f"{__package__}.")}


def operator_of(entry: Callable[..., Any]) -> Operator:
    """The declaration of an entry.

    Raises:
        KeyError: the function is no entry.
    """
    return _OPERATORS[f"{entry.__module__.rpartition('.')[2]}.{entry.__name__}"]
