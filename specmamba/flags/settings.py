"""Settings of a program: from flags or keyword arguments, and from the environment; and what lists are there.

pydantic checks the values. Where they come from is read here: pydantic-settings could do it too, and takes nearly as
long to import as pydantic itself, but a mistake in a flag is to be told at once.
"""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from specmamba.errors import ConfigError

PREFIX = "SPECMAMBA_"  # of the environment's variables


class CommandLine(BaseModel):
    """A program's settings: from flags or keyword arguments, and from the environment if ``reads_environment``."""

    reads_environment: ClassVar[bool] = False
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        defer_build=True,  # validators are made for the class that is used, and not for those it is made from
    )

    def __init__(self, /, **given: Any) -> None:
        """Check what is given, and what the environment says of fields that are not."""
        super().__init__(**({**environment_of(type(self)), **given} if self.reads_environment else given))


def environment_of(settings_class: type[CommandLine]) -> dict[str, Any]:
    """What the environment says of a class's fields, by their names.

    Raises:
        ConfigError: a list is not written as JSON.
    """
    found: dict[str, Any] = {}
    for variable, value in os.environ.items():
        name = variable.lower().removeprefix(PREFIX.lower())
        field = settings_class.model_fields.get(name)
        if field is None or len(name) == len(variable) or (name == "port" and is_of_service(value)):
            continue
        if name in found:  # the first of two spellings counts, as in ``variable_of``
            continue
        found[name] = listed(variable, value) if is_plain_list(field) else value
    return found


def variable_of(name: str) -> str | None:
    """The environment's variable that sets a field, as it is spelled there."""
    return next((variable for variable in os.environ if variable.upper() == f"{PREFIX}{name.upper()}"), None)


def is_of_service(value: str) -> bool:
    """Whether a variable's value is the address of a service, as Kubernetes sets ``NAME_PORT`` for one named so."""
    return re.fullmatch(r"(tcp|udp|sctp)://\S+:[0-9]+", value) is not None


def is_plain_list(field: FieldInfo) -> bool:
    """Whether a field is a list and has no function that reads one from a text."""
    is_list = typing.get_origin(field.annotation) in (list, tuple, Sequence)
    return is_list and not any(isinstance(item, BeforeValidator) for item in field.metadata)


def is_number_list(field: FieldInfo) -> bool:
    """Whether a field is a plain list of numbers, whose items commas part; texts and paths may have commas in them."""
    items = [item for item in typing.get_args(field.annotation) if item is not Ellipsis]
    kinds = [typing.get_args(item)[0] if typing.get_origin(item) is typing.Annotated else item for item in items]
    return is_plain_list(field) and bool(kinds) and all(kind in (int, float) for kind in kinds)


def listed(variable: str, value: str) -> Any:
    """Read a list that is given as JSON in a text. Raises ConfigError, which names the ``variable``: it is none."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigError(f'{variable}: a list is written as JSON, like ["a", "b"] (got {value!r:.200})') from None


def split_list(value: object) -> object:
    """Read a list of texts of the environment or of a file, where it is one text: ``a,b``, or JSON.

    Raises:
        ValueError: it begins like JSON and is none, or is empty; the message shows nothing of it, it may be a key.
    """
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return value.split(",")
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        items = None
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError('what begins with [ is a list of texts in JSON, like ["a", "b"], and this is none')
    return items
