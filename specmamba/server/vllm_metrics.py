"""Speculation under the names that vLLM gives it, for tools that read those (``--metrics-compat vllm``).

Such tools take one plus accepted tokens per draft for the acceptance length. That is what
``specmamba_spec_accept_length`` says where every step has a draft; steps that find nothing to draft (n-grams), or are
to have none, count only there.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from specmamba.core import SpecStats
from specmamba.server.engine_metrics import spec_counters

_OURS, _THEIRS = "specmamba_spec_decode", "vllm:spec_decode"


def vllm_counters(spec: SpecStats, model_name: str) -> Iterator[Metric]:
    """The counters of speculation once more, with vLLM's names and labels."""
    labels = {"model_name": model_name, "engine": "0"}
    for ours in spec_counters(spec):
        theirs = CounterMetricFamily(ours.name.replace(_OURS, _THEIRS), ours.documentation)
        for sample in ours.samples:
            theirs.add_sample(theirs.name + "_total", {**labels, **sample.labels}, sample.value)
        yield theirs
