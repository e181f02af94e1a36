"""What runs in the actor of a replica: the program of every replica, over a connection to the server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from specmamba.config import EngineConfig
from specmamba.errors import SpecmambaError


class EngineActor:
    """A replica on any machine of the cluster. Its process does nothing else."""

    def run(self, given: Mapping[str, Any], address: tuple[str, int], key: bytes) -> int:
        """Connect to the server and be a replica until it ends. Returns the exit status.

        Args:
            given: as ``replica_launch.given_to``; ``facts``: those of the server (``start.facts_of``), which must be
                those of this machine, and ``cpus`` on a CPU, for which it has its share of the machine's memory.
            address: where the server listens for this replica.
            key: that both prove to each other.

        Raises:
            OSError: the server is not reached, or has another key.
        """
        from specmamba.cluster.signed_messages import connect
        from specmamba.replicas.replica_main import run_replica

        link = connect(*address, key)
        link.send({"pid": os.getpid()})
        try:
            if (other := _other_fact(given)) is not None:
                link.send({"failed": f"the machine {socket.gethostname()} has another {other} than the server"})
                return 1
        except SpecmambaError as error:
            link.send({"failed": f"the machine {socket.gethostname()}: {error}"})
            return 1
        flags = dict(given["flags"])
        if given["cpus"] is not None:
            flags["mem_fraction_static"] = share_of_memory(flags, given["cpus"], _cpus_of_node())
        return run_replica({**given, "flags": flags}, link)


def share_of_memory(flags: Mapping[str, Any], cpus: float, cpus_of_node: float) -> float:
    """``--mem-fraction-static`` of a replica on a CPU: its part of the machine's is that of the CPUs which it has."""
    whole = EngineConfig(**flags).on_device("cpu").mem_fraction_static
    return whole * min(1.0, cpus / cpus_of_node)


def _other_fact(given: Mapping[str, Any]) -> str | None:
    """What is not the same here as on the server's machine, or None. Raises CheckpointError: no checkpoint is here."""
    from specmamba.engine.mirror.start import facts_of

    facts = facts_of(EngineConfig(**given["flags"]))
    return next((what for what, value in given["facts"].items() if facts.get(what) != value), None)


def _cpus_of_node() -> float:
    """The CPUs that Ray counts on this machine."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next((float(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["NodeID"] == own), 1.0)
