"""Addresses of OpenAI's interface that this server does not have, and why."""

from __future__ import annotations

# By their first segments. Status 404, as for every other address without a route: clients try a 501 again.
_REASONS = {
    "embeddings": "gives no embeddings: it serves models that write text",
    "images": "makes no images: it serves models that write text",
    "videos": "makes no videos: it serves models that write text",
    "audio": "neither hears nor speaks: it serves models that write text",
    "realtime": "neither hears nor speaks: it serves models that write text",
    "moderations": "has no model that judges texts",
    "files": "stores no files: send texts in the request",
    "uploads": "stores no files: send texts in the request",
    "batches": "takes no files of requests: send the requests themselves, it batches what runs at a time",
    "fine_tuning": "does not train: see specmamba train for draft heads",
    "assistants": "stores no conversations: send them whole to /v1/chat/completions or /v1/responses",
    "threads": "stores no conversations: send them whole to /v1/chat/completions or /v1/responses",
    "conversations": "stores no conversations: send them whole to /v1/chat/completions or /v1/responses",
    "vector_stores": "stores no texts to search in",
}


def why_unserved(path: str) -> str | None:
    """A sentence for an address of OpenAI's that is not served; None: it is none of them."""
    version, _, rest = path.removeprefix("/").partition("/")
    name = rest.partition("/")[0]
    if version == "v1" and name in _REASONS:
        return f"/v1/{name}: this server {_REASONS[name]}"
    stored = next((place for place in ("/v1/responses", "/v1/chat/completions") if path.startswith(f"{place}/")), None)
    return None if stored is None else f"{stored}: this server stores no answers, so that it can give none again"
