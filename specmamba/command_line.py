"""Reading configurations from the command line, the environment and a TOML file; messages about invalid values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from specmamba.config import EngineConfig, GenerateConfig
from specmamba.errors import ConfigError
from specmamba.server_config import ServerConfig

ConfigT = TypeVar("ConfigT", bound=EngineConfig)
SettingsT = TypeVar("SettingsT", bound=BaseSettings)

# Fields whose values are left out of messages.
_SECRETS = frozenset({"api_key", "admin_key"})


def parse_command_line(config_class: type[ConfigT], prog: str, arguments: list[str]) -> ConfigT:
    """Read a configuration: command line over environment over ``--config FILE.toml`` over defaults.

    Prints usage and exits with status 0 for ``--help`` and 2 for an argument that the parser does not know.

    Raises:
        ConfigError: a value, a combination or the file is not valid; the message names each flag concerned.
    """
    file_settings, arguments = _take_config_file(config_class, arguments)
    repeated, arguments = _take_repeated(config_class, arguments)

    class FromEverywhere(config_class):  # type: ignore[valid-type, misc]
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *args: Any, **kwargs: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            sources = super().settings_customise_sources(settings_cls, *args, **kwargs)
            return (*sources, InitSettingsSource(settings_cls, file_settings))

    FromEverywhere.__doc__ = f"{config_class.__doc__} Also: --config FILE.toml, environment SPECMAMBA_*."
    FromEverywhere.__name__ = config_class.__name__
    resolved: ConfigT = read_flags(FromEverywhere, prog, arguments, **repeated)
    return resolved


def read_flags(settings_class: type[SettingsT], prog: str, arguments: list[str], **given: Any) -> SettingsT:
    """Read settings from flags; values of ``given`` and of the class's own sources have lower priority.

    Prints usage and exits for ``--help``.

    Raises:
        ConfigError: a value or a combination is not valid; the message names each flag concerned.
    """
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(settings_class, cli_prog_name=prog, cli_parse_args=arguments)
        return settings_class(_cli_settings_source=source, **given)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error)) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def describe_validation_error(error: ValidationError) -> str:
    """One line per problem, each named by its flag."""
    lines = []
    for problem in error.errors(include_url=False):
        flag = "--" + str(problem["loc"][0]).replace("_", "-") + ": " if problem["loc"] else ""
        is_shown = problem["loc"] and problem["loc"][0] not in _SECRETS and problem["type"] != "missing"
        got = f" (got {problem['input']!r})" if is_shown else ""
        lines.append(flag + problem["msg"].removeprefix("Value error, ") + got)
    return "\n".join(lines)


def _take_config_file(config_class: type[EngineConfig], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of ``--config FILE.toml`` by field name, and the arguments without it.

    One file can be used for all commands: fields of other commands are ignored.
    """
    files, rest = _take_flag("--config", arguments)
    settings = _read_toml(Path(files[-1])) if files else {}
    elsewhere = {*ServerConfig.model_fields, *GenerateConfig.model_fields} - set(config_class.model_fields)
    return {name: value for name, value in settings.items() if name not in elsewhere}, rest


def _take_repeated(config_class: type[EngineConfig], arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of flags that may be repeated, and the arguments without these flags.

    pydantic-settings would parse the values as JSON or as lists with commas, which a stop string may look like.
    """
    taken: dict[str, list[str]] = {}
    for name, field in config_class.model_fields.items():
        if "may be given again" in (field.description or ""):  # the text of --help is the declaration
            values, arguments = _take_flag("--" + name.replace("_", "-"), arguments)
            taken |= {name: values} if values else {}
    return taken, arguments


def _take_flag(flag: str, arguments: list[str]) -> tuple[list[str], list[str]]:
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


def _read_toml(file: Path) -> dict[str, Any]:
    """Settings by field name; a key may also be spelled like its flag, with hyphens."""
    import tomllib

    if not file.is_file():
        raise ConfigError(f"--config: there is no file {file}")
    try:
        settings = tomllib.loads(file.read_text("utf8"))
    except OSError as error:
        raise ConfigError(f"--config: {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {file} is not valid TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in settings.items()}


@contextmanager
def errors_of_out(out: Path) -> Iterator[None]:
    """Report errors of reading and writing below ``out`` as errors of the flag.

    Raises:
        ConfigError: the disk is full, or the folder cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out: {error.filename or out}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"--out: {out}: {error}") from None


def exit_with_error(prog: str, error: Exception) -> NoReturn:
    """Print an error as one message without traceback, and exit with status 2."""
    print(f"{prog}: error: {error}", file=sys.stderr)
    raise SystemExit(2)


TableRow = tuple[str, str, str]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable(num_bytes: int) -> str:
    """Format a size with a unit and about three digits."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS) - 1:  # 1023 B is 1.0 KiB: never four digits
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit and size < 100 else f"{size:.0f} {UNITS[unit]}"


def aligned(rows: Sequence[TableRow]) -> list[str]:
    """Align rows of a name, a size (to the right) and a remark; return one line per row."""
    names, sizes = (max(len(row[i]) for row in rows) for i in range(2))
    return [f"{name:<{names}}  {size:>{sizes}}  {remark}".rstrip() for name, size, remark in rows]
