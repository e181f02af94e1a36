"""The flags of ``specmamba bench serving``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator

from specmamba.measure.report import ReportOptions, split_numbers
from specmamba.sampling_params import Temperature

DEFAULT_CONCURRENCY = (1, 2, 4, 8)


def _levels(value: object) -> object:
    if value in ([], ()):
        raise ValueError("give at least one level")
    return split_numbers(value)


class ServingBenchConfig(ReportOptions):
    """Throughput and latency of a server under load."""

    base_url: Annotated[
        str | None, Field(description="a server that runs already, such as http://127.0.0.1:30000; none: start one")
    ] = None
    api_key: Annotated[SecretStr | None, Field(min_length=1, description="the key that the server asks for")] = None
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=4096)], ...] | None,
        BeforeValidator(_levels),
        Field(description="closed loop: numbers of clients, one level each; none: 1,2,4,8"),
    ] = None
    request_rate: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)], ...] | None,
        BeforeValidator(_levels),
        Field(description="open loop: requests per second, Poisson arrivals, one level each"),
    ] = None
    num_requests: Annotated[int, Field(ge=1, description="requests of a level")] = 32
    num_warmup: Annotated[int, Field(ge=0, description="requests before the first level, not counted")] = 2
    prompts: Annotated[
        Path | None,
        Field(description="prompts of this file (JSON lines, or ShareGPT), sent as plain text; none: bundled ones"),
    ] = None
    max_tokens: Annotated[int, Field(ge=1, description="new tokens of a request at the most")] = 64
    temperature: Temperature = 0.8
    ignore_eos: Annotated[
        bool, Field(description="go on after the end-of-text token; an extension that not every server knows")
    ] = False
    request_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds of silence after which a request has failed")
    ] = 300.0
    startup_timeout: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds that a started server may take to load")
    ] = 600.0

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # unmatched brackets, or a port that is not a number or too large
            is_whole = False
        if not is_whole:
            raise ValueError("give scheme, host and port, such as http://127.0.0.1:30000")
        return url.rstrip("/").removesuffix("/v1")

    @property
    def levels(self) -> tuple[tuple[int | None, float | None], ...]:
        """The levels: (clients, None) in a closed loop, (None, requests per second) in an open one."""
        if self.request_rate is not None:
            return tuple((None, rate) for rate in self.request_rate)
        return tuple((clients, None) for clients in self.concurrency or DEFAULT_CONCURRENCY)

    @property
    def mode(self) -> Literal["closed loop", "open loop"]:
        return "closed loop" if self.request_rate is None else "open loop"

    @property
    def key(self) -> str | None:
        return None if self.api_key is None else self.api_key.get_secret_value()
