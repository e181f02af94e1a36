"""GET /events: server-sent events that feed the live page.

``hello`` once, then ``stats`` a few times a second, ``draft`` and ``tree`` when there is something new, ``busy`` while
the engine is in a long step, and ``end`` when it has stopped. The data of each is a JSON object.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specmamba.server.live_feed import Feed, Listener
from specmamba.server.service import Service
from specmamba.server.streams import until_client_gone


def event_routes(service: Service) -> APIRouter:
    """The route asks for the key like any other: it tells what is drafted."""
    router = APIRouter(include_in_schema=False)
    feed = Feed(service)

    @router.get("/events")
    async def events() -> Response:
        return LiveStream(feed)

    return router


class LiveStream(Response):
    """Events until the engine stops or the client goes."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = self._feed.join()  # here, so that who joins leaves, whatever happens; its error is answered
        try:
            await until_client_gone(receive, asyncio.create_task(self._send_all(listener, send)))
        finally:
            self._feed.leave(listener)

    async def _send_all(self, listener: Listener, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for name, data in listener:
            body = f"event: {name}\ndata: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
