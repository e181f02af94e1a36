"""Errors of chats in the words of an API whose requests are translated into chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from specmamba.errors import RequestError
from specmamba.server.http.error_answers import ApiError, as_api_error


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field that an error of the block names.

    Args:
        names: the client's names, by expressions for the beginning of chat's; the first that matches is taken. The
            rest of a path stays: with ``{"a": "b.c"}``, ``a[0].d`` becomes ``b.c[0].d``.

    Raises:
        ApiError: the error, renamed.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        raise _renamed(as_api_error(error), names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    old = error.detail.param
    new = None if old is None else _name(old, names)
    if old is None or new is None:
        return error
    message = error.detail.message
    # At the beginning or in quotes it is the field, elsewhere it may be a word of the sentence.
    message = new + message[len(old) :] if message.startswith(f"{old}:") else message.replace(f"'{old}'", f"'{new}'")
    return ApiError(
        error.status,
        message,
        kind=error.detail.type,
        param=new,
        code=error.detail.code,
        headers=error.headers,
    )


def _name(field: str, names: Mapping[str, str]) -> str | None:
    for pattern, new in names.items():
        if found := re.match(rf"(?:{pattern})(?![a-z_])", field):
            return found.expand(new) + field[found.end() :]
    return None
