"""Keys and origins as flags and in the environment: accepted and refused values; no message contains a key."""

from __future__ import annotations

import pytest

from specmamba.command_line import parse_command_line
from specmamba.errors import ConfigError
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


@pytest.mark.parametrize(("text", "expected"), [("one", ["one"]), ("one,two", ["one", "two"]), ("[1]", ["[1]"])])
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
