# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`DeviceSpec`."""

from __future__ import annotations

import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import DeviceSpec, ExecutionPolicy


@pytest.mark.parametrize(
    ("text", "kind", "index"),
    [
        ("cpu", "cpu", None),
        ("cuda", "cuda", None),
        ("cuda:0", "cuda", 0),
        ("cuda:99", "cuda", 99),
        ("gpu:1", "gpu", 1),
        ("npu", "npu", None),
        ("rocm:0", "rocm", 0),
        ("metal", "metal", None),
        ("dml:1023", "dml", 1023),
        ("auto", "auto", None),
    ],
)
def test_devices(text, kind, index):
    spec = DeviceSpec.parse(text)
    assert (spec.kind, spec.index, str(spec)) == (kind, index, text)
    assert spec == DeviceSpec(kind=kind, index=index)
    assert ExecutionPolicy(device=spec).device == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:-1", "'cuda:-1' is not a device: its index is negative; write 'cuda:0' for the first"),
        (
            "cuda:x",
            "'cuda:x' is not a device: its index is 'x', which is not a whole number; write 'cuda:0' for the first",
        ),
        ("cuda:", "'cuda:' is not a device: its index is '', which is not a whole number"),
        ("cuda:00", "'cuda:00' is not a device: its index is '00', which is not a whole number"),
        ("cuda: 0", "'cuda: 0' is not a device: its index is ' 0', which"),
        ("cuda:٣", "'cuda:٣' is not a device: its index is '٣', which"),
        ("cuda:1024", "'cuda:1024' is not a device: its index is above 1023"),
        ("cuda:1:2", "'cuda:1:2' is not a device: its index is '1:2'"),
        ("cuda:" + "9" * 10_000, "'cuda:999"),
        (
            "cudda:0",
            "'cudda:0' is not a device; did you mean 'cuda:0'? Valid kinds: cpu, cuda, gpu, npu, rocm, metal, dml, auto.",  # noqa: E501
        ),
        ("CUDA:0", "'CUDA:0' is not a device; did you mean 'cuda:0'?"),
        ("GPU", "'GPU' is not a device; did you mean 'gpu'?"),
        ("tpu", "'tpu' is not a device; did you mean '"),
        ("quantum", "'quantum' is not a device. Valid kinds: cpu,"),
        ("", "'' is not a device. Valid kinds: cpu,"),
        ("cpu:0", "'cpu:0' is not a device: 'cpu' takes no index; write 'cpu'"),
        ("auto:1", "'auto:1' is not a device: 'auto' takes no index; write 'auto'"),
        (0, "expected text such as 'cpu' or 'cuda:0', got int 0"),
        (None, "expected text such as 'cpu' or 'cuda:0', got NoneType None"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(PolicyError) as error:
        DeviceSpec.parse(text)
    assert str(error.value).startswith(message), str(error.value)
    assert len(str(error.value)) < 300


def test_constructor_refusals():
    with pytest.raises(PolicyError, match=r"DeviceSpec\.index: 'cpu' takes no index; write 'cpu'"):
        DeviceSpec(kind="cpu", index=0)
    with pytest.raises(
        PolicyError, match=r"DeviceSpec\.kind: 'cudda' is not a valid value; did you mean 'cuda'\? Valid kinds:"
    ):
        DeviceSpec(kind="cudda")
    with pytest.raises(PolicyError, match="DeviceSpec: needs 'kind'"):
        DeviceSpec(index=1)
