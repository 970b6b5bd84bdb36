# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Times of work on a GPU without what the host does: CUDA graphs over rotated operands, interleaved rounds, events.

A graph holds one call for each set of operands, so that no call finds its data in the cache: the sets together are
several times larger than L2. Nothing is flushed by writing, because dirty lines would be written back at the expense of
the next kernel.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Bytes that the operands of one graph have together, at least: twice the L2 of an H200 and more.
ROTATED = 160 << 20


def sets_for(bytes_of_one: int, most: int = 64) -> int:
    """Return how many sets of operands are rotated, for operands of this size together."""
    return max(2, min(most, -(-ROTATED // max(bytes_of_one, 1))))


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, each run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_times(
    cases: dict[str, Sequence[Callable[[], Any]]], *, rounds: int = 15, milliseconds: float = 4.0
) -> dict[str, list[float]]:
    """Time several cases side by side.

    Parameters
    ----------
    cases : dict of str to sequence of callable
        Of one case, the calls on each set of operands; they are captured in turn into one graph.
    rounds : int
        Each round replays every case, in turn.
    milliseconds : float
        How long a round of one case takes, about.

    Returns
    -------
    dict of str to list of float
        Microseconds a call, one sample a round.
    """
    graphs = {name: (capture(calls), len(calls)) for name, calls in cases.items()}
    replays = {}
    for name, (graph, _) in graphs.items():
        graph.replay()
        replays[name] = max(1, round(milliseconds / max(_elapsed(graph, 2) / 2, 1e-3)))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds):
        for name in _turned(list(cases), turn):
            graph, count = graphs[name]
            samples[name].append(_elapsed(graph, replays[name]) / (replays[name] * count) * 1e3)
    return samples


def _turned(names: list[str], turn: int) -> list[str]:
    """Begin each round with another case: what comes after an idle moment finds a cooler chip."""
    first = turn % len(names)
    return names[first:] + names[:first]


def _elapsed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def call_times(cases: dict[str, Callable[[], Any]], *, rounds: int = 9, calls: int = 10) -> dict[str, list[float]]:
    """Time calls of a millisecond or more, which the host keeps up with, by events; microseconds a call."""
    for call in cases.values():
        call()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds):
        for name in _turned(list(cases), turn):
            call = cases[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / calls * 1e3)
    return samples


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each case."""
    return {name: statistics.median(values) for name, values in samples.items()}


def copy_bandwidth() -> float:
    """Return bytes a second of a device-to-device copy of 2 GiB, read and written counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = call_times({"copy": lambda: target.copy_(source)}, rounds=5, calls=5)
    return 2 * source.numel() / (medians(times)["copy"] * 1e-6)


def matmul_rate() -> float:
    """Return FLOP a second of torch's bf16 product of 8192 x 8192 x 8192 on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = call_times({"mm": lambda: torch.mm(a, b, out=out)}, rounds=5, calls=10)
    return 2 * 8192**3 / (medians(times)["mm"] * 1e-6)
