"""The flags of ``specmamba chat``: the engine's, or the address of a server; and how answers are made and shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from specmamba.config import EngineConfig
from specmamba.flags.settings import split_list
from specmamba.sampling_params import LogitSettings, Temperature

_URL = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?(/[\w./~-]*)?", re.ASCII | re.IGNORECASE)


def _base_url(url: str) -> str:
    """The address without the path of the API."""
    if _URL.fullmatch(url) is None:
        raise ValueError(f"an address is written like http://127.0.0.1:30000 (got {_without_secrets(url)!r})")
    return url.rstrip("/").removesuffix("/v1")


def _without_secrets(url: str) -> str:
    """What can be repeated of an address: neither a name and password in it nor its query."""
    address = re.sub(r"^([a-z]+://)?.*@", r"\1", url, flags=re.DOTALL | re.IGNORECASE)
    return re.split("[?#]", address)[0][:200]


def _first_key(value: object) -> object:
    """The first of several keys: a server's environment or file may hold a list."""
    value = split_list(value)
    return value[0] if isinstance(value, list | tuple) and value else value


def _checked_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable() and text.strip()):
        raise ValueError("a key is printable ASCII text")
    return key


class ChatConfig(LogitSettings, EngineConfig):
    """``specmamba chat``: a conversation in the terminal, with a model in this process or with a running server."""

    url: Annotated[
        Annotated[str, AfterValidator(_base_url)] | None,
        Field(description="a running server; --model names one of its models; none: load the model here"),
    ] = None
    api_key: Annotated[
        Annotated[SecretStr, BeforeValidator(_first_key), AfterValidator(_checked_key)] | None,
        Field(description="the key that the server of --url asks for"),
    ] = None
    system: Annotated[str | None, Field(description="the system message; none: the chat template's own")] = None
    max_tokens: Annotated[int, Field(ge=1, description="new tokens of an answer at the most")] = 1024
    temperature: Temperature = 0.7
    stop: Annotated[
        Sequence[str], AfterValidator(tuple), Field(description="a string that ends an answer; may be given again")
    ] = ()
    markdown: Annotated[bool, Field(description="show finished answers with their markup, on a terminal")] = True
    history: Annotated[
        bool, Field(description="remember messages for the arrow keys, in a file below $XDG_STATE_HOME/specmamba")
    ] = True
