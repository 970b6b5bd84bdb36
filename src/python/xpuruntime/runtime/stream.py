# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Streams, events and CUDA graphs, and tensors: the memory of arrays of any library, shared without a copy.

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

from typing import Any

from xpuruntime._core import Event, Graph, GraphCapture, GraphUpdate, Stream, StreamManager, Tensor
from xpuruntime.errors import InputError

__all__ = [
    "Event",
    "Graph",
    "GraphCapture",
    "GraphUpdate",
    "Stream",
    "StreamManager",
    "Tensor",
    "as_tensor",
]


def as_tensor(array: Any, *, stream: Any = None) -> Tensor:
    """Return a tensor on the memory of any array. Never copies."""
    import numpy as np

    if isinstance(array, Tensor):
        if stream is not None and array.device != "cpu":
            array.make_wait(stream)
        return array
    if isinstance(array, np.ndarray):
        return Tensor.from_numpy(array)
    if hasattr(array, "__dlpack__"):
        return Tensor.from_dlpack(array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return Tensor.from_cuda_array_interface(array, stream=stream)
    msg = (
        f"an object of type {type(array).__name__} is no array: pass one of NumPy, PyTorch, CuPy or JAX, or call "
        "numpy.asarray first"
    )
    raise InputError(msg)
