# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Two devices: each call reaches its own, and leaves the other alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from session_work import close, reference

import xpuruntime as xrt

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(xrt.get_device_count("cuda") < 2, reason="needs two CUDA devices")

ONLY_THE_SECOND = """
import ctypes
import xpuruntime as xrt
pool = xrt.MemoryPool("cuda:1", "caching")
stream = xrt.Stream("cuda:1")
buffer = pool.allocate(1 << 20, stream)
tensor = xrt.Tensor.empty((4, 4), device="cuda:1", stream=stream)
tensor.to("cpu").numpy()
stream.record().synchronize()
del tensor, buffer
pool.empty_cache()
driver = ctypes.CDLL("libcuda.so.1")
flags, active = ctypes.c_uint(), ctypes.c_int()
for device in (0, 1):
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    print(device, active.value)
print(xrt.get_current_device())
"""


def test_working_on_the_second_device_leaves_the_first_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ONLY_THE_SECOND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[:2] == ["0 0", "1 1"], "a context was created on cuda:0"
    assert "cuda:0" in lines[2], "the current device changed"


def test_a_session_on_each_device(wide: Path) -> None:
    x = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
    want = reference(wide, x)
    with (
        xrt.InferenceSession(wide, device="cuda:0", precision="fp32") as first,
        xrt.InferenceSession(wide, device="cuda:1", precision="fp32") as second,
    ):
        for _ in range(3):
            a = first.run({"x": torch.from_numpy(x).to("cuda:0")})["y"]
            b = second.run({"x": torch.from_numpy(x).to("cuda:1")})["y"]
            assert (a.device.index, b.device.index) == (0, 1)
            close(a.cpu(), want)
            close(b.cpu(), want)
        with pytest.raises(xrt.InputError, match="is on cuda:0, but this session runs on cuda:1"):
            second.run({"x": torch.from_numpy(x).to("cuda:0")})
        binding = second.bind({"x": torch.from_numpy(x).to("cuda:1")})
        binding.run()
        close(binding.outputs["y"].cpu(), want)
    assert torch.cuda.current_device() == 0


def test_the_current_device_is_the_callers() -> None:
    xrt.set_current_device("cuda:1")
    try:
        assert torch.cuda.current_device() == 1
        stream = xrt.Stream("cuda:0")
        tensor = xrt.Tensor.empty((8,), device="cuda:0", stream=stream)
        assert tensor.device == "cuda:0"
        assert torch.cuda.current_device() == 1
    finally:
        xrt.set_current_device("cuda:0")


def test_a_profile_sees_both_devices() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("profiled_program.py")), "two_devices"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout.strip().splitlines()[-1])
    assert document["source"] == "cupti", document["notes"]
    assert {
        (interval["device"], interval["in"].split(" ")[0])
        for interval in document["work"]
        if interval["kind"] == "kernel"
    } == {
        (0, "matmul"),
        (1, "matmul"),
    }
    waits = {interval["device"] for interval in document["work"] if interval["kind"] == "wait"}
    assert waits == {0, 1}, document["work"]


def test_beside_pytorch_a_profile_sees_both_devices() -> None:
    tensors = [torch.ones(64, 64, device=device) for device in ("cuda:0", "cuda:1")]
    for tensor in tensors:
        xrt.ops.matmul(tensor, tensor)
    with xrt.profile() as prof:
        for tensor in tensors:
            xrt.ops.matmul(tensor, tensor)
            torch.relu(tensor)
    result = prof.result
    assert result.source == "kineto", result.notes
    named = {range_.id: range_.name for range_ in result.ranges}
    seen = {(one.device, named.get(one.range, "").split(" ")[0]) for one in result.work if one.kind == "kernel"}
    assert {(0, "matmul"), (1, "matmul")} <= seen, seen
