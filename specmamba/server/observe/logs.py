"""The log: one line per event, as text or as JSON. No line contains text of a client unescaped."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from specmamba.server.observe.call_record import CallRecord
from specmamba.server.observe.line_writer import LineWriter, descriptor_of
from specmamba.server_config import ServerConfig

logger = logging.getLogger("specmamba")

_PLAIN = re.compile(r"[A-Za-z0-9._:@/+~,-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MAX_PATH = 128


def configure_logging(config: ServerConfig) -> LineWriter:
    """Write all loggers to standard error: this package's at ``--log-level``, others' warnings and errors.

    Returns the writer, which owns the thread on which lines are written.
    """
    formatter = JsonFormatter() if config.log_format == "json" else TextFormatter()
    writer = LineWriter(descriptor_of(sys.__stderr__), lambda num_lines: f"{formatter.format(_drops(num_lines))}\n")
    handler = WritingHandler(writer)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("specmamba").setLevel(config.log_level.upper())
    return writer


def num_dropped_lines() -> int:
    """Log lines of this process that could not be written, or not in time."""
    handlers = logging.getLogger().handlers
    return sum(handler.writer.num_dropped for handler in handlers if isinstance(handler, WritingHandler))


def _drops(num_lines: int) -> logging.LogRecord:
    text = "%d log lines were dropped: the log is read or written too slowly"
    return logger.makeRecord(logger.name, logging.WARNING, __file__, 0, text, (num_lines,), None)


class WritingHandler(logging.Handler):
    """Gives formatted lines to a writer; never waits for what reads them."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 -- a record that cannot be formatted is a bug of its caller
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """``TIME LEVEL LOGGER: MESSAGE key=value ...`` on one line; only a traceback has lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the name of the base class
        pairs = [f"{key}={_as_text(value)}" for key, value in _fields(record).items()]
        return " ".join([_CONTROL.sub(_escaped, super().formatMessage(record)), *pairs])


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time in UTC, level, logger, message, the event's fields, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_call(call: CallRecord) -> None:
    """Log one line at the end of a call: level info for POST and for errors, else debug."""
    is_notable = call.method == "POST" or call.status >= 400
    level = logging.INFO if is_notable else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra={"fields": call_fields(call)})


def call_fields(call: CallRecord) -> dict[str, object]:
    """The fields of a call's log line: figures and names, no text of its prompt, answer or headers."""
    fields: dict[str, object] = {
        "request_id": call.request_id,
        "id": call.call_id,
        # A client that escapes its question mark has its query in the path.
        "endpoint": f"{call.method} {call.path.partition('?')[0][:_MAX_PATH]}",
        "status": call.status,
        "total_s": round(call.total_s, 4),
        "error": call.outcome,
    }
    if call.num_choices:
        totals = call.totals()
        first = call.time_to_first_token
        fields |= {
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "output_tokens": totals.output_tokens,
            "accept_length": round(totals.accept_length, 3),
            "ttft_s": None if first is None else round(first, 4),
            "finish_reason": ",".join(dict.fromkeys(call.finish_reasons)),
        }
    return {key: value for key, value in fields.items() if value is not None}


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _as_text(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]
