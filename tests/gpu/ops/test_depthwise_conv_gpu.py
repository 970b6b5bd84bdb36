# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The depthwise convolution of `cuda_raw`: sizes, windows, strides and layouts beside PyTorch in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from op_work import TOLERANCE, assert_near, depthwise_work, randn, synchronize
from torch.nn import functional

import xpuruntime as xrt
from xpuruntime import KernelPolicy, ops

KERNEL = "cuda_raw.depthwise_conv"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Images that are one tile and several, whole strips and not, and smaller than a window.
SIZES = ((7, 7), (14, 14), (56, 56), (1, 1), (2, 3), (33, 131), (130, 5), (150, 300))
OPTIONS: dict[str, dict[str, Any]] = {
    "same": {"stride": 1},
    "stride 2": {"stride": 2},
    "large padding": {"stride": 1, "padding": 9},
    "stride 2, large padding": {"stride": 2, "padding": (4, 11)},
    "dilated": {"stride": 1, "dilation": 2},
    "strides that differ": {"stride": (2, 1)},
    "stride 3": {"stride": 3},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [(3, 3), (5, 5), (7, 7), (1, 1), (4, 2), (1, 9), (11, 11)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels last"])
def test_windows_sizes_and_options(channels_last: bool, window: tuple[int, int], dtype: torch.dtype) -> None:
    for (height, width), (what, options) in itertools.product(SIZES, OPTIONS.items()):
        dilation = options.get("dilation", 1)
        padding = tuple(dilation * (side - 1) // 2 for side in window)
        given = {"padding": padding, **options}
        pads = given["padding"] if isinstance(given["padding"], tuple) else (given["padding"],) * 2
        sides = zip((height, width), pads, window, strict=True)
        if any(size + 2 * pad < dilation * (side - 1) + 1 for size, pad, side in sides):
            continue
        channels = 6 if height * width > 10000 else 70
        work = depthwise_work(dtype, (2, channels, height, width), window, channels_last, **given)
        work.name = f"{height} x {width}, {what}"
        work.poison()
        work(kernel=KERNEL)
        work.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_alone_and_odd_in_number(dtype: torch.dtype) -> None:
    for channels, batch, last in itertools.product((1, 3, 63, 65, 130), (1, 5), (False, True)):
        for stride in (1, 2):
            work = depthwise_work(dtype, (batch, channels, 12, 13), (3, 3), last, stride=stride)
            work.name = f"{batch} x {channels}, channels last: {last}, stride {stride}"
            work.poison()
            work(kernel=KERNEL)
            work.check()


def _cut(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return a copy of `x` that lies otherwise in memory, in the midst of NaN."""
    n, c, h, w = x.shape
    nan = float("nan")
    if how == "moved by one element":
        flat = torch.full((x.numel() + 1,), nan, device=x.device, dtype=x.dtype)
        view = flat[1:].view(x.shape)
    elif how == "rows apart":
        view = torch.full((n, c, h + 2, w + 3), nan, device=x.device, dtype=x.dtype)[:, :, 1:-1, 1:-2]
    elif how == "columns apart":
        view = torch.full((n, c, h, 2 * w), nan, device=x.device, dtype=x.dtype)[..., ::2]
    elif how == "channels apart":
        view = torch.full((n, h, w, c + 1), nan, device=x.device, dtype=x.dtype)[..., 1:].permute(0, 3, 1, 2)
    elif how == "channels last, more of them":
        view = torch.full((n, h, w, 2 * c), nan, device=x.device, dtype=x.dtype)[..., :c].permute(0, 3, 1, 2)
    else:
        view = torch.full((w, h, c, n), nan, device=x.device, dtype=x.dtype).permute(3, 2, 1, 0)
    view.copy_(x)
    return view


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "how",
    ["moved by one element", "rows apart", "columns apart", "channels apart", "channels last, more of them", "turned"],
)
def test_any_strides_and_alignment(how: str, dtype: torch.dtype) -> None:
    for stride, given, written in itertools.product((1, 2), (False, True), (False, True)):
        work = depthwise_work(dtype, (2, 12, 18, 20), (5, 5), False, stride=stride, padding=2)
        work.name = f"{how}: x {given}, out {written}, stride {stride}"
        whole = work.into["out"]
        if given:
            work.inputs["x"] = _cut(work.inputs["x"], how)
        if written:
            work.into["out"] = _cut(whole, how)
        work.poison()
        work(kernel=KERNEL)
        work.check()


def test_nothing_is_written_beside_the_result() -> None:
    for dtype, last, stride in itertools.product(DTYPES, (False, True), (1, 2)):
        work = depthwise_work(dtype, (2, 6, 13, 15), (3, 3), last, stride=stride)
        n, c, h, w = work.into["out"].shape
        shape = (n, h + 2, w + 2, c + 2) if last else (n, c, h + 2, w + 2)
        around = torch.full(shape, 7.0, device="cuda", dtype=dtype)
        inner = around[:, 1:-1, 1:-1, 2:].permute(0, 3, 1, 2) if last else around[:, :, 1:-1, 1:-1]
        work.into["out"] = inner
        work.poison()
        work(kernel=KERNEL)
        work.check()
        inner.fill_(7.0)
        assert bool((around == 7.0).all()), (dtype, last, stride)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_activation_are_rounded_once(dtype: torch.dtype, activation: str) -> None:
    exact = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }[activation]
    for last, window, biased in itertools.product((False, True), (3, 4), (False, True)):
        x = randn(2, 16, 15, 17, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        weight, bias = randn(16, 1, window, window, dtype=dtype), randn(16, dtype=dtype) if biased else None
        found = ops.conv2d(x, weight, bias, padding=1, groups=16, activation=activation, kernel=KERNEL)
        given = (None if one is None else one.double() for one in (x, weight, bias))
        wanted = exact(functional.conv2d(*given, padding=1, groups=16))
        assert_near(found, wanted, dtype, f"{activation}, channels last: {last}, {window}, bias: {biased}")
        # Small results have to be as exact as large ones; fp32 sums of terms of both signs decide in float32.
        if dtype is not torch.float32:
            close = (found.double() - wanted).abs() <= TOLERANCE[dtype] * wanted.abs() + 1e-5
            assert bool(close.all())


@pytest.mark.parametrize("window", [3, 4])
def test_nan_and_infinity_stay_where_their_window_is(window: int) -> None:
    for last, value in itertools.product((False, True), (float("nan"), float("inf"))):
        x = torch.ones(1, 4, 12, 12, device="cuda")
        x[0, 1, 5, 6] = value
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        weight = torch.ones(4, 1, window, window, device="cuda")
        how = {"padding": 2, "groups": 4}
        found = ops.conv2d(x, weight, activation="relu", kernel=KERNEL, **how)
        wanted = functional.relu(functional.conv2d(x.cpu(), weight.cpu(), **how))
        torch.testing.assert_close(found.cpu(), wanted, equal_nan=True)


def test_empty_arrays() -> None:
    no_image = depthwise_work(torch.float32, (0, 8, 9, 9))
    no_image(kernel=KERNEL)
    no_image.check()
    # PyTorch convolves no image without rows; all that such a window sees is padding.
    x, weight, bias = randn(2, 8, 0, 9), randn(8, 1, 3, 3), randn(8)
    out = ops.conv2d(x, weight, bias, padding=2, groups=8, kernel=KERNEL)
    assert torch.equal(out, bias.view(1, 8, 1, 1).expand(2, 8, 2, 11))


def test_the_same_bits_in_every_run_and_in_a_graph() -> None:
    for window, last in itertools.product((3, 7, 4), (False, True)):
        work = depthwise_work(torch.float32, (4, 40, 28, 28), (window, window), last, stride=1, padding=window // 2)
        work(kernel=KERNEL)
        first = work.into["out"].clone()
        graph = torch.cuda.CUDAGraph()
        synchronize()
        with torch.cuda.graph(graph):
            work(kernel=KERNEL)
        for _ in range(5):
            work.poison()
            graph.replay()
            synchronize()
            assert torch.equal(work.into["out"], first)


def test_it_is_measured_beside_cudnn_and_not_taken_without() -> None:
    work = depthwise_work(torch.float16, (2, 32, 28, 28), (3, 3), False, stride=1)
    del work.inputs["bias"]
    work.run = lambda **given: ops.conv2d(groups=32, padding=1, **given)
    work(policy=KernelPolicy())
    decision = xrt.decisions()[-1]
    passed_over = next(candidate for candidate in decision.candidates if candidate.id == KERNEL)
    assert decision.chosen.startswith("cudnn."), decision.text
    assert "best_performance" in passed_over.reason
    work(policy=KernelPolicy(auto_strategy="best_performance"))
    decision = xrt.decisions()[-1]
    measured = {candidate.id for candidate in decision.candidates if candidate.measured_us is not None}
    assert KERNEL in measured, decision.text
    work(policy=KernelPolicy(conv="cuda_raw"))
    assert xrt.decisions()[-1].chosen == KERNEL
