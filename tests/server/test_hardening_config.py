"""Keys and origins as flags and in the environment: accepted and refused values; no message contains a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from specmamba.chat_config import ChatConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import SECRETS, parse_command_line
from specmamba.server_config import ServerConfig

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")


def serve(*arguments: str) -> ServerConfig:
    return parse_command_line(ServerConfig, "specmamba serve", list(arguments))


def keys(config: ServerConfig) -> list[str]:
    return [key.get_secret_value() for key in config.api_key]


def test_no_key() -> None:
    assert serve().api_key == ()
    assert serve().cors_allow_origins == ()


def test_keys_from_flags() -> None:
    assert keys(serve("--api-key", "one", "--api-key=two")) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "expected"), [("one", ["one"]), ("one,two", ["one", "two"]), ('["one", "two"]', ["one", "two"])]
)
def test_keys_from_the_environment(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_API_KEY", text)
    assert keys(serve()) == expected
    assert keys(serve("--api-key", "flag")) == ["flag"]


def test_keys_from_python() -> None:
    assert keys(ServerConfig(api_key="one")) == ["one"]  # type: ignore[arg-type]
    assert keys(ServerConfig(api_key=("one", "zwölf"))) == ["one", "zwölf"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", ["hunter2,", "hunter2 hunter2", "hunter2\n", "hunter2\x00", "hunter2\udcff", ",hunter2"]
)
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as from_flag:
        serve("--api-key", "good", "--api-key", key)
    with pytest.raises(ValueError) as from_python:
        ServerConfig(api_key=["good", key])  # type: ignore[arg-type]
    for error in (from_flag, from_python):
        assert "a key is printable text" in str(error.value)
        assert "hunter2" not in str(error.value)
    assert str(from_flag.value).startswith("--api-key: ")


@pytest.mark.parametrize("text", ["", ",", "a,,b"])
def test_an_empty_key_in_the_environment_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMAMBA_API_KEY", text)
    with pytest.raises(ConfigError, match="--api-key: "):
        serve()


@pytest.mark.parametrize("text", ['["hunter2"', "[hunter2]", "[1]", "[]", '["hunter2", 1]', "[" * 100_000])
def test_a_list_that_is_no_json_is_no_key(text: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("good\n")
    monkeypatch.setenv("SPECMAMBA_API_KEY", text)
    for arguments in ([], ["--api-key-file", str(file)]):
        with pytest.raises(ConfigError, match=r"^--api-key: what begins with \[ is a list") as error:
            serve(*arguments)
        assert str(error.value).endswith("(from the environment: SPECMAMBA_API_KEY)")
        assert "hunter2" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^--api-key: what begins with \[ is a list"):
        parse_command_line(ChatConfig, "specmamba chat", [])
    assert keys(serve("--api-key", "[flag")) == ["[flag"]


# ---- keys in files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_keys_from_a_file_are_added_to_those_of_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"\xef\xbb\xbf# of the team\r\nthree\r\n\n  zw\xc3\xb6lf  \n#five\n")
    assert keys(serve("--api-key-file", str(file))) == ["three", "zwölf"]
    assert keys(serve("--api-key", "one", f"--api-key-file={file}", "--api-key=two")) == [
        "one",
        "two",
        "three",
        "zwölf",
    ]
    monkeypatch.setenv("SPECMAMBA_API_KEY", "env,more")
    monkeypatch.setenv("SPECMAMBA_API_KEY_FILE", str(file))
    assert keys(serve()) == ["env", "more", "three", "zwölf"]
    assert keys(ServerConfig(api_key="one", api_key_file=file)) == ["one", "three", "zwölf"]  # type: ignore[arg-type]


def test_the_admin_key_from_a_flag_the_environment_or_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def admin_key(*arguments: str) -> str | None:
        key = serve(*arguments).admin_key
        return None if key is None else key.get_secret_value()

    file.write_text("# the operator's\nroot\n")
    assert admin_key() is None
    assert admin_key("--admin-key", "boss") == "boss"
    assert admin_key("--admin-key-file", str(file)) == "root"
    monkeypatch.setenv("SPECMAMBA_ADMIN_KEY", "chief")
    assert admin_key() == "chief"
    assert "chief" not in repr(serve())


@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-key-file"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "holds no key"),
        (b"#hunter2\n \n", "holds no key"),
        (b"hunter2\xff", "is no text in UTF-8"),
        (b"good\nhunter2,hunter2", "line 2 of "),
        (b"hunter2 hunter2", "line 1 of "),
        (b"hunter2\x00", "line 1 of "),
        (b"\n" * (1 << 20) + b"hunter2", "is larger than"),
    ],
)
def test_a_file_without_good_keys_is_refused_and_not_shown(
    flag: str, content: bytes | None, message: str, file: Path
) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        serve(flag, str(file))
    assert str(error.value).startswith(f"{flag}: ")
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "hunter2" not in str(error.value)


def test_admin_keys_that_are_refused(file: Path) -> None:
    file.write_text("hunter2\nhunter3\n")
    for arguments, message in (
        (("--admin-key", "hunter2 x"), "--admin-key: a key is printable text"),
        (("--admin-key="), "--admin-key: a key is printable text"),
        (("--admin-key-file", str(file)), "--admin-key-file: .* holds more than one key"),
        (("--admin-key", "x", "--admin-key-file", str(file)), "--admin-key, --admin-key-file: give one of them"),
        (("--admin-key", "hunter2", "--api-key", "hunter2"), "--admin-key: it must not be one of the keys that"),
        (("--admin-key", "hunter3", "--api-key-file", str(file)), "--admin-key: it must not be one of the keys that"),
    ):
        given = (arguments,) if isinstance(arguments, str) else arguments
        with pytest.raises(ConfigError, match=message) as error:
            serve(*given)
        assert "hunter" not in str(error.value)


@pytest.mark.parametrize(("flag", "value"), [("--disaggregation-key", "hunter4"), ("--admin-key", "hunter 5")])
def test_no_single_key_is_shown_where_it_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag) as error:
        serve("--disaggregation-mode", "prefill", flag, value)
    assert "hunter" not in str(error.value)


def test_every_key_that_a_flag_takes_counts_as_a_secret() -> None:
    fields = {**ServerConfig.model_fields, **ChatConfig.model_fields}
    of_keys = {name for name, field in fields.items() if "SecretStr" in repr(field.annotation)}
    assert {"api_key", "admin_key", "disaggregation_key"} <= of_keys <= SECRETS


def test_files_of_keys_that_others_may_read_are_known(file: Path) -> None:
    file.write_text("secret")
    for mode, is_exposed in ((0o600, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        assert serve("--api-key-file", str(file)).exposed_key_files == [file] * is_exposed


def test_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--cors-allow-origins", "https://A.example", "--cors-allow-origins=http://localhost:5173")
    assert serve(*flags).cors_allow_origins == ("https://a.example", "http://localhost:5173")
    monkeypatch.setenv("SPECMAMBA_CORS_ALLOW_ORIGINS", "https://a.example,*")
    assert serve().cors_allow_origins == ("https://a.example", "*")


NO_ORIGINS = (
    *(
        "null",
        "",
        "a.example",
        "https://",
        "https://a.example/",
        "ftp://a.example",
        "https://*.a",
        "https://u@a.example",
    ),
    *("https://a.example:port", "https://ä.example", "file://x", "https://[::1", "https://a.example\n"),
)


@pytest.mark.parametrize("origin", NO_ORIGINS)
def test_invalid_origins(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--cors-allow-origins: an origin is written like"):
        serve("--cors-allow-origins", origin)


def test_invalid_limits() -> None:
    names = ["connections", "calls-per-key"]
    flags = [f"--max-{name}" for name in names] + [
        f"--{name}-timeout" for name in ("queue", "read", "request", "write")
    ]
    for value in ("0", "nan", "inf"):
        with pytest.raises(ConfigError) as error:
            serve(*(f"{flag}={value}" for flag in flags))
        assert sorted(line.partition(": ")[0] for line in str(error.value).splitlines()) == sorted(flags)
