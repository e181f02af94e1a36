"""A deployment of Ray Serve that is started for a benchmark, on a cluster of its own, and ended with it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmamba.bench.serving.server import StartedServer, python_path
from specmamba.bench.soak.server import ServerProcess, free_port
from specmamba.config import EngineConfig

_END_TIMEOUT_S = 90.0  # the cluster ends with the command


@contextmanager
def ray_deployment(
    config: EngineConfig, num_replicas: int, timeout_s: float, stream_chunk_interval: float = 0.0
) -> Iterator[ServerProcess]:
    """Run ``specmamba deploy`` until the context ends.

    Args:
        config: of each replica's engine.
        num_replicas: they share the CPUs of this machine.
        timeout_s: for its start.
        stream_chunk_interval: as of ``specmamba serve``.

    Raises:
        SpecmambaError: it does not start in time, as where Ray is not installed.
    """
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": python_path(), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        file, key_file, key = Path(folder, "deployment.yaml"), Path(folder, "operator"), secrets.token_hex()
        key_file.write_text(key)
        given = declared(config, num_replicas, key_file, stream_chunk_interval)
        file.write_text(json.dumps(given))  # which is YAML too
        process = subprocess.Popen(
            [sys.executable, "-m", "specmamba", "deploy", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
        server = StartedServer(process, log)
        try:
            yield ServerProcess(server.wait_until_ready(timeout_s), process, server, key)
        finally:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.end()


def declared(
    config: EngineConfig, num_replicas: int, key_file: Path, stream_chunk_interval: float = 0.0
) -> dict[str, Any]:
    """What the file says: the flags that were given, and the CPUs of this machine for the replicas."""
    cpus = (os.cpu_count() or 1) / num_replicas
    flags = config.model_dump(mode="json", include=set(EngineConfig.model_fields), exclude_unset=True)
    model, tp_size = flags.pop("model", None), flags.pop("tp_size", 1)
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())  # replicas run in other folders
    return {
        "name": "bench",
        "ray_address": "local",
        "http": {"port": free_port()},
        "model": model,
        "tp_size": tp_size,
        "replicas": num_replicas,
        "resources": {"replica_cpus": float(int(cpus)) if cpus > 1 else cpus, "ingress_cpus": 0},
        "admin_key_file": str(key_file),
        "flags": {**flags, "disable_log_requests": True, "stream_chunk_interval": stream_chunk_interval},
    }
