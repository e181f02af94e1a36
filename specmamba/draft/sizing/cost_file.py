"""Measured times of steps in a file: one entry for each model, machine and way of drafting."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.errors import ConfigError

FLAG = "--speculative-costs"
MAX_ENTRIES, MAX_BYTES = 256, 4 << 20
Seconds = Annotated[float, Field(gt=0, lt=3600, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=1, le=1 << 20)]
Curve = Annotated[dict[Number, Seconds], Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TimesOfSize(_Strict):
    """``StepTimes`` of one number of requests."""

    draft_seconds: Annotated[Curve, Field(description="by depth")]
    verify_seconds: Annotated[Curve, Field(description="by nodes of all requests; the rest of a step")]
    chain_seconds: Annotated[
        dict[Number, Seconds], Field(max_length=256, description="whole steps with a chain for every request, by depth")
    ] = {}


OfKey = Annotated[
    dict[Number, Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]],
    Field(max_length=256, description="added for every key in front of a request's root, by the request's nodes"),
]


class CostEntry(_Strict):
    """The times of one engine."""

    engine: Annotated[dict[str, str], Field(description="model, machine and flags that times depend on")]
    times: Annotated[dict[Number, TimesOfSize], Field(min_length=1, max_length=64, description="by requests")]
    key_seconds: OfKey = {}
    key_seconds_of_chains: OfKey = {}

    def costs(self) -> StepCosts:
        """Return the times for a sizer."""
        found = {size: StepTimes(t.draft_seconds, t.verify_seconds, t.chain_seconds) for size, t in self.times.items()}
        return StepCosts(found, dict(self.key_seconds), dict(self.key_seconds_of_chains))


class CostFile(_Strict):
    """All entries, the newest last."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    entries: Annotated[tuple[CostEntry, ...], Field(max_length=MAX_ENTRIES)] = ()


def read_costs(path: Path) -> CostFile:
    """Read a file of times; one that does not exist has no entries.

    Raises:
        ConfigError: the file cannot be read, or has what no times can be.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{FLAG}: {path} is larger than {MAX_BYTES >> 20} MiB: it holds no times of steps")
        return CostFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return CostFile()
    except OSError as error:
        raise ConfigError(f"{FLAG}: {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{FLAG}: {path}: {where + ': ' if where else ''}{first['msg']}") from None


def find_costs(file: CostFile, engine: Mapping[str, str]) -> StepCosts | None:
    """Return the times of this engine; None: the file has only others."""
    entry = next((entry for entry in reversed(file.entries) if entry.engine == dict(engine)), None)
    return None if entry is None else entry.costs()


def write_costs(path: Path, file: CostFile, engine: Mapping[str, str], costs: StepCosts) -> None:
    """Add the times of an engine to a file, in place of older ones of the same engine; readers never see half of it.

    Raises:
        ConfigError: the file cannot be written.
    """
    times = {
        size: TimesOfSize(draft_seconds=t.drafts, verify_seconds=t.verifies, chain_seconds=t.chains)
        for size, t in costs.times.items()
    }
    others = [entry for entry in file.entries if entry.engine != dict(engine)]
    of_keys = {"key_seconds": costs.of_key, "key_seconds_of_chains": costs.of_key_in_chain}
    entries = (*others[1 - MAX_ENTRIES :], CostEntry(engine=dict(engine), times=times, **of_keys))
    text = json.dumps(CostFile(entries=entries).model_dump(), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf8") as stream:
                stream.write(text)
            os.replace(unfinished, path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{FLAG}: {path} cannot be written: {error.strerror}") from None
