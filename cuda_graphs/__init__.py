"""Fixed input buffers, batch-size buckets, capture and replay of functions that use them. Independent of requests."""

from specmamba.cuda_graphs.host_reads import DirectRead, HostRead
from specmamba.cuda_graphs.native_replay import NativeReplay
from specmamba.cuda_graphs.replay import CaptureCost, EagerReplay, GraphReplay, NextPart, Replay
from specmamba.cuda_graphs.step_buffers import Columns, Queue, at_once, bucket_for, bucket_sizes
from specmamba.cuda_graphs.watch import StepWatch

__all__ = [
    "CaptureCost",
    "Columns",
    "DirectRead",
    "EagerReplay",
    "GraphReplay",
    "HostRead",
    "NativeReplay",
    "NextPart",
    "Queue",
    "Replay",
    "StepWatch",
    "at_once",
    "bucket_for",
    "bucket_sizes",
]
