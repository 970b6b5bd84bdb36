# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What operations allocate, what happens when they cannot, and results of more than 2^31 elements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_work import WORKS, assert_near, exact_attention, exact_norm, make_work, norm_backward_work, refusal
from torch_work import warm_up

import xpuruntime as xrt
from xpuruntime import OutOfMemoryError, Stream, Tensor, _core, ops

#: Gradients of weights are always made anew.
INTO = [name for name in WORKS if name not in ("layer_norm_backward", "rms_norm_backward")]
MANY = 2**31


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


def counts() -> tuple[int, int, int]:
    stats = xrt.MemoryManager.instance().get_stats("cuda:0")
    return torch.cuda.memory_stats()["allocation.all.allocated"], stats.total_allocations, stats.upstream_allocations


@pytest.mark.parametrize("name", INTO)
def test_a_hundred_calls_allocate_nothing(name: str) -> None:
    work = make_work(name)
    work()
    before = counts()
    for _ in range(100):
        work()
    assert counts() == before
    torch.cuda.synchronize()
    assert counts() == before


def test_gradients_of_weights_are_all_that_is_allocated() -> None:
    work = make_work("layer_norm_backward")
    work()
    allocated, ours, upstream = counts()
    for _ in range(100):
        work()
    assert counts() == (allocated + 100, ours, upstream)


def test_results_of_our_tensors_come_from_the_cache_of_the_pool() -> None:
    work = make_work("matmul")
    given = {key: Tensor.from_dlpack(value) for key, value in work.inputs.items()}
    work.run(**given)
    _, ours, upstream = counts()
    for _ in range(100):
        work.run(**given)
    assert counts()[1:] == (ours + 100, upstream)


@pytest.fixture
def no_scratch_memory() -> Iterator[Any]:
    """Leave our pool of the device no room for more."""
    torch.cuda.synchronize()
    gc.collect()
    pool = xrt.MemoryManager.instance().default_pool("cuda:0")
    _core.Dispatcher.instance().clear_workspaces()
    pool.empty_cache()
    pool.limit = max(pool.stats().reserved, 1)
    yield pool
    pool.limit = None


def test_no_room_for_scratch_memory(no_scratch_memory: Any) -> None:
    work = norm_backward_work(False, 4096, 1024)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream), pytest.raises(OutOfMemoryError) as caught:
            work()
        assert caught.value.device == "cuda:0"
        assert isinstance(caught.value, MemoryError)
    small = make_work("rms_norm")  # needs none
    small()
    small.check()
    no_scratch_memory.limit = None
    with torch.cuda.stream(stream):
        work()
    work.check()


def test_no_room_for_scratch_memory_in_a_capture() -> None:
    """Graphs take theirs from the device itself, whatever the pool has left."""
    work = norm_backward_work(False, 4096, 1024)
    work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    work.poison()
    graph.replay()
    work.check()


def test_no_room_for_a_result_of_ours(no_scratch_memory: Any) -> None:
    work = make_work("rms_norm")
    given = {key: Tensor.from_dlpack(value) for key, value in work.inputs.items()}
    with pytest.raises(OutOfMemoryError):
        work.run(**given)
    no_scratch_memory.limit = None
    out, _ = work.run(**given)
    assert_near(torch.from_dlpack(out), work.want(**work.inputs)["out"], work.dtype, "after")


def test_no_room_for_a_result_of_pytorch() -> None:
    x = torch.ones(1 << 20, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 128\.00 MiB"):
            ops.rms_norm(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    out = ops.rms_norm(x)
    assert_near(out, torch.ones_like(x).double(), x.dtype, "after")


def room(gigabytes: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    assert free > gigabytes << 30, f"this test needs {gigabytes} GiB of the device"


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _core.Dispatcher.instance().clear_workspaces()


def large(*shape: int) -> torch.Tensor:
    assert torch.Size(shape).numel() > MANY
    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("rms", [False, True])
def test_norms_of_many_elements(rms: bool) -> None:
    room(18)
    columns = 4096
    x = large(MANY // columns + 8, columns)
    weight = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
    ends = [slice(0, 8), slice(-8, None)]
    if rms:
        out, rstd = ops.rms_norm(x, weight, return_stats=True)
        stats = (rstd,)
    else:
        out, mean, rstd = ops.layer_norm(x, weight, weight * 0, return_stats=True)
        stats = (mean, rstd)
    for rows in ends:
        exact = exact_norm(rms, x[rows].double(), weight.double(), None)
        assert_near(out[rows], exact, x.dtype, f"rows {rows}")
    # The gradient that arrives is the output itself.
    backward = ops.rms_norm_backward if rms else ops.layer_norm_backward
    grads = backward(out, x, *stats, weight, grad_x=out)
    for rows in ends:
        leaf = x[rows].double().requires_grad_()
        exact = exact_norm(rms, leaf, weight.double(), None)
        (want,) = torch.autograd.grad(exact, leaf, exact.detach())
        error = (grads[0][rows].double() - want).abs().max().item()
        assert error < 2**-5, f"gradient of rows {rows}: off by {error:g}"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kernel", ["cublas.cublasLt", "cublas.cublas"])
def test_products_of_many_elements(kernel: str) -> None:
    room(6)
    m, n, k = 65_544, 32_776, 16
    assert m * n > MANY
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(k, n, device="cuda").bfloat16()
    out = ops.matmul(a, b, kernel=kernel)
    for rows in (slice(0, 8), slice(-8, None)):
        assert_near(out[rows], a[rows].double() @ b.double(), a.dtype, f"rows {rows}")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_by_a_large_matrix(transposed: bool) -> None:
    room(6)
    side = 46_344
    a = torch.randn(8, side, device="cuda").bfloat16()
    b = large(side, side)
    b = b.T if transposed else b
    out = ops.matmul(a, b, kernel="cuda_raw.skinny")
    for columns in (slice(0, 16), slice(-16, None)):
        assert_near(out[:, columns], a.double() @ b[:, columns].double(), a.dtype, f"columns {columns}")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kernel", ["cuda_raw.flash_attention_v2", "cudnn.sdpa"])
def test_attention_of_many_elements(kernel: str) -> None:
    room(20)
    batch, heads, length, head_dim = 1032, 128, 128, 128
    q = large(batch, heads, length, head_dim)
    k, v = (torch.randn(batch, 1, length, head_dim, device="cuda").bfloat16() for _ in range(2))
    made: list[Any] = []
    no = refusal(lambda: made.extend(ops.attention(q, k, v, is_causal=True, return_lse=True, kernel=kernel)))
    if no is not None:
        assert kernel == "cudnn.sdpa", no
        assert kernel in no
        return
    out, lse = made
    ends = [slice(0, 1), slice(-1, None)]
    for end in ends:
        want, want_lse = exact_attention(q[end].double(), k[end].double(), v[end].double())
        assert_near(out[end], want, q.dtype, f"batch {end}")
        assert_near(lse[end], want_lse, q.dtype, f"lse of batch {end}")
    if kernel == "cudnn.sdpa":
        return
    grads = ops.attention_backward(out, q, k, v, out, lse, is_causal=True, kernel=kernel)
    for end in ends:
        leaves = [x[end].double().requires_grad_() for x in (q, k, v)]
        result, _ = exact_attention(*leaves)
        wanted = torch.autograd.grad(result, leaves, out[end].double())
        for got, want, name in zip(grads, wanted, "qkv", strict=True):
            assert_near(got[end], want, q.dtype, f"gradient of {name}, batch {end}")


@pytest.mark.usefixtures("clean")
def test_convolution_of_many_elements() -> None:
    """Right, or refused with a reason: cuDNN's engines count elements in 32 bits."""
    room(7)
    x = large(33, 64, 1024, 1024)
    weight = torch.randn(8, 64, 1, 1, device="cuda").bfloat16()
    tensors: list[torch.Tensor] = []
    no = refusal(lambda: tensors.append(ops.conv2d(x, weight)))
    if no is not None:
        assert "cudnn.conv_heuristic" in no
        return
    (out,) = tensors
    for one in (slice(0, 1), slice(-1, None)):
        want = torch.einsum("nchw,oc->nohw", x[one].double(), weight[:, :, 0, 0].double())
        assert_near(out[one], want, x.dtype, f"batch {one}")


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("channels_last", [False, True])
def test_depthwise_convolution_of_many_elements(channels_last: bool) -> None:
    """Of both layouts the fast kernel and, by the dilation, the general one."""
    room(14)
    x = large(33, 64, 1024, 1024)
    if channels_last:  # the same memory, seen otherwise
        x = x.view(33, 1024, 1024, 64).permute(0, 3, 1, 2)
    weight = torch.randn(64, 1, 3, 3, device="cuda").bfloat16()
    out = torch.empty_like(x)
    for dilation in (1, 2):
        out.fill_(float("nan"))
        how = {"padding": dilation, "dilation": dilation, "groups": 64}
        ops.conv2d(x, weight, out=out, kernel="cuda_raw.depthwise_conv", **how)
        for one in (slice(0, 1), slice(-1, None)):
            last = x[one, :, -64:].double()  # of which two at most lack their upper neighbors
            want = torch.nn.functional.conv2d(last, weight.double(), **how)
            assert_near(out[one, :, -62:], want[:, :, 2:], x.dtype, f"batch {one}, dilation {dilation}")
        assert not bool(out[-1].isnan().any())


def test_scratch_memory_goes_with_its_stream() -> None:
    dispatcher = _core.Dispatcher.instance()
    work = norm_backward_work(True, 4096, 1024)
    torch.cuda.synchronize()
    dispatcher.clear_workspaces()
    before = dispatcher.workspace_bytes()
    streams = [Stream("cuda:0") for _ in range(8)]
    for stream in streams:
        work(stream=stream)
    torch.cuda.synchronize()
    assert dispatcher.workspace_bytes() > before
    del streams, stream
    gc.collect()
    assert dispatcher.workspace_bytes() == before
    work()
    work.check()
