# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Streams, events and CUDA graphs.

A `Stream` is an in-order queue of work on a device, an `Event` a point in it, and a `Graph` work recorded from it, to
be launched again as a whole::

    stream = Stream("cuda:0")
    graph = Graph()
    with graph.capture(stream):
        output.copy_(input, stream=stream)
    start = stream.record(timing=True)
    graph.replay(stream)
    end = stream.record(timing=True)
    end.synchronize()
    print(start.elapsed_us(end))

CPU streams do their work at once, so the same program runs on a machine without a GPU; only `Graph` has nothing to
record there, and says so.
"""

from __future__ import annotations

from xpuruntime._core import Event, Graph, GraphCapture, GraphUpdate, Stream, StreamManager

__all__ = ["Event", "Graph", "GraphCapture", "GraphUpdate", "Stream", "StreamManager"]
