"""The parser of a command's flags: help in groups, errors in three lines, and flags of other runtimes."""

from __future__ import annotations

import argparse
import itertools
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.other_names import OTHER_NAMES, SPECULATIVE, flag_of, mapping_of_draft, near_flag, translated
from specmamba.flags.settings import CommandLine, is_number_list, is_plain_list

WIDTH = 110
# Each group of flags begins with this field and goes on to the next one, in the order of their declaration.
GROUPS = {
    "model": "model",
    "context_length": "requests",
    "mem_fraction_static": "memory",
    "disable_cuda_graph": "captured steps",
    "disable_radix_cache": "prefix cache and order of requests",
    "speculative_algorithm": "speculation",
    "host": "server",
    "allowed_hosts": "who may call, and what they share",
    "max_request_bytes": "limits and time-outs of the server",
    "grammar_timeout": "structured output and tools",
    "log_level": "logs, metrics, traces",
}
OWN = "of this command"
_VALUES = {int: "N", float: "X", Path: "FILE", str: "TEXT"}
_UNKNOWN = "unrecognized arguments: "


class FlagParser(argparse.ArgumentParser):
    """Flags of a settings class."""

    def __init__(self, settings_class: type[CommandLine], prog: str) -> None:
        super().__init__(prog=prog, usage="%(prog)s [OPTIONS]", allow_abbrev=False)
        elsewhere = " Also: --config FILE.toml, environment SPECMAMBA_*." if settings_class.reads_environment else ""
        self.description = (settings_class.__doc__ or "").partition("\n\n")[0].replace("``", "") + elsewhere
        self._fields = dict(settings_class.model_fields)
        for name, field in settings_class.model_fields.items():
            self._parts(name, field)
        for name, field in self._fields.items():
            self._add_flag(name, field)

    def _parts(self, name: str, field: FieldInfo) -> None:
        """Put the fields of a field that has some, ``architecture.hidden_size``, in its place."""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            del self._fields[name]
            self._fields |= {f"{name}.{part}": own for part, own in field.annotation.model_fields.items()}

    def _add_flag(self, name: str, field: FieldInfo) -> None:
        kind: dict[str, Any] = {}
        if field.annotation is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif is_plain_list(field):
            kind = {"action": "append"}
        self.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, **kind)

    def values(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The values of the flags that are given, by the names of their fields; "None" is one, where a field may be.

        Lists of numbers are read from ``--flag 1,4``, ``--flag 1 --flag 4`` and ``--flag [1,4]``.

        Prints help or an error and exits, as ``parse_args``.
        """
        found: dict[str, Any] = {}
        for name, value in vars(self.parse_args(arguments)).items():
            whole, _, part = name.partition(".")
            if is_number_list(self._fields[name]):
                value = [item for given in value for item in given.strip().strip("[]").split(",")]
            may_be_none = value == "None" and NoneType in typing.get_args(self._fields[name].annotation)
            target = found.setdefault(whole, {}) if part else found
            target[part or whole] = None if may_be_none else value
        return found

    def format_help(self) -> str:
        """Usage, description, and the flags in groups, those that only this command has first."""
        formatter = argparse.HelpFormatter(self.prog, max_help_position=34, width=WIDTH)
        formatter.add_usage(self.usage, (), ())
        formatter.add_text(self.description)
        actions = {action.dest: action for action in self._actions}
        for title, names in grouped(self._fields).items():
            formatter.start_section(title)
            formatter.add_arguments([_readable(actions[name], self._fields[name]) for name in names if name in actions])
            formatter.end_section()
        formatter.start_section("more")
        rest = [action for action in self._actions if action.dest not in self._fields]
        formatter.add_arguments(rest)
        formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print where help is, and what is wrong, with the nearest flag. Exits with status 2."""
        is_unknown = message.startswith(_UNKNOWN)
        first = next(iter(message.removeprefix(_UNKNOWN).split()), "an empty text") if is_unknown else ""
        if first.startswith("-"):
            flag = first.partition("=")[0]
            flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            message = f"there is no flag {flag}{near_flag(flag, flags)}"
        elif first:
            hint = f"; a model is given as --model {first}" if "/" in first and "model" in self._fields else ""
            message = f"{first}: this stands behind no flag{hint}"
        self.exit(2, f'usage: {self.prog} [OPTIONS]; "{self.prog} --help" lists them\n{self.prog}: error: {message}\n')


def grouped(fields: Mapping[str, FieldInfo]) -> dict[str, list[str]]:
    """The names of fields by group; a field without a start of its own belongs to the group of the field before it."""
    from specmamba.server_config import ServerConfig

    shared = {*EngineConfig.model_fields, *ServerConfig.model_fields}
    groups: dict[str, list[str]] = {OWN: [name for name in fields if name not in shared]}
    title = ""
    for name in (*EngineConfig.model_fields, *list(ServerConfig.model_fields)[len(EngineConfig.model_fields) :]):
        title = GROUPS.get(name, title)
        if name in fields:
            groups.setdefault(title, []).append(name)
    return {title: names for title, names in groups.items() if names}


def _readable(action: argparse.Action, field: FieldInfo) -> argparse.Action:
    """The same flag, with the kind of its value and its default as people read them."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if not isinstance(action, argparse.BooleanOptionalAction) and action.nargs != 0:
        action.metavar = _value_name(field.annotation)
    says_it = default is None or default is False or default in ((), []) or field.is_required()
    shown = "" if says_it else f" (default: {'on' if default is True else _plain(default)})"
    action.help = (field.description or "").replace("%", "%%") + shown.replace("%", "%%")
    return action


def _value_name(annotation: Any) -> str:
    kinds = [kind for kind in typing.get_args(annotation) if kind is not NoneType]
    if typing.get_origin(annotation) is Literal:
        return "|".join(map(str, kinds))
    if annotation in _VALUES:
        return _VALUES[annotation]
    return _value_name(kinds[0]) if kinds else "TEXT"


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def with_own_names(config_class: type[EngineConfig], prog: str, arguments: list[str]) -> list[str]:
    """The arguments with the flags of other runtimes replaced; what is replaced is said on standard error."""
    given: dict[str, Any] = {}
    rest = arguments
    for name in (SPECULATIVE, *OTHER_NAMES):
        if name not in config_class.model_fields:
            values, rest = _take_other(name, rest)
            given |= {name: values[-1]} if values else {}
    fields, notes = translated(given)
    used = {argument.partition("=")[0].replace("--no-", "--") for argument in rest}
    if twice := [field for field in fields if flag_of(field) in used]:
        raise ConfigError(f"{flag_of(twice[0])} is given by another name too: give one of them")
    for note in notes:
        print(f"{prog}: {note}", file=sys.stderr)
    return [*rest, *(_written(field, value) for field, value in fields.items())]


def _take_other(name: str, arguments: list[str]) -> tuple[list[Any], list[str]]:
    """The values of another runtime's flag, and the arguments without it.

    Raises:
        ConfigError: a value is missing, or a part of the speculative configuration is given twice.
    """
    flag, known = flag_of(name), OTHER_NAMES.get(name)
    if known is not None and known.is_switch:
        switches = {flag: True, f"--no-{name.replace('_', '-')}": False}
        return [switches[one] for one in arguments if one in switches], [
            one for one in arguments if one not in switches
        ]
    values, rest = _take_with_value(flag, arguments)
    if name != SPECULATIVE:
        return values, rest
    parts: dict[str, str] = {}  # vLLM also takes them one by one: --speculative-config.method mtp
    for part in {one.partition("=")[0] for one in rest if one.startswith(f"{flag}.")}:
        found, rest = _take_with_value(part, rest)
        parts |= {part.removeprefix(f"{flag}.").replace("-", "_"): value for value in found}
    if not (parts and values):
        return [parts] if parts else [*values], rest
    whole = mapping_of_draft(values[-1])
    if twice := sorted(whole.keys() & parts.keys()):
        raise ConfigError(f"{flag}.{twice[0]} is given in {flag} too: give one of them")
    return [{**whole, **parts}], rest


def _take_with_value(flag: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """``take_flag`` for a flag that the parser does not know. Raises ConfigError where no value stands behind it."""
    for argument, following in itertools.pairwise([*arguments, "--"]):
        if argument == flag and following.startswith("--"):
            raise ConfigError(f"{flag}: no value stands behind it")
    return take_flag(flag, arguments)


def _written(field: str, value: object) -> str:
    """A setting as an argument."""
    if isinstance(value, bool):
        return flag_of(field) if value else f"--no-{field.replace('_', '-')}"
    return f"{flag_of(field)}={value}"


def take_flag(flag: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """All values of a flag, given as ``--flag VALUE`` or ``--flag=VALUE``, and the arguments without them."""
    values, rest = [], []
    remaining = iter(arguments)
    for argument in remaining:
        if argument.startswith(f"{flag}="):
            values.append(argument.removeprefix(f"{flag}="))
        elif argument == flag and (value := next(remaining, None)) is not None:
            values.append(value)
        else:
            rest.append(argument)
    return values, rest
