# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `cuda_raw.depthwise_conv` serves and refuses, asked without a device."""

from __future__ import annotations

from typing import Any

import pytest

from xpuruntime import _core, ops

KERNEL = "cuda_raw.depthwise_conv"
LAST = (768, 1, 96, 8)  # of [2, 8, 8, 12]

pytestmark = pytest.mark.needs_build("cuda")


def answer(capability: tuple[int, int] = (9, 0), dtype: str = "float16", **changed: Any) -> str:
    """Return why the kernel refuses a convolution of 3x3 with these changes, or nothing."""
    shapes: dict[str, Any] = {
        "x": (2, 8, 8, 12), "weight": (8, 1, 3, 3), "bias": (8,), "out": (2, 8, 8, 12),
    }  # fmt: skip
    attributes: dict[str, Any] = {"groups": 8, "stride": (1, 1), "dilation": (1, 1), "padding": (1, 1, 1, 1)}
    operands = {name: {"dtype": dtype, "shape": changed.pop(name, shape)} for name, shape in shapes.items()}
    for name, more in changed.pop("operands", {}).items():
        operands[name] |= more
    desc = {"op": "conv", "device": changed.pop("device", "cuda:0"), "operands": operands}
    desc["attributes"] = attributes | changed
    found = _core.KernelRegistry.instance().supports(desc, compute_capability=capability)
    ((_, fits, reason),) = (one for one in found if one[0] == KERNEL)
    assert fits == (not reason)
    return str(reason)


@pytest.mark.parametrize(
    "served",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "capability": (8, 0)},
        {"activation": "gelu_tanh"},
        {"stride": (2, 3), "dilation": (4, 1), "padding": (9, 0, 0, 7)},
        {"weight": (8, 1, 11, 4)},
        {"operands": {"x": {"strides": LAST}, "out": {"strides": LAST}}},
        {"operands": {"x": {"strides": (4000, 500, 40, 3)}, "weight": {"strides": (1, 1, 24, 8)}}},
        {"operands": {"x": {"alignment": 2}, "out": {"alignment": 2}}},
        {"x": (0, 8, 8, 12), "out": (0, 8, 8, 12)},
        {"x": (2, 1, 8, 12), "weight": (1, 1, 3, 3), "bias": (1,), "out": (2, 1, 8, 12), "groups": 1},
    ],
)
def test_is_served(served: dict[str, Any]) -> None:
    assert not answer(**served)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({"dtype": "float64"}, "not float64"),
        ({"capability": (7, 5)}, "7.x and this kernel needs 8.0"),
        ({"groups": 1, "weight": (8, 8, 3, 3)}, "8 channels in 1 groups and 8 filters"),
        ({"weight": (16, 1, 3, 3), "bias": (16,), "out": (2, 16, 8, 12)}, "8 groups and 16 filters"),
        ({"operands": {"weight": {"dtype": "float32"}}}, "'weight' is float32 and x is float16"),
        ({"operands": {"out": {"alignment": 1}}}, "'out' is not aligned to its own element of 2 bytes"),
        ({"device": "cpu"}, "another kind of device"),
    ],
)
def test_is_refused_with_the_reason(refused: dict[str, Any], said: str) -> None:
    assert said in answer(**refused)


def test_it_is_listed_and_named_by_its_backend() -> None:
    (row,) = (kernel for kernel in ops.kernels("conv") if kernel.id == KERNEL)
    assert row.automatic
    assert "3x3, 5x5 and 7x7" in row.limits
    assert _core.KernelRegistry.instance().find("conv", "cuda_raw") == [KERNEL]
