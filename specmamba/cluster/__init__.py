"""Replicas on the machines of a Ray cluster: ``serve run specmamba.cluster:app`` (docs/scaling.md).

Needs ``specmamba[scale]``. Ray is imported where it is used, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(args: Mapping[str, Any]) -> Application:
    """Build the application of Ray Serve, which calls this with the arguments of ``serve run`` or of its YAML file.

    Args:
        args: flags of ``specmamba serve`` without their hyphens (``dp_size`` or ``dp-size``), and those of
            ``ClusterConfig``.

    Raises:
        ConfigError: a flag, a value or a combination is not valid.
    """
    from specmamba.cluster.ingress import bound_application

    return bound_application(args)
