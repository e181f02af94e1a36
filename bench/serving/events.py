"""The events of a streamed answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Iterate over the JSON objects of server-sent events, without ``[DONE]``, as they arrive."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
