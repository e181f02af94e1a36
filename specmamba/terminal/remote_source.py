"""Answers of a running server, over OpenAI's interface."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from specmamba.chat_config import ChatConfig
from specmamba.sampling_params import SamplingParams
from specmamba.terminal.answer_source import WHAT_TO_DO, AnswerEnd, AnswerError, Message, Piece, Reasoning
from specmamba.terminal.safe_text import one_line

START_TIMEOUT_S = 10.0  # for what a server answers at once
ANSWER_TIMEOUT_S = 600.0  # between two pieces of an answer; the first one may wait in a queue
MAX_EVENT_BYTES, MAX_BODY_BYTES = 8 << 20, 1 << 20
MAX_ID, MAX_REMARK = 512, 500  # characters: of a model's name, and of what else a server says
MAX_COUNT = 1 << 53  # beyond it JSON's numbers are not exact, and figures of it would be none
# Settings that every server of the interface has. The others are sent where they change something.
_ALWAYS = ("max_tokens", "temperature")
_SETTINGS = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "speculative"),
)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *args: object) -> None:
        return None


class RemoteSource:
    """``AnswerSource`` of a server."""

    def __init__(self, config: ChatConfig) -> None:
        """Ask the server for its models.

        Raises:
            AnswerError: there is no server, it wants a key, or it has no model.
        """
        assert config.url is not None
        self._url = config.url
        self._key = None if config.api_key is None else config.api_key.get_secret_value()
        is_near = urlsplit(self._url).hostname in ("127.0.0.1", "localhost", "::1")
        proxies = [urllib.request.ProxyHandler({})] if is_near else []
        self._opener = urllib.request.build_opener(_NoRedirect, *proxies)
        cards = [card for card in _list(self._get("/v1/models").get("data")) if _is_id(card.get("id"))]
        if not cards:
            raise AnswerError(f"the server at {self._url} lists no model")
        named = next((card for card in cards if card["id"] == config.model), None)
        self.model: str = config.model if config.model is not None else cards[0]["id"]
        card = cards[0] if config.model is None else named or {}
        self.context_length = _count(card.get("max_model_len"))

    def answer(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[Piece]:
        """As ``AnswerSource.answer``."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "stream": True}
        body |= {"stream_options": {"include_usage": True}, **request_fields(params)}
        # closing the connection aborts the answer
        with closing(self._open("/v1/chat/completions", body, ANSWER_TIMEOUT_S)) as response:
            yield from self._pieces(response)

    def drafting(self) -> str:
        """As ``AnswerSource.drafting``."""
        try:
            info = self._get("/server_info")
        except AnswerError as error:
            return "the server tells its operator only" if error.status in (401, 403) else f"not known: {error}"
        if "speculative_algorithm" not in info:
            return "the server does not say"
        if (algorithm := info["speculative_algorithm"]) is None:
            return "off: nothing drafts"
        sizing = _mapping(_mapping(info.get("stats")).get("sizing"))
        if not sizing:
            return one_line(f"{algorithm}, always {info.get('speculative_num_steps')} deep", MAX_REMARK)
        return one_line(f"{algorithm} ({sizing.get('reason')})", MAX_REMARK)

    def close(self) -> None:
        """As ``AnswerSource.close``."""

    def _pieces(self, response: Any) -> Iterator[Piece]:
        reason, usage, is_done = None, None, False
        for event in self._events(response):
            if event is None:
                is_done = True
                break
            if "error" in event:
                raise self._refusal(200, event)
            usage = event.get("usage") or usage
            for choice in _list(event.get("choices"))[:1]:
                reason = choice.get("finish_reason") or reason
                yield from _texts(_mapping(choice.get("delta")))
        if not is_done and reason is None:
            raise AnswerError("the connection ended before the answer was whole")
        yield _end(str(reason), _mapping(usage))

    def _events(self, response: Any) -> Iterator[dict[str, Any] | None]:
        """The events of a stream; None: its end."""
        while line := self._line(response):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            yield None if data == b"[DONE]" else _object(data)

    def _line(self, response: Any) -> bytes:
        try:
            line: bytes = response.readline(MAX_EVENT_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise AnswerError(f"the connection to {self._url} broke: {_reason(error)}") from None
        if len(line) > MAX_EVENT_BYTES:
            raise AnswerError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        return line

    def _get(self, path: str) -> dict[str, Any]:
        with closing(self._open(path, None, START_TIMEOUT_S)) as response:
            try:
                return _object(response.read(MAX_BODY_BYTES))
            except (OSError, HTTPException) as error:
                raise AnswerError(f"the connection to {self._url} broke: {_reason(error)}") from None

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": "specmamba-chat"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)  # a checked http address
        try:
            return self._opener.open(request, timeout=timeout_s)
        except HTTPError as error:
            raise self._refusal(error.code, _body_of(error)) from None
        except (URLError, OSError, HTTPException) as error:
            raise AnswerError(
                f"no server answers at {self._url}: {_reason(error)} (specmamba serve starts one)"
            ) from None

    def _refusal(self, status: int, body: Mapping[str, Any] | None) -> AnswerError:
        """What an error of the server means."""
        detail = _mapping((body or {}).get("error"))
        said = one_line(str(detail.get("message") or ""), MAX_REMARK)
        message = said or f"the server at {self._url} answers with status {status}"
        if status == 401:
            message += " (--api-key, or SPECMAMBA_API_KEY in the environment)"
        if detail.get("code") == "context_length_exceeded":
            message = f"the context is full: {message}; {WHAT_TO_DO}"
        error = AnswerError(message)
        error.status = status
        return error


def request_fields(params: SamplingParams) -> dict[str, Any]:
    """The settings as fields of a request."""
    neutral = SamplingParams()
    changed = [name for name in _SETTINGS if getattr(params, name) != getattr(neutral, name)]
    return params.model_dump(mode="json", include={*_ALWAYS, *changed})


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID


def _texts(delta: Mapping[str, Any]) -> Iterator[Piece]:
    """What an event adds: to the reasoning, which other servers call "reasoning", and to the answer."""
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thought, str) and thought:
        yield Reasoning(thought)
    if isinstance(text := delta.get("content"), str) and text:
        yield text


def _body_of(error: HTTPError) -> dict[str, Any] | None:
    """The object that an error brings; None: there is none, or not all of it."""
    with error:
        try:
            return _object_or_none(error.read(MAX_BODY_BYTES))
        except (OSError, HTTPException):
            return None


def _end(reason: str, usage: Mapping[str, Any]) -> AnswerEnd:
    prompt, details = _mapping(usage.get("prompt_tokens_details")), _mapping(usage.get("completion_tokens_details"))
    accepted, rejected = (_count(details.get(f"{kind}_prediction_tokens")) for kind in ("accepted", "rejected"))
    rule = details.get("accept_rule")
    return AnswerEnd(
        reason,
        _count(usage.get("prompt_tokens")) or 0,
        _count(prompt.get("cached_tokens")) or 0,
        _count(usage.get("completion_tokens")) or 0,
        None if accepted is None or rejected is None else accepted + rejected,
        accepted,
        one_line(rule, MAX_REMARK) if isinstance(rule, str) else None,
    )


def _object(data: bytes) -> dict[str, Any]:
    if (value := _object_or_none(data)) is None:
        raise AnswerError("the server's answer is no JSON object: is this the address of an OpenAI-compatible server?")
    return value


def _object_or_none(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: object) -> int | None:
    """A number of tokens; None: it is none, or no server has as many."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    said = str(getattr(reason, "strerror", None) or reason or type(error).__name__)
    return one_line(said, MAX_REMARK)  # it may repeat what the server sent as its status line
