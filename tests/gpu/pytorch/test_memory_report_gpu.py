# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`memory_report` on a CUDA device: every byte has one holder, and the rest is said."""

from __future__ import annotations

import gc

import torch

import xpuruntime.pytorch as xt
from xpuruntime._core import MemoryPool

MIB = 1 << 20


def device_of(report):
    (result,) = [device for device in report.devices if device.device == "cuda:0"]
    return result


def holder(report, owner):
    (result,) = [holder for holder in device_of(report).holders if holder.owner == owner]
    return result


def test_no_byte_is_counted_twice() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    pool = MemoryPool("cuda:0", name="reported")
    mine = pool.allocate(32 * MIB)
    outside = torch.ones(16 * MIB, device="cuda")
    with xt.set_allocator(pool=pool):
        inside = torch.ones(16 * MIB, device="cuda")
        report = xt.memory_report()
        ours, theirs = holder(report, "reported"), holder(report, "PyTorch")
        (part,) = ours.parts
        assert part.what == "PyTorch, by set_allocator"
        assert 64 * MIB <= part.bytes <= ours.in_use - mine.nbytes
        parts = [one for holder in device_of(report).holders for one in holder.parts if one.what == part.what]
        assert theirs.held + sum(one.bytes for one in parts) == torch.cuda.memory_reserved()
        assert theirs.in_use >= outside.nbytes
        assert theirs.in_use + inside.nbytes <= torch.cuda.memory_allocated()
    device = device_of(report)
    assert device.total - device.free == device.unexplained + sum(one.held for one in device.holders)
    assert device.unexplained > 0  # at least the context


def test_the_text_and_the_data() -> None:
    kept = torch.ones(MIB, device="cuda")
    report = xt.memory_report("cuda")
    text = str(report)
    assert [device.device for device in report.devices] == ["cuda:0"]
    assert "caching allocator" in text
    assert "unexplained" in text
    assert report.to_dict()["devices"][0]["total"] == torch.cuda.mem_get_info(0)[1]
    assert kept.is_cuda


def test_a_graph_is_told_apart() -> None:
    static = torch.ones(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static + 1
    parts = {part.what: part.bytes for part in holder(xt.memory_report(), "PyTorch").parts}
    assert parts["pools of CUDA graphs and of users"] >= out.nbytes


def test_pinned_memory_is_on_the_host() -> None:
    pool = MemoryPool("cuda:0", "pinned", name="pinned for the report")
    buffer = pool.allocate(4 * MIB)
    report = xt.memory_report()
    assert not [one for one in device_of(report).holders if one.owner == pool.name]
    (host,) = [device for device in report.devices if device.device == "cpu"]
    assert [one.in_use for one in host.holders if one.owner == pool.name] == [pool.stats().current]
    assert buffer.nbytes == 4 * MIB
