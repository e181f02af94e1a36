"""Random hostile HTTP requests. Each is made of its seed and number alone, so that it can be repeated."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

from tests.server.fuzz.values import (
    NUMBERS,
    TEXTS,
    RawJson,
    any_value,
    random_format,
    random_function,
    random_message,
    random_regex,
    random_rules,
    random_schema,
)

Body = list[tuple[str, Any]]  # fields in order; a name may come twice


@dataclass(frozen=True)
class FuzzedRequest:
    """A request as it is sent; without a body: None."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None


def fuzzed_request(seed: int, number: int) -> FuzzedRequest:
    """The request of a number."""
    random = Random(f"{seed} {number}")
    if random.random() < 0.1:
        return _other_request(random)
    path = random.choices(list(_BASES), _WEIGHTS)[0]
    fields = [*random.choice(_BASES[path]).items()]
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        _replace_field(random, path, fields)
    body = _encoded(random, fields)
    if random.random() < 0.08:
        body = _damaged(random, body)
    headers = {"Content-Type": "application/json"}
    if random.random() < 0.06:
        headers |= _odd_header(random)
        body = gzip.compress(body) if headers.get("Content-Encoding") == "gzip" else body
    return FuzzedRequest("POST", path, headers, body)


# ---- fields ----------------------------------------------------------------------------------------------------------


def _one_of(*values: Any) -> Callable[[Random], Any]:
    return lambda random: random.choice(values)


_number = _one_of(*NUMBERS)
_COMMON: dict[str, Callable[[Random], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"), _number),
    **dict.fromkeys(("repetition_penalty", "seed", "max_tokens"), _number),
    "n": _one_of(0, 1, 2, 16, 17, 1024, 1025),
    "stop": _one_of("", "x", ["a"] * 16, ["a"] * 17, [], ["", "a"], "x" * 1025, ["\ud800"], ["\0"], [1], [["a"]]),
    "stop_token_ids": _one_of([0], [], [2**31 - 1], [2**31], [-1], list(range(257)), ["1"], [None]),
    "logit_bias": _one_of(
        *({"5": 100, "6": -100}, {"5": 101}, {"05": 1}, {"-1": 1}, {"99999999": 1}, {"x": 1}, {"": 0}, {"٣": 1}),
        *({str(i): -100 for i in range(1024)}, {str(i): 1 for i in range(1025)}, {"5": None}, {"5": 1e-320}, [[5, 1]]),
    ),
    "stream": _one_of(True, False, None, "true", 1),
    "stream_options": _one_of({"include_usage": True}, {"continuous_usage_stats": True}, {}, {"x": 1}, None),
    "model": _one_of("specmamba-demo", "gpt-9", "", "x" * 5000, "\ud800", None),
    **dict.fromkeys(("return_tokens", "ignore_eos"), _one_of(True, False, None, 1)),
    "speculative": _one_of(
        *(True, False, None, 1, [], {}, {"accept": "target"}, {"accept": "rejection"}, {"accept": "auto"}),
        *({"accept": []}, {"accept": "rejection", "max_depth": 2}, {"max_depth": 0}, {"max_depth": 63}),
        *({"max_depth": 64}, {"max_depth": -1}, {"max_depth": 1e9}, {"max_depth": "1"}, {"max_depth": True}),
        *({"accept": None}, {"x": 1}, {"\ud800": 1}, {"": {}}, {str(i): i for i in range(2000)}),
    ),
    **dict.fromkeys(("cache_salt", "extra_key", "user"), _one_of("a", "", "x" * 257, "\0", "\ud800", "🙂")),
    "metadata": _one_of({}, {"a": {"b": [1]}}, None, "x"),
    "regex": random_regex,
    "ebnf": random_rules,
    "json_schema": lambda random: random.choice((random_schema(random), _encoded_value(random, random_schema(random)))),
    "response_format": random_format,
}
_COMPLETION = _COMMON | {
    "prompt": _one_of(
        *TEXTS, [1, 2], [], [[1], [2, 3]], [[]], ["a", "b"], [2**31], [-1], [4095], [4096], [1] * 200, ["a"] * 17
    ),
    "best_of": _one_of(0, 1, 2, 3, 16, 17, 1025),
    "echo": _one_of(True, True, False, None, 0),
    "logprobs": _one_of(0, 1, 5, 20, 21, -1, True, 1.0),
    "suffix": _one_of("", "x", None),
}
_CHAT = _COMMON | {
    "messages": lambda random: [random_message(random) for _ in range(random.choice((0, 1, 2, 5)))],
    "max_completion_tokens": _number,
    "logprobs": _one_of(True, False, None, 1),
    "top_logprobs": _one_of(0, 1, 20, 21, -1, None),
    "tools": lambda random: [
        {"type": "function", "function": random_function(random)} for _ in range(random.choice((0, 1, 2)))
    ],
    "tool_choice": _one_of("none", "auto", "required", "x", {"type": "function", "function": {"name": "f"}}, {}),
    "parallel_tool_calls": _one_of(True, False, None, "x"),
    "chat_template_kwargs": _one_of({}, {"enable_thinking": False}, {"messages": []}, {"x": "y" * 999}, {"": 1}, None),
}
_TOKENIZE = {name: _CHAT[name] for name in ("model", "messages", "tools", "chat_template_kwargs")} | {
    "prompt": _one_of(*TEXTS, None, []),
    **dict.fromkeys(("add_special_tokens", "return_token_strs"), _one_of(True, False, None, "x")),
}
_DETOKENIZE = {
    "tokens": _one_of([], [0], [4095], [4096], [4096], [1, 2, 3] * 999, [-1], [2**31], [1.0], ["1"], [True]),
    "model": _COMMON["model"],
}
_FIELDS = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/flush_cache": _DETOKENIZE,
}
_USER = [{"role": "user", "content": "def main():\n"}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_BASES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "import os\n", "max_tokens": 3},
        {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, "stream": True},
        {"prompt": "x", "max_tokens": 3, "echo": True, "logprobs": 2, "n": 2, "best_of": 2},
    ),
    "/v1/chat/completions": (
        {"messages": _USER, "max_tokens": 3},
        {"messages": _USER, "max_tokens": 3, "stream": True, "logprobs": True, "top_logprobs": 1},
        {"messages": _USER, "max_tokens": 3, "tools": [_TOOL], "tool_choice": "required"},
    ),
    "/tokenize": ({"prompt": "x = 1"}, {"messages": _USER}),
    "/detokenize": ({"tokens": [5, 6, 7]},),
    "/flush_cache": ({},),
}
_WEIGHTS = (10, 10, 3, 2, 1)


def _replace_field(random: Random, path: str, fields: Body) -> None:
    names = (random.choice([*_FIELDS[path]]), random.choice([*dict(fields), "unknown"]), random.choice(TEXTS[:18]))
    name = random.choices(names, (20, 4, 1))[0]
    makers = _FIELDS[path]
    value = any_value(random) if name not in makers or random.random() < 0.15 else makers[name](random)
    places = [place for place, (known, _) in enumerate(fields) if known == name]
    if places and random.random() < 0.9:
        fields[places[0]] = (name, value)
    else:  # where the name is there already, it comes twice
        fields.append((name, value))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _written(value: Any, ascii_only: bool) -> str:
    if isinstance(value, RawJson):
        return value.text
    if isinstance(value, dict):
        inner = (f"{json.dumps(name)}: {_written(one, ascii_only)}" for name, one in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_written(one, ascii_only) for one in value)}]"
    return json.dumps(value, ensure_ascii=ascii_only)


def _encoded_value(random: Random, value: Any) -> str:
    return _written(value, random.random() < 0.5)


def _encoded(random: Random, fields: Body) -> bytes:
    ascii_only = random.random() < 0.7
    text = ",".join(f"{json.dumps(name)}:{_written(value, ascii_only)}" for name, value in fields)
    return f"{{{text}}}".encode("utf8", "surrogatepass")


def _damaged(random: Random, body: bytes) -> bytes:
    at = random.randrange(len(body) + 1)
    text = body.decode("utf8", "replace")
    return random.choice(
        [
            *(body[:at], body[:at] + b"\0" + body[at:], body[:at] + b"\xff" + body[at:], body[:at] + b"," + body[at:]),
            *(text.encode("utf-16"), text.encode("utf-32-le"), text.encode("utf-16-be"), b"\xef\xbb\xbf" + body),
            *(
                b"",
                b"null",
                b"[]",
                b'"x"',
                b"1",
                b"[" * 70_000,
                b"{}{}",
                body + b"]",
                random.randbytes(50),
                b" " * 9999,
            ),
        ]
    )


def _odd_header(random: Random) -> dict[str, str]:
    types = ("text/plain", "", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "a" * 999)
    names = (
        *(("Content-Type", value) for value in types),
        *(("Content-Encoding", "gzip"), ("Content-Encoding", "x"), ("Authorization", "Bearer \xff"), ("Host", "evil")),
        *(("Origin", "null"), ("Accept", "image/png"), ("X-Request-Id", "\xe9" * 300), ("traceparent", "00-x-y-z")),
        *(("Connection", "close"), ("Expect", "100-continue"), ("Cookie", "a" * 9000), ("Upgrade", "websocket")),
        *(("X-Forwarded-For", "1.2.3.4"), ("Range", "bytes=0-1"), ("If-None-Match", "*"), ("Accept-Encoding", "zstd")),
    )
    return dict([random.choice(names)])


_PATHS = (
    *("/docs", "/ping", "/version"),
    *("/", "/health", "/ready", "/metrics", "/cache", "/events", "/server_info", "/get_server_info", "/model_info"),
    *(
        "/v1/models",
        "/v1/models/specmamba-demo",
        "/openapi.json",
        "/page/app.js",
        "/none",
        "//health",
        "/health/",
        "/%00",
    ),
)


def _other_request(random: Random) -> FuzzedRequest:
    """A request of another method, or with a query string or an odd path."""
    path = random.choice(
        (*_PATHS, *_PATHS, *_BASES, "/v1/models/" + quote(random.choice(TEXTS[:17]), errors="replace"))
    )
    names = ("format", "format", "x", "", "api_key", "%ff", "a[]")
    values = ("text", "json", "", "%00", "%ed%a0%80", "9" * 5000, "\\", quote("é🙂"), "text&format=json", "+")
    query = "&".join(f"{random.choice(names)}={random.choice(values)}" for _ in range(random.choice((0, 1, 1, 2, 50))))
    method = random.choice(("GET", "GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST"))
    headers = _odd_header(random) if random.random() < 0.3 else {}
    return FuzzedRequest(method, f"{path}?{query}" if query else path, headers, b"{}" if method == "POST" else None)
