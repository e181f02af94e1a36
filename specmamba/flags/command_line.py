"""Reading configurations from the command line, the environment and a TOML file; messages about invalid values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.flag_parser import FlagParser, take_flag, with_own_names
from specmamba.flags.near_names import did_you_mean
from specmamba.flags.other_names import OTHER_NAMES, SPECULATIVE, Renamed, flag_of, names_of, near_flag, translated
from specmamba.flags.settings import PREFIX, CommandLine, environment_of, is_of_service, variable_of

ConfigT = TypeVar("ConfigT", bound=EngineConfig)
SettingsT = TypeVar("SettingsT", bound=CommandLine)

# What is no flag: native kernels, Triton, builds, and tests.
_OTHER_VARIABLES = frozenset(
    f"SPECMAMBA_{name}"
    for name in ("NATIVE", "TRITON", "BUILD_NATIVE", "TEST_FULL", "TEST_TRITON", "TEST_FLA", "PAGE_PICTURES")
)
# What Kubernetes puts into containers beside a service that is called specmamba.
_OF_KUBERNETES = re.compile(r"^(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))(_|$)")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*[a-z0-9])")
# Fields whose values are left out of messages; an address may hold a password.
SECRETS = frozenset({"api_key", "admin_key", "disaggregation_key", "url"})


def parse_command_line(config_class: type[ConfigT], prog: str, arguments: list[str]) -> ConfigT:
    """Read a configuration: command line over environment over ``--config FILE.toml`` over defaults.

    Prints usage and exits with status 0 for ``--help`` and 2 for an argument that the parser does not know.

    Raises:
        ConfigError: a value, a combination or the file is not valid; the message names each flag concerned.
    """
    source, arguments = _take_config_file(config_class, prog, arguments)
    arguments = with_own_names(config_class, prog, arguments)
    repeated, arguments = _take_repeated(config_class, arguments)
    _check_environment(config_class, prog)
    return read_flags(config_class, prog, arguments, source, **repeated)


@dataclass(frozen=True)
class ConfigFile:
    """The settings of a ``--config`` file by field name, and where they stand."""

    path: Path | None
    settings: Mapping[str, Any]
    text: str

    def line_of(self, name: str) -> int | None:
        """The line that sets a field, by any of its names."""
        names = "|".join(names_of(name)).replace("_", "[-_]")
        key = re.compile(rf"\s*\[?\s*[\"']?({names})[\"']?\s*[].=]")
        return next((number for number, line in enumerate(self.text.splitlines(), 1) if key.match(line)), None)


NO_FILE = ConfigFile(None, {}, "")


def read_flags(
    settings_class: type[SettingsT], prog: str, arguments: list[str], file: ConfigFile = NO_FILE, **given: Any
) -> SettingsT:
    """Read settings: flags over what is ``given`` over the class's environment over ``file`` over defaults.

    Prints usage and exits for ``--help``.

    Raises:
        ConfigError: a value or a combination is not valid; the message names each flag concerned, and the variable or
            the line of ``file`` that its value comes from.
    """
    given |= FlagParser(settings_class, prog).values(arguments)
    try:
        around = environment_of(settings_class) if settings_class.reads_environment else {}
        return settings_class(**{**file.settings, **around, **given})
    except ValidationError as error:

        def origin(name: str) -> str:
            if name in given:
                return ""
            if settings_class.reads_environment and (variable := variable_of(name)) is not None:
                return f" (from the environment: {variable})"
            if name not in file.settings:
                return ""
            line = file.line_of(name)
            return f" ({file.path})" if line is None else f" ({file.path}, line {line})"

        message = describe_validation_error(error, settings_class.model_fields, origin)
        raise ConfigError(message) from None


def describe_validation_error(
    error: ValidationError, names: Collection[str] = (), origin: Callable[[str], str] = lambda _: ""
) -> str:
    """One line per problem, each named by its flag.

    Args:
        error: what is wrong.
        names: of all fields, for suggestions.
        origin: says behind a problem where the value of this field comes from.
    """
    lines = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        flag = "--" + name.replace("_", "-")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{flag}: there is no such flag{near_flag(flag, map(flag_of, names))}{origin(name)}")
            continue
        is_shown = name and name not in SECRETS and problem["type"] != "missing"
        got = f" (got {problem['input']!r})" if is_shown else ""
        text = problem["msg"].removeprefix("Value error, ")
        concerned = [name] if name else [word.replace("-", "_") for word in _FLAG.findall(text)]
        origins = "".join(dict.fromkeys(map(origin, concerned)))
        lines.append((f"{flag}: " if name else "") + text + got + origins)
    return "\n".join(lines)


def all_fields() -> set[str]:
    """The names of fields of all commands that may share one environment and one file."""
    from specmamba.chat_config import ChatConfig  # each takes its time to be made, and most calls need one
    from specmamba.generate_config import GenerateConfig
    from specmamba.server_config import ServerConfig

    return {*ServerConfig.model_fields, *GenerateConfig.model_fields, *ChatConfig.model_fields}


def _check_environment(config_class: type[EngineConfig], prog: str) -> None:
    """Raise ConfigError for a variable of ours that is nearly a flag's; say of others that they have no effect."""
    ours = {variable: value for variable, value in os.environ.items() if variable.upper().startswith(PREFIX)}
    if not ours:
        return
    fields = {*all_fields(), *config_class.model_fields}
    known = {PREFIX + name.upper() for name in fields} | _OTHER_VARIABLES
    for variable, value in ours.items():
        name = variable.upper().removeprefix(PREFIX)  # the common beginning makes all names look near
        if variable.upper() == f"{PREFIX}PORT" and "port" in config_class.model_fields and is_of_service(value):
            said = "Kubernetes says so of a service named specmamba, and it is no port to listen on"
            print(f"{prog}: {variable}={value} is ignored: {said}", file=sys.stderr)
        if variable.upper() in known or _OF_KUBERNETES.search(name):
            continue
        if (hint := _hint_of_another(name.lower())) is not None:
            raise ConfigError(f"{variable}: there is no such variable of the environment; {hint}")
        if near := did_you_mean(name, [field.upper() for field in (*config_class.model_fields, *sorted(fields))]):
            hint = near.replace("mean ", f"mean {PREFIX}")
            raise ConfigError(f"{variable}: there is no such variable of the environment{hint}")
        print(f"{prog}: {variable} has no effect: this command has no such flag", file=sys.stderr)


def _hint_of_another(name: str) -> str | None:
    """What is said of a variable that has the name of another runtime's setting; None: it has none."""
    if name == SPECULATIVE:
        return f"{PREFIX}SPECULATIVE_ALGORITHM and others that begin so are for its parts"
    known = OTHER_NAMES.get(name)
    if known is None:
        return None
    return f"{PREFIX}{known.field.upper()} is what it is called here" if isinstance(known, Renamed) else known.reason


def _take_config_file(
    config_class: type[EngineConfig], prog: str, arguments: list[str]
) -> tuple[ConfigFile, list[str]]:
    """What ``--config FILE.toml`` sets, and the arguments without it.

    One file can be used for all commands: fields of other commands are ignored.
    """
    files, rest = take_flag("--config", arguments)
    file = _read_toml(Path(files[-1])) if files else NO_FILE
    elsewhere = all_fields() - set(config_class.model_fields) if file.settings else set()
    try:
        own, notes = translated(file.settings)
    except ConfigError as error:
        raise ConfigError(f"{error} ({file.path})") from None
    for note in notes:
        print(f"{prog}: {note} ({file.path})", file=sys.stderr)
    ours = {name: value for name, value in own.items() if name not in elsewhere}
    return replace(file, settings=ours), rest


def _take_repeated(config_class: type[EngineConfig], arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of flags that may be repeated, and the arguments without these flags.

    The parser would take a value that begins with a hyphen, as a stop string may, for a flag.
    """
    taken: dict[str, list[str]] = {}
    for name, field in config_class.model_fields.items():
        if "may be given again" in (field.description or ""):  # the text of --help is the declaration
            values, arguments = take_flag("--" + name.replace("_", "-"), arguments)
            taken |= {name: values} if values else {}
    return taken, arguments


def _read_toml(file: Path) -> ConfigFile:
    """Settings by field name; a key may also be spelled like its flag, with hyphens."""
    import tomllib

    if not file.is_file():
        raise ConfigError(f"--config: there is no file {file}")
    try:
        text = file.read_text("utf8")
        settings = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config: {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {file} is not valid TOML: {error}") from None
    return ConfigFile(file, {key.replace("-", "_"): value for key, value in settings.items()}, text)


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
    print(f"{prog}: error: {getattr(error, 'in_flags', None) or error}", file=sys.stderr)
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
