"""/replicas: for the operator alone, and only where there are replicas."""

from __future__ import annotations

import pytest

from specmamba.engine.replica_control import ReplicaStatus
from specmamba.errors import ReplicaStateError
from tests.fake_engine import FakeEngine, serving

CALLS = [("GET", "/replicas"), ("POST", "/replicas/0/drain"), ("POST", "/replicas/0/resume")]


class Control:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float | None, int | None]] = []

    def statuses(self) -> list[ReplicaStatus]:
        return [self._status(0)]

    def _status(self, index: int) -> ReplicaStatus:
        return ReplicaStatus(index, "draining", True, 3, 77, 2, 64)

    def drain(self, index: int, timeout_s: float | None, generation: int | None = None) -> ReplicaStatus:
        if index:
            raise ReplicaStateError("no replica but 1 is ready")
        self.told.append(("drain", index, timeout_s, generation))
        return self._status(index)

    def resume(self, index: int) -> ReplicaStatus:
        self.told.append(("resume", index, None, None))
        return self._status(index)


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_without_replicas(method: str, path: str) -> None:
    with serving() as served:
        answer = served.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_replicas")


def test_the_operator_alone_may_call() -> None:
    engine = FakeEngine()
    engine.replicas = control = Control()
    with serving(engine, api_key=["one"], admin_key="all") as served:
        for method, path in CALLS:
            refused = served.http.request(method, path, headers={"Authorization": "Bearer one"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")
            assert served.http.request(method, path).status_code == 401
        assert control.told == []
        http, headers = served.http, {"Authorization": "Bearer all"}
        card = {"id": 0, "state": "draining", "held": True, "generation": 3, "pid": 77}
        card |= {"num_requests": 2, "queued_tokens": 64, "reason": None}
        assert http.get("/replicas", headers=headers).json() == {"replicas": [card]}
        assert http.post("/replicas/0/drain", headers=headers).json() == card
        assert http.post("/replicas/0/drain?timeout=2.5&generation=3", headers=headers).json() == card
        assert http.post("/replicas/0/resume", headers=headers).json() == card
        assert control.told == [("drain", 0, None, None), ("drain", 0, 2.5, 3), ("resume", 0, None, None)]
        refused = http.post("/replicas/0/drain?generation=0", headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "generation")
        refused = http.post("/replicas/1/drain", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "replica_state")
        assert "no replica but 1 is ready" in refused.json()["error"]["message"]
        unknown = http.post("/replicas/0/drain?timeouts=2", headers=headers)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "timeouts")
