# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Programs for processes of their own: what a profile sees without PyTorch, and beside it. Each prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import xpuruntime as xrt


def work() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    a = xrt.Tensor.from_numpy(rng.standard_normal((256, 512)).astype(np.float32)).to("cuda:0")
    b = xrt.Tensor.from_numpy(rng.standard_normal((512, 128)).astype(np.float32)).to("cuda:0")
    return a, b


def told(prof: xrt.profile) -> dict[str, Any]:
    result = prof.result
    names = {range_.id: range_.name for range_ in result.ranges}
    return {
        "source": result.source,
        "notes": list(result.notes),
        "ranges": [range_.name for range_ in result.ranges],
        "dropped": result.dropped,
        "span": [prof.result._recording.start_ns, prof.result._recording.end_ns],
        "work": [{**one._asdict(), "in": names.get(one.range, "")} for one in result.work],
        "calls": [call._asdict() for call in result.calls],
    }


def alone() -> dict[str, Any]:
    a, b = work()
    xrt.ops.matmul(a, b)
    with xrt.profile() as prof:
        for _ in range(3):
            xrt.ops.matmul(a, b)
        with prof.range("copies"):
            host = np.ones(1 << 20, np.float32)
            xrt.Tensor.from_numpy(host).to("cuda:0").to("cpu")
        xrt.synchronize()
    assert "torch" not in sys.modules
    return told(prof)


def twice_and_then_torch() -> dict[str, Any]:
    a, b = work()
    for _ in range(2):
        with xrt.profile() as prof:
            xrt.ops.matmul(a, b)
    found = told(prof)
    import torch

    x = torch.ones(256, 256, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as theirs:
        torch.mm(x, x)
        torch.cuda.synchronize()
    kernels = [event.name for event in theirs.events() if str(event.device_type).endswith("CUDA")]
    with xrt.profile() as beside:
        torch.mm(x, x)
    return {**found, "torch kernels": kernels, "beside": told(beside)}


def limited() -> dict[str, Any]:
    a, b = work()
    with xrt.profile(limit=4) as prof:
        for _ in range(20):
            xrt.ops.matmul(a, b)
    return told(prof)


def graph() -> dict[str, Any]:
    a, b = work()
    out = xrt.ops.matmul(a, b)
    stream = xrt.Stream("cuda:0")
    for one in (a, b, out):
        one.order_on(stream)
    captured = xrt.Graph()
    with captured.capture(stream):
        xrt.ops.matmul(a, b, out=out, stream=stream)
    with xrt.profile() as prof:
        captured.replay(stream)
        stream.synchronize()
    return told(prof)


def memory() -> dict[str, Any]:
    direct, pinned = xrt.MemoryPool("cuda:0", "direct"), xrt.MemoryPool("cuda:0", "pinned")
    stream = xrt.Stream("cuda:0")
    pageable = xrt.Tensor.from_numpy(np.ones(1 << 18, np.float32))
    device = xrt.Tensor.from_numpy(np.ones(1 << 19, np.float32)).to("cuda:0", stream=stream)
    fixed = xrt.Tensor.empty((1 << 19,), pool=pinned)
    stream.synchronize()
    with xrt.profile() as prof:
        with prof.range("pageable"):
            pageable.to("cuda:0", stream=stream)
            stream.synchronize()
        with prof.range("pinned"):
            fixed.copy_(device, stream=stream)
            stream.synchronize()
        with prof.range("allocates"):
            buffer = direct.allocate(3 << 20, stream)
            del buffer
            stream.synchronize()
    return told(prof)


def two_devices() -> dict[str, Any]:
    host = np.ones((64, 64), np.float32)
    tensors = [xrt.Tensor.from_numpy(host).to(device) for device in ("cuda:0", "cuda:1")]
    for tensor in tensors:
        xrt.ops.matmul(tensor, tensor)
    with xrt.profile() as prof:
        for number, tensor in enumerate(tensors):
            with prof.range(f"on {number}"):
                xrt.ops.matmul(tensor, tensor)
        for tensor in tensors:
            xrt.synchronize(tensor.device)
    return told(prof)


def watched_by_ncu() -> dict[str, Any]:
    a, b = work()
    xrt.ops.matmul(a, b)
    with xrt.profile() as prof:
        xrt.ops.matmul(a, b)
        with prof.range("the one to look at"):
            xrt.ops.matmul(a, b)
        xrt.synchronize()
    return told(prof)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
