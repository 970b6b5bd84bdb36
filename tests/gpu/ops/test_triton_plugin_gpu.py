# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The Triton kernel of the example package, on a device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_work import keep_busy, on

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.ops import plugins
from xpuruntime.policies import KernelPolicy
from xpuruntime.runtime.stream import Graph, Stream
from xpuruntime.testing import TorchArrays, check_kernel

KERNEL = "example_triton.layer_norm"
SOURCES = Path(__file__).resolve().parents[3] / "examples" / "kernel_plugin" / "src"


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    pytest.importorskip("triton", reason="the example's Triton kernel needs Triton")
    sys.path.insert(0, str(SOURCES))
    from example_kernels.triton_layer_norm import TritonBackend, TritonLayerNorm

    plugins.register(TritonBackend(), TritonLayerNorm())
    yield
    _core.KernelRegistry.instance().remove("example_triton")
    sys.path.remove(str(SOURCES))


def operands(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    x, weight, bias = (
        torch.randn(*shape, device="cuda").to(dtype) for shape in ((rows, columns), (columns,), (columns,))
    )
    torch.cuda.synchronize()
    return x, weight, bias


def assert_right(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    torch.cuda.synchronize()
    want = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double())
    torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2**-5)


def last() -> dict[str, Any]:
    return _core.Dispatcher.instance().decisions()[-1]


def test_it_is_listed() -> None:
    import triton

    (listed,) = (kernel for kernel in xrt.ops.kernels("layer_norm") if kernel.id == KERNEL)
    assert (listed.available, listed.device_type) == (True, "cuda"), listed.reason
    assert listed.version.endswith(f"triton {triton.__version__}")


def test_it_passes_the_list_of_op_cases() -> None:
    refused = ["*/float64", "*/columns-apart/*", "*/transposed/*", "*/very-wide/*", "*/residual*/*"]
    refused += ["*/no-weight-residual/*"]
    assert len(check_kernel(KERNEL, refused, arrays=TorchArrays("cuda"))) > 50


def test_it_runs_on_the_stream_that_it_is_given() -> None:
    """In the order of that stream, which is busy, and beside the default stream."""
    x, weight, bias = operands(64, 1000)
    fresh = torch.randn_like(x)
    out = torch.full_like(x, float("nan"))
    xrt.ops.layer_norm(x, weight, bias, out=out, kernel=KERNEL)  # compiled now
    assert_right(out, x, weight, bias)
    stream = Stream("cuda:0")
    with on(stream):
        keep_busy(stream)
        x.copy_(fresh)
        xrt.ops.layer_norm(x, weight, bias, out=out, kernel=KERNEL)
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "it waits on the host"
    stream.synchronize()
    assert_right(out, fresh, weight, bias)


def test_it_is_captured_into_a_graph_unprepared_and_prepared() -> None:
    for columns in (1536, 1536):
        x, weight, bias = operands(33, columns, torch.float16)
        out = torch.full_like(x, float("nan"))
        stream, graph = Stream("cuda:0"), Graph()
        with on(stream), graph.capture(stream):
            xrt.ops.layer_norm(x, weight, bias, out=out, kernel=KERNEL)
        torch.cuda.synchronize()
        assert out.isnan().all(), "nothing ran yet"
        for _ in range(3):
            with on(stream):
                x.normal_()
            graph.replay(stream)
            stream.synchronize()
            assert_right(out, x, weight, bias)


def test_it_is_measured_beside_the_others() -> None:
    x, weight, bias = operands(2048, 4096)
    out = xrt.ops.layer_norm(x, weight, bias, policy=KernelPolicy(auto_strategy="best_performance"))
    assert_right(out, x, weight, bias)
    decision = last()
    assert decision["source"] == "tuned", decision["text"]
    times = {
        candidate["id"]: candidate["measured_us"]
        for candidate in decision["candidates"]
        if candidate["measured_us"] is not None
    }
    assert {KERNEL, "cuda_raw.layer_norm"} <= set(times), decision["text"]
    assert all(0 < time < 10_000 for time in times.values())


def test_policies_name_it_and_what_it_cannot_do_is_said() -> None:
    x, weight, bias = operands(5, 96)
    out = xrt.ops.layer_norm(x, weight, bias, policy={"mode": "strict", "kernels": {"layer_norm": KERNEL}})
    assert_right(out, x, weight, bias)
    assert (last()["chosen"], last()["source"]) == (KERNEL, "pinned")
    for call, said in (
        (lambda: xrt.ops.layer_norm(x, residual=x, kernel=KERNEL), "it adds no residual"),
        (lambda: xrt.ops.layer_norm(x.double(), kernel=KERNEL), "and this is float64"),
        (lambda: xrt.ops.layer_norm(x.T, kernel=KERNEL), "the elements of x must lie next to each other"),
        (
            lambda: xrt.ops.layer_norm(x.view(-1)[1:97], kernel=KERNEL),
            "the address of x must be a multiple of 16 bytes",
        ),
        (lambda: xrt.ops.layer_norm(x.new_ones(2, 16385), kernel=KERNEL), "up to 16384 columns, and these are 16385"),
        (lambda: xrt.ops.layer_norm(x.cpu(), kernel=KERNEL), "serves cuda, and the operands are on cpu"),
    ):
        with pytest.raises(xrt.UnsupportedOperationError, match=said):
            call()


def test_sixteen_threads() -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            stream = Stream("cuda:0")
            with on(stream):
                for columns in (128, 128 + 8 * (index % 4)):
                    x = torch.randn(17, columns, device="cuda")
                    weight, bias = torch.randn(2, columns, device="cuda")
                    weight, bias = weight.clone(), bias.clone()
                    out = xrt.ops.layer_norm(x, weight, bias, kernel=KERNEL)
                    stream.synchronize()
                    want = torch.nn.functional.layer_norm(x.double(), (columns,), weight.double(), bias.double())
                    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
                    stream.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_more_elements_than_32_bits_count() -> None:
    columns = 4096
    rows = 2**31 // columns + 5
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.float16)
    x[-3:].normal_()
    x[:3].normal_()
    out = torch.full_like(x, float("nan"))
    xrt.ops.layer_norm(x, out=out, kernel=KERNEL)
    torch.cuda.synchronize()
    for part in (slice(0, 3), slice(rows - 3, rows)):
        want = torch.nn.functional.layer_norm(x[part].double(), (columns,))
        torch.testing.assert_close(out[part].double(), want, rtol=2**-9, atol=2**-9)
    assert not out[rows // 2 :].isnan().any()
